"""The arguments of mlx-lm's samplers, which stand in their closures' cells, and penalties' windows.

To see that they were read rightly, the sampler is made again and the two are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from mlx_lm.sample_utils import make_sampler

from specdec_mlx.contracts import LogitsProcessor
from specdec_mlx.sampling.distribution import Sampler, Sampling

METHODS = "sampling_methods"
TEMPERATURE = "temp"
CONTEXT_SIZE = "context_size"
BIAS_CELLS = {"indices", "values"}


def read_sampler(sampler: Sampler | Sampling | None) -> Sampling | None:
    """The `Sampling` of one of our samplers or mlx-lm's, or None (greedy); else None.

    Raises ValueError for a sampler of mlx-lm's that draws from no distribution.
    """
    if isinstance(sampler, Sampling):
        return sampler
    if sampler is None or _same(sampler, make_sampler(0.0)):
        return Sampling()
    arguments = _arguments(sampler)
    if arguments is None:
        return None
    try:
        again = make_sampler(**arguments)
    except (TypeError, ValueError):
        return None
    return Sampling(**arguments) if _same(sampler, again) else None


def max_window(processors: Sequence[LogitsProcessor]) -> int | None:
    """How many of the last tokens are enough for all of these, at least 1; None for all tokens."""
    windows = [_window(processor) for processor in processors]
    known = [window for window in windows if window is not None]
    return max(1, *known) if known and len(known) == len(windows) else None


def _window(processor: LogitsProcessor) -> int | None:
    cells = _cells(processor) or {}
    if cells.keys() == BIAS_CELLS:
        return 1
    size = cells.get(CONTEXT_SIZE)
    # tokens[-0:] is all of them
    return size if isinstance(size, int) and size > 0 else None


def _arguments(sampler: Callable[..., Any]) -> dict[str, Any] | None:
    cells = _cells(sampler)
    if cells is None or cells.keys() != {METHODS, TEMPERATURE}:
        return None
    arguments = {TEMPERATURE: cells[TEMPERATURE]}
    for method in cells[METHODS]:
        arguments |= _cells(method) or {}
    return arguments


def _cells(function: Any) -> dict[str, Any] | None:
    """Names and contents of a closure's cells; None for what is no function of mlx-lm's."""
    is_function = isinstance(function, FunctionType)
    if not is_function or function.__module__ != make_sampler.__module__:
        return None
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _same(a: Any, b: Any) -> bool:
    """True if two samplers are the same functions over the same values."""
    cells_a, cells_b = _cells(a), _cells(b)
    if cells_a is None or cells_b is None or a.__code__ != b.__code__:
        return False
    methods_a, methods_b = cells_a.pop(METHODS, []), cells_b.pop(METHODS, [])
    return (
        cells_a == cells_b
        and len(methods_a) == len(methods_b)
        and all(_same(x, y) for x, y in zip(methods_a, methods_b, strict=True))
    )
