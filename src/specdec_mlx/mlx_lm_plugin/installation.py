"""mlx-lm's own calls speculate: `install()`, `uninstall()`, `with patched():`.

`generate_step`, `speculative_generate_step` and `batch_generate` of `mlx_lm.generate` are replaced,
there and in each module that has them by name. `mlx_lm.generate` and `mlx_lm.stream_generate` look
the first two up when they run, wherever they were imported.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import logging
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import generation_stream

from specdec_mlx.arguments import DEFAULT_DRAFTER
from specdec_mlx.batch_generation import batch_generate
from specdec_mlx.contracts import AcceptanceRule, Drafter, LogitsProcessor
from specdec_mlx.draft_length.value import DraftLength, make_draft_length
from specdec_mlx.drafters.choosing.choice import AnyDrafter, resolve
from specdec_mlx.drafters.grammar import Grammar, GrammarProcessor, with_forced
from specdec_mlx.errors import MlxLmVersionError
from specdec_mlx.kernels import Kernels, make_kernels
from specdec_mlx.loop import speculate
from specdec_mlx.options import Options
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import Noise
from specdec_mlx.stats.account import SpeculationStats

OLDEST, NEXT = "0.31.3", "0.33"
"""Known versions of mlx-lm: from OLDEST on, and before NEXT."""

INSTALL = f"pip install 'mlx-lm>={OLDEST},<{NEXT}'"
NAMES = "generate_step", "speculative_generate_step"
BATCH_OPTIONS = {"sampler", "stream", "prefill_step_size", "completion_batch_size"}
"""Options that our batches take. With any other option mlx-lm's own function writes the batch."""
# By name, because the attribute `mlx_lm.generate` is the function.
STEPS: Any = importlib.import_module("mlx_lm.generate")


def check_version() -> None:
    """Raise MlxLmVersionError for an mlx-lm that is too old, or whose functions have changed.

    Warns of a newer mlx-lm whose functions are unchanged.
    """
    installed = mlx_lm.__version__
    if _numbers(installed) < _numbers(OLDEST):
        raise MlxLmVersionError(
            f"mlx-lm {installed} is older than {OLDEST}, the first version that specdec_mlx can "
            f"extend. {INSTALL}; or call specdec_mlx.generate, which replaces nothing."
        )
    if _numbers(installed) >= _numbers(NEXT):
        for name in NAMES:
            check_parameters(name)
        _warn_of(installed)


