"""mlx-lm's own commands, with our drafters."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mlx_lm import load

from specdec_mlx.acceptance import rule_names
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.registry import drafter_names
from specdec_mlx.generate import generate
from specdec_mlx.sampling import Sampling

DEFAULT_DRAFTER = "prompt-lookup"


def run_generate(arguments: Sequence[str]) -> None:
    """`mlx_lm generate` with all its flags, and --drafter, --draft-length and --rule beside them.

    mlx-lm's own `main` runs; three names in its module are replaced meanwhile: the parser gets our
    flags, the sampler is one whose law is known, and `generate` is ours.
    """
    module = importlib.import_module("mlx_lm.generate")
    options: dict[str, Any] = {}

    def setup_arg_parser() -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = original_parser()
        add_arguments(parser)
        parse = parser.parse_args

        def parse_args(*args: Any, **kwargs: Any) -> argparse.Namespace:
            namespace: argparse.Namespace = parse(*args, **kwargs)
            options.update(take_options(namespace))
            return namespace

        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]
        return parser

    def generate_with_drafter(model: Any, tokenizer: Any, prompt: Any, **kwargs: Any) -> str:
        kwargs.pop("draft_model", None)
        kwargs.pop("num_draft_tokens", None)
        return generate(model, tokenizer, prompt, **kwargs, **options)

    original_parser: Callable[[], Any] = module.setup_arg_parser
    replaced = {
        "setup_arg_parser": setup_arg_parser,
        "make_sampler": Sampling,
        "generate": generate_with_drafter,
    }
    with replaced_names(module, replaced), replaced_argv(["specdec-mlx generate", *arguments]):
        module.main()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our flags."""
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--drafter",
        default=None,
        metavar="NAME[:KEY=VALUE,...]",
        help=f"Drafter: {', '.join(drafter_names())}, or none (default: {DEFAULT_DRAFTER}, or the "
        "draft model if --draft-model is given)",
    )
    group.add_argument(
        "--draft-length",
        type=int,
        default=None,
        metavar="K",
        help="Most tokens to draft in a round (default: 4, or --num-draft-tokens with a draft "
        "model)",
    )
    group.add_argument(
        "--rule",
        default="auto",
        choices=rule_names(),
        help="Acceptance rule (default: %(default)s)",
    )


def take_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Arguments for `generate` out of the parsed flags; takes --draft-model from mlx-lm's `main`.

    mlx-lm would compare the tokenizers by size alone.
    """
    options: dict[str, Any] = {"rule": namespace.rule, "seed": namespace.seed}
    draft_model, namespace.draft_model = namespace.draft_model, None
    if draft_model is not None and namespace.drafter not in (None, "model"):
        raise SystemExit("Give --drafter or --draft-model, not both.")
    if draft_model is not None:
        options["drafter"] = ModelDrafter(*load(draft_model))
        options["draft_length"] = namespace.num_draft_tokens
    elif namespace.drafter != "none":
        options["drafter"] = namespace.drafter or DEFAULT_DRAFTER
    if namespace.draft_length is not None:
        options["draft_length"] = namespace.draft_length
    return options


@contextmanager
def replaced_names(module: Any, names: dict[str, Any]) -> Iterator[None]:
    """Bind names of a module to other objects, and restore them exactly."""
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def replaced_argv(argv: list[str]) -> Iterator[None]:
    """Give a `main` that reads sys.argv other arguments."""
    before = sys.argv
    sys.argv = argv
    try:
        yield
    finally:
        sys.argv = before
