"""How a table of cases is run: which of it in the full run only, and what of it as one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

FULL = pytest.mark.full  # marks what `make test` leaves to `make test-rest`


def each(table: Iterable[Any], check: Callable[[Any], object]) -> None:
    """Check every case of a table; all that fail are told together, each by name."""
    faults: list[BaseException] = []
    for case in table:
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"The case: {case!r:.200}")
            faults.append(error)
    if faults:
        raise BaseExceptionGroup(f"{len(faults)} cases fail", faults)


def in_one_test(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Any], Any]:
    """Like `parametrize`, but all cases are one test: for those that take no time."""
    given, rows = (names,) if isinstance(names, str) else names, list(table)
    assert rows, "no case would be checked"

    def decorate(test: Any) -> Any:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            def check(case: Any) -> None:
                values = case if len(given) > 1 else (case,)
                test(**dict(zip(given, values, strict=True)), **fixtures)

            each(rows, check)

        others = [p for name, p in signature.parameters.items() if name not in given]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate


def cases(table: Iterable[Any], *always: Any) -> list[Any]:
    """All cases of a table, for `parametrize`; those not named run in the full run only."""
    everything = list(table)
    unknown = [case for case in always if case not in everything]
    assert always, "name a case that always runs"
    assert not unknown, f"not in the table: {unknown}"
    return [case if case in always else _in_the_full_run(case) for case in everything]


def _in_the_full_run(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=FULL)