@functools.cache
def _warn_of(version: str) -> None:
    logging.getLogger(__name__).warning(
        f"mlx-lm {version} is newer than the versions that specdec_mlx was tested with, which are "
        f"below {NEXT}. Its functions are as they were, so this goes on."
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def check_parameters(name: str) -> None:
    ours = {"model", "prompt", "draft_model", "num_draft_tokens"}
    ours |= {field.name for field in fields(Options)}
    step = getattr(STEPS, name, None)
    taken = () if step is None else inspect.signature(step).parameters
    if step is None or (unknown := set(taken) - ours):
        what = "is not there" if step is None else f"takes {', '.join(sorted(unknown))}"
        raise MlxLmVersionError(
            f"mlx_lm.generate.{name} of mlx-lm {mlx_lm.__version__} {what}, which specdec_mlx does "
            f"not know. {INSTALL}."
        )


def check_step(name: str) -> None:
    """Raise MlxLmVersionError unless the function to replace is mlx-lm's own and is known."""
    check_version()
    step = getattr(STEPS, name)
    if (owner := getattr(step, "__module__", None)) != STEPS.__name__:
        raise MlxLmVersionError(
            f"mlx_lm.generate.{name} has been replaced by one of {owner}. Undo that first."
        )
    check_parameters(name)


@dataclass(eq=False)
class Speculation:
    """How mlx-lm's calls speculate while this is in force, and the account of the latest call.

    Attributes:
        drafter, num_draft_tokens, rule, tokenizer, kernels, ties: as in `speculate`.
        grammar: of each text, or None. It needs the tokenizer.
        stats: of the latest generation. None before the first.
        is_seeded: MLX's global state, which `mx.random.seed` sets, is the caller's seed.
    """

    drafter: Drafter | None
    num_draft_tokens: int | str | DraftLength = "auto"
    rule: str | AcceptanceRule = "auto"
    tokenizer: Any = None
    grammar: Grammar | None = None
    stats: SpeculationStats | None = None
    is_seeded: bool = True
    kernels: Kernels | None = None
    ties: str | None = None

    def steps(
        self,
        drafter: Drafter | None,
        num_fields: int,
        *,
        prompt: mx.array,
        num_draft_tokens: int | str | DraftLength | None = None,
        logits_processors: Sequence[LogitsProcessor] | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Tokens, log-probabilities and, with 3 fields, whether each token was drafted."""
        processors = list(logits_processors or ())
        if self.grammar is not None:
            processors.append(GrammarProcessor(self.grammar, self.tokenizer))
        drafter = with_forced(drafter, processors)
        length = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        tokens = speculate(
            prompt_tokens=prompt,
            drafter=drafter,
            num_draft_tokens=length,
            rule=self.rule,
            ties=self.ties,
            seed=self.new_seed(),
            tokenizer=self.tokenizer,
            logits_processors=processors,
            kernels=self.kernels,
            **options,
        )
        with closing(tokens):
            for token in tokens:
                self.stats, logprobs = token.stats, token.logprobs
                _latest.drafted = logprobs if token.from_draft else None
                yield (token.token, logprobs, token.from_draft)[:num_fields]

    def batch(self, arguments: dict[str, Any]) -> Any:
        response = batch_generate(
            **arguments,
            drafter=self.drafter,
            num_draft_tokens=self.num_draft_tokens,
            rule=self.rule,
            seed=self.new_seed(),
            kernels=self.kernels,
        )
        self.stats = response.speculation[-1] if response.speculation else self.stats
        return response

    def new_seed(self) -> int | None:
        """The next seed from MLX's global state. None if that is not the caller's."""
        return Noise.from_global_state().seed if self.is_seeded else None


class GenerationResponse(STEPS.GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response with the right `from_draft`, also without a draft model."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        drafted = getattr(_latest, "drafted", None)
        # mlx-lm passes only the log-probabilities on, so that the array identifies the token.
        self.from_draft |= drafted is not None and self.logprobs is drafted


# `drafted`: log-probabilities of this thread's latest token, if it was drafted
_latest = threading.local()
_lock = threading.RLock()
_stack: list[Speculation] = []  # in force, the latest last
_steps: dict[str, tuple[Any, Any]] = {}  # mlx-lm's own and ours, by name
_installed = ExitStack()  # undone by `uninstall`
_by_install: list[Speculation] = []  # the speculation of `install`, if any


@contextmanager
def in_force(speculation: Speculation) -> Iterator[Speculation]:
    with _lock:
        if not _stack:
            _replace()
        _stack.append(speculation)
    try:
        yield speculation
    finally:
        with _lock:
            # Blocks in threads may end in any order, so that this need not be the last one.
            _stack.remove(speculation)
            for name, (original, ours) in _steps.items() if not _stack else ():
                _put(name, ours, original)


def _replace() -> None:
    for name in NAMES:
        check_step(name)
    ours = {name: _stepping(getattr(STEPS, name)) for name in NAMES}
    ours["batch_generate"] = _batching(STEPS.batch_generate)
    ours["GenerationResponse"] = GenerationResponse
    for name, replacement in ours.items():
        _steps[name] = getattr(STEPS, name), replacement
        _put(name, *_steps[name])


def _put(name: str, old: Any, new: Any) -> None:
    """Replace a function in each module that has it by its name, except in ours."""
    modules = sys.modules if inspect.isfunction(old) else {STEPS.__name__: STEPS}
    for key, module in list(modules.items()):
        # Leave a function that somebody else has put there.
        is_there = getattr(module, "__dict__", {}).get(name) is old
        if is_there and not key.startswith("specdec_mlx"):
            setattr(module, name, new)


def _stepping(original: Any) -> Any:
    """A step of mlx-lm that speculates. A draft model replaces the drafter in force."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def step(*args: Any, history: Sequence[int] | None = None, **kwargs: Any) -> Any:
        # The block entered last counts, in whichever thread.
        speculation = next(reversed(_stack), None)
        options = {"stream": generation_stream, **signature.bind(*args, **kwargs).arguments}
        if speculation is None or not _can_draft(options):
            return original(*args, **kwargs)
        options["history"] = history
        if "draft_model" not in options:
            return speculation.steps(speculation.drafter, 2, **options)
        drafter = resolve(options.pop("draft_model"))
        num_draft_tokens = options.pop("num_draft_tokens", None)
        return speculation.steps(drafter, 3, num_draft_tokens=num_draft_tokens, **options)

    return step


def _batching(original: Any) -> Any:
    """mlx-lm's batch function, which uses ours if ours takes all arguments."""
    signature, known = inspect.signature(original), inspect.signature(batch_generate)

    @functools.wraps(original)
    def batch(*args: Any, **kwargs: Any) -> Any:
        speculation = next(reversed(_stack), None)
        arguments = signature.bind(*args, **kwargs).arguments
        more = arguments.pop("kwargs", {})
        more.pop("prefill_batch_size", None)  # has no effect on the texts
        is_known = not more.keys() - BATCH_OPTIONS and not arguments.keys() - known.parameters
        if speculation is None or speculation.drafter is None or not is_known:
            return original(*args, **kwargs)
        return speculation.batch(arguments | more)

    return batch


def _can_draft(options: dict[str, Any]) -> bool:
    """True if there is a text to draft from, and nothing that mlx-lm itself refuses."""
    if options.get("input_embeddings") is None:
        return True
    is_supported = STEPS.does_model_support_input_embeddings(options["model"])
    return len(options["prompt"]) > 0 and bool(is_supported)


def install(drafter: AnyDrafter = DEFAULT_DRAFTER, **options: Any) -> Speculation:
    """Let mlx-lm's own calls speculate in this process until `uninstall`.

    A call's own `draft_model=` has priority. It takes the same values as `drafter`, and
    `num_draft_tokens=` is then the draft length. A call also takes `history=`, the tokens that a
    program read into `prompt_cache` itself. A second `install` replaces the first. After
    `mx.random.seed`, a call generates one text, as with our `seed`.

    Args:
        drafter: as in `generate`. A trained head is the object that `load_head` returns.
        options: num_draft_tokens, rule, tokenizer and kernels, see `Speculation`.

    Returns:
        The speculation in force, with the account of the latest generation.

    Raises:
        MlxLmVersionError: this mlx-lm cannot be extended.
        UnknownNameError: no drafter, draft length or rule has this name.
        ValueError: the drafter or rule does not take these options.
    """
    # Enter the new block before the old one is closed: wrong options must leave the old `install`
    # in force.
    block = patched(drafter, **options)
    with _lock:
        speculation = block.__enter__()
        _installed.close()
        _installed.push(block)
        _by_install[:] = [speculation]
    return speculation


@atexit.register
def uninstall() -> None:
    """Undo `install`, if it was called. mlx-lm is then exactly as before."""
    with _lock:
        if any(speculation.stats is None for speculation in _by_install):
            _say_unseen()
        _by_install.clear()
        _installed.close()


@functools.cache
def _say_unseen() -> None:
    """Log, once, that no call of mlx-lm was seen."""
    logging.getLogger(__name__).warning(
        "specdec_mlx.install() was in force, and no generation was seen: this program has a loop "
        "of its own, or took mlx-lm's generate_step before by another name. See docs/cookbook.md."
    )


@contextmanager
def patched(
    drafter: AnyDrafter = DEFAULT_DRAFTER,
    *,
    num_draft_tokens: int | str | DraftLength = "auto",
    rule: str | AcceptanceRule = "auto",
    tokenizer: Any = None,
    kernels: Kernels | str | None = None,
) -> Iterator[Speculation]:
    """Let mlx-lm's own calls speculate inside the `with` block; arguments as for `install`.

    Blocks may be nested, and may overlap in threads. The block entered last counts for new
    generations.
    """
    make_draft_length(num_draft_tokens)  # to raise now rather than at the first token
    make_rule(rule)
    how: dict[str, Any] = {"tokenizer": tokenizer, "kernels": make_kernels(kernels)}
    with in_force(Speculation(resolve(drafter), num_draft_tokens, rule, **how)) as made:
        yield made
