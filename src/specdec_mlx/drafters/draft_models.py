"""Draft models as the commands load them: by name, and made lighter as their flags say."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.lighter import SubVocabulary, first_layers, most_frequent, quantized
from specdec_mlx.errors import DraftModelError
from specdec_mlx.models import load_model
from specdec_mlx.options import argument, positive_int


@dataclass(frozen=True)
class Lighter:
    """How to make a draft model lighter as it loads; None for each of them leaves it as it is.

    Args:
        bits: bits of a weight.
        layers: how many layers, from the first one on.
        vocabulary: file of a text whose tokens it chooses among; or, ending with .json, of a list
            of token ids, the most frequent first.
        vocabulary_size: how many of those, the most frequent.
    """

    bits: int | None = None
    layers: int | None = None
    vocabulary: Path | None = None
    vocabulary_size: int | None = None

    @property
    def flags(self) -> dict[str, str]:
        """What was asked for, by the flag that asks for it."""
        values = {flag_of(field.name): getattr(self, field.name) for field in fields(self)}
        return {flag: str(value) for flag, value in values.items() if value is not None}

    def bits_of_head(self) -> int | None:
        """Bits of a trained head; raises DraftModelError for what none can be made lighter by."""
        others = [flag for flag in self.flags if flag != flag_of("bits")]
        if others:
            raise DraftModelError(
                f"{', '.join(others)}: --draft-model is a trained head, which takes --draft-bits "
                f"alone. Leave {'them' if len(others) > 1 else 'it'} out."
            )
        return self.bits

    def applied_to(self, model: nn.Module, tokenizer: Any) -> nn.Module:
        """The lighter model, with its weights computed.

        Raises:
            DraftModelError: it cannot be made so.
            OSError: the vocabulary cannot be read.
        """
        if not self.flags:
            return model
        if self.bits is not None:
            model = quantized(model, self.bits)
        if self.layers is not None:
            model = first_layers(model, self.layers)
        if self.vocabulary is not None:
            tokens = read_vocabulary(self.vocabulary, tokenizer)[: self.vocabulary_size]
            model = SubVocabulary(model, [*tokens, *tokenizer.eos_token_ids])
        mx.eval(model.parameters())
        return model


def read_vocabulary(path: Path, tokenizer: Any) -> list[int]:
    """Token ids [n] in a file, the most frequent first; see `Lighter.vocabulary`.

    Raises:
        DraftModelError: there is none in it, or what is in it is not what its name says.
        OSError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else None
    except ValueError as error:
        raise DraftModelError(f"Draft vocabulary {path} cannot be read: {error}") from error
    if found is None:
        found = most_frequent(tokenizer.encode(text, add_special_tokens=False))
    if not (isinstance(found, list) and found and all(type(token) is int for token in found)):
        raise DraftModelError(
            f"Draft vocabulary {path}: expected a text, or in a .json file a list of token ids, "
            "the most frequent first."
        )
    return found


@runtime_checkable
class Arguments(Protocol):
    """A parser, or a group of its arguments."""

    def add_argument(self, *names: str, **options: Any) -> Any:
        """As in argparse."""
        ...


def add_lighter_arguments(parser: Arguments) -> None:
    """The flags that make a draft model lighter, for a parser that has --draft-model."""
    add, count = parser.add_argument, argument(positive_int)
    add("--draft-bits", type=count, metavar="N", help="Quantize the draft model to so many bits.")
    add("--draft-layers", type=count, metavar="N", help="Draft with its first layers only.")
    add(
        "--draft-vocabulary",
        type=Path,
        metavar="FILE",
        help="Draft only tokens that occur in this text; or, in a .json file, a list of token ids, "
        "the most frequent first.",
    )
    add(
        "--draft-vocabulary-size",
        type=count,
        metavar="N",
        help="Of those only the most frequent (default: all)",
    )


def lighter_of(arguments: argparse.Namespace) -> Lighter:
    """What these flags said; raises DraftModelError where there is nothing that they could mean."""
    given = {field.name: getattr(arguments, f"draft_{field.name}") for field in fields(Lighter)}
    lighter = Lighter(**given)
    if lighter.flags and not arguments.draft_model:
        raise DraftModelError(f"{', '.join(lighter.flags)}: give --draft-model MODEL as well.")
    if lighter.vocabulary_size is not None and lighter.vocabulary is None:
        raise DraftModelError("--draft-vocabulary-size: give --draft-vocabulary FILE as well.")
    return lighter


def flag_of(name: str) -> str:
    """The flag of a field of `Lighter`."""
    return f"--draft-{name.replace('_', '-')}"


def load_draft_model(name: Path | str, lighter: Lighter) -> tuple[nn.Module, Any]:
    """A draft model of a folder or a Hugging Face name, and its tokenizer.

    Raises:
        ModelFolderError: it cannot be loaded.
        DraftModelError: it cannot be made lighter in this way.
        OSError: its vocabulary cannot be read.
    """
    model, tokenizer = load_model(name)
    return lighter.applied_to(model, tokenizer), tokenizer


def draft_pair(arguments: argparse.Namespace) -> tuple[nn.Module | None, Any]:
    """The draft model that a command's flags name, and its tokenizer; (None, None) for none.

    Raises what `lighter_of` and `load_draft_model` raise.
    """
    lighter = lighter_of(arguments)
    return load_draft_model(arguments.draft_model, lighter) if arguments.draft_model else NO_PAIR


NO_PAIR = (None, None)
