"""The files that a call passes before the target is fed its first position: counted, not timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import specdec_mlx as sd
import tiny
import tiny_text

ENTERED = {"no drafter": 14, "a drafter": 16, "the default": 16}
"""Most files of this package; lower them with the code, and raise them for nothing."""


class FedError(Exception):
    """The target was fed."""


def files_entered(**how: Any) -> set[str]:
    """Files of this package of which a function runs before the target's first pass."""
    model, tokenizer = tiny.build("qwen2", **tiny_text.SHAPE), tiny_text.tokenizer()
    given: Any = {"max_tokens": 4, **how}
    sd.generate(model, tokenizer, [1, 2, 3, 1, 2], **given)  # what is worked out once is known
    own, kind, entered = str(Path(sd.__file__).parent), type(model), set[str]()

    class Fed(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *given: Any, **options: Any) -> Any:
            sys.setprofile(None)
            raise FedError

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            entered.add(frame.f_code.co_filename.removeprefix(own))

    model.__class__ = Fed
    sys.setprofile(count)
    try:
        with pytest.raises(FedError):
            sd.generate(model, tokenizer, [1, 2, 3, 1, 2], **given)
    finally:
        sys.setprofile(None)
    return entered


def test_a_call_enters_few_files_before_the_first_position_is_fed() -> None:
    """Plain decoding, a drafter that is given, and the default one."""
    ways: dict[str, dict[str, Any]] = {
        "no drafter": {"drafter": None},
        "a drafter": {"drafter": sd.SuffixDrafter()},
        "the default": {},
    }
    for name, how in ways.items():
        assert len(entered := files_entered(**how)) <= ENTERED[name], (name, sorted(entered))
