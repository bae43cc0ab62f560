"""Early exit: the target's own first layers, final norm and head draft for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for that; others can be tried, or
get a trained exit in place of the final norm. No second set of layers is loaded. The first layers
have caches of their own, so that they run twice on what is drafted; what the target has read by
itself is copied from its caches.

A trained exit is a convolution, an MLP and a norm. Kangaroo (Liu et al. 2024, arXiv 2404.18911) has
the attention of one more layer there: what the target gathers from the text in the layers that are
left out, its adapter gathers. Here the MLP reads a causal convolution over the last few states,
each channel by itself. That takes a third of the operations, and looks equally far in a text of any
length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.qwen2 import MLP

from specdec_mlx.drafters import lighter
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.target_ends import head_calls, watched_pass
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.errors import DraftModelError, HeadError
from specdec_mlx.target.keys_values import keys_values_of
from specdec_mlx.target.strategies import leaves
from specdec_mlx.types import DraftContext

EXIT_LAYER = "exit_layer"
"""Key of a config that tells a trained exit: after how many layers it leaves."""

WINDOW = "conv_kernel"
"""Key of its config: over how many positions its convolution goes, the own one included."""

_cache: ContextVar[Any] = ContextVar("cache", default=None)
"""The exit's cache in the pass that is being built in this thread."""


@dataclass(frozen=True, eq=False)
class ExitDrafter(ModelDrafter):
    """The target's first layers, with a trained exit or without.

    name: what it was loaded from. exit: what was trained, None for the target's own norm. copies:
    True if its caches may be filled with what the target's hold.
    """

    name: str = ""
    exit: Exit | None = None
    copies: bool = False

    def describe(self) -> str:
        """What was recognised, in a line."""
        return f"{self.name}: early exit after {len(self.model.layers)} layers, trained"

    def session(self, prompt: Sequence[int], context: DraftContext) -> ModelSession:
        """One that reads what the target has not."""
        if self.copies and context.target_caches is not None:
            return ExitSession(self, prompt, context)
        return super().session(prompt, context)


class ExitSession(ModelSession):
    """Copies what the target has read, so that a long prompt costs it next to nothing.

    attended: tokens behind the last one that its own layer looks at; 0 if it has none.
    """

    def __init__(self, drafter: ExitDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        """As any other."""
        super().__init__(drafter, prompt, context)
        self.attended = 0 if drafter.exit is None else drafter.exit.window - 1

    def catch_up(self) -> None:
        """Copy what was missed, and feed what cannot be copied."""
        self.copy_missed()
        super().catch_up()

    def copy_missed(self) -> None:
        """Take over keys and values of the tokens that it missed, if they are more than one.

        With them those of earlier turns, where its caches are its own and hold nothing. Not where
        they began elsewhere than the target's, or the target's forget. A trained exit's own layer
        is left to read what it attends to.
        """
        held, own = self.context.target_caches, self.rollback.caches[: len(self.model.layers)]
        missed = 0 if held is None else held.position - self.rollback.position
        if held is None or missed < 2 + self.attended:
            return
        read = [held.keys_values(i) for i in range(len(own))]
        is_new = self.callers_cache is None and own[0].offset == 0
        start, end = 0 if is_new else read[0].offset - missed, read[0].offset - self.attended
        whole = all(keys.shape[2] == offset for keys, _, offset in read)
        if whole and own[0].offset == start:
            for cache, (keys, values, _) in zip(own, read, strict=False):
                cache.update_and_fetch(keys[..., start:end, :], values[..., start:end, :])
            for cache in self.rollback.caches[len(own) :]:
                cache.trim(cache.offset)
            self.rollback.advance(missed - self.attended)

    def fork(self) -> ModelSession:
        """One that reads for itself: what the target holds is this one's text."""
        other = super().fork()
        other.context = replace(self.context, target_caches=None)
        return other


def early_exit(
    target: nn.Module, num_layers: int, *, greedy: bool = False, draft_temp: float | None = None
) -> ModelDrafter:
    """A drafter of the target's first layers.

    Args:
        target: a loaded model.
        num_layers: how many layers draft, at least one and fewer than the target has.
        greedy: see `ModelDrafter`.
        draft_temp: see `ModelDrafter`.

    Raises:
        HeadError: the target has not so many layers, or they cannot be run alone.
    """
    model = first_layers(target, num_layers)
    copies = fills_alike(target, model)
    return ExitDrafter(model, greedy=greedy, draft_temp=draft_temp, copies=copies)


def load_exit(files: HeadFiles, target: nn.Module, **options: Any) -> ExitDrafter:
    """The drafter of a trained exit.

    Args:
        files: where it is.
        target: the model that it was trained for.
        options: of `ModelDrafter`.

    Raises:
        HeadError: it does not fit the target, or is not complete.
    """
    shortened = first_layers(target, int(files.config[EXIT_LAYER]))
    tensors, _ = files.read(files.names)
    norm = final_norm(shortened)
    width = int(norm.weight.shape[0])
    theirs = files.config.get("hidden_size", width)
    if theirs != width:
        raise HeadError(
            f"{files.name}: its exit is for states of {theirs} numbers, and those of this target "
            f"have {width}. Use one that was trained for it."
        )
    trained = Exit({**files.config, "hidden_size": width})
    trained.load_weights([(name, x.astype(norm.weight.dtype)) for name, x in tensors.items()])
    copies = fills_alike(target, shortened)
    model = ExitModel(shortened, trained)
    return ExitDrafter(model, None, name=files.name, exit=trained, copies=copies, **options)


def first_layers(target: nn.Module, num_layers: int) -> nn.Module:
    """The target with its first layers only, as a model that shares all of its weights."""
    count = len(target.layers)
    if not 0 < num_layers < count:
        raise HeadError(
            f"Early exit after {num_layers} layers: expected 1 to {count - 1}, since the target "
            f"has {count}."
        )
    try:
        return lighter.first_layers(target, num_layers)
    except DraftModelError as error:
        raise HeadError(
            f"The first {num_layers} layers of {type(target).__module__} cannot be run alone. Try "
            "another number, or use a draft model."
        ) from error


def fills_alike(target: nn.Module, shortened: nn.Module) -> bool:
    """True if the caches of first layers come to hold what the target's first caches do."""
    theirs, own = make_prompt_cache(target), make_prompt_cache(shortened)
    first = list(leaves(theirs))[: len(own)]
    if len(first) < len(own) or any(type(cache) is not KVCache for cache in [*first, *own]):
        return False
    ids = mx.array([[0, 1]])
    target(ids, cache=theirs)
    shortened(ids, cache=own)
    if any(cache.empty() for cache in [*first, *own]):
        return False
    pairs = [(keys_values_of(first, i), keys_values_of(own, i)) for i in range(len(own))]
    return all(
        one.shape == other.shape and bool(mx.allclose(one, other, atol=1e-3).item())
        for mine, his in pairs
        for one, other in zip(mine[:2], his[:2], strict=True)
    )


def final_norm(model: nn.Module) -> nn.Module:
    """The module that makes the input of the model's head; raises HeadError if there is none."""
    calls, logits, _ = watched_pass(model)
    heads = head_calls(calls, logits)
    made = [call.module for call in calls if heads and call.result is heads[-1].given]
    small = [module for module in made if not module.children()]
    if not small:
        raise HeadError(
            f"The final norm of {type(model).__module__} was not found, so that it cannot be "
            "replaced by a trained exit. Use another kind of head."
        )
    norm: nn.Module = small[0]
    return norm


class Exit(nn.Module):  # type: ignore[misc]
    """norm(x + mlp(convolution(x))), what a trained exit has for the target's final norm.

    Args:
        config: hidden_size: D, width of the target's states. intermediate_size: of the MLP.
            conv_kernel: W, over how many positions the convolution goes, the own one included.
            rms_norm_eps: of both norms.

    Raises:
        KeyError: one of these is missing.
        ValueError: it would go over no position.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """As if there were no MLP, and it read its own position alone."""
        super().__init__()
        width, self.window = int(config["hidden_size"]), int(config[WINDOW])
        if self.window < 1:
            raise ValueError(f"{WINDOW} is {self.window}; expected 1 or more")
        self.input_norm = nn.RMSNorm(width, float(config["rms_norm_eps"]))
        self.kernel = mx.zeros((self.window, width))
        self.kernel[-1] = 1.0
        self.mlp = MLP(width, int(config["intermediate_size"]))
        self.mlp.down_proj.weight = mx.zeros_like(self.mlp.down_proj.weight)
        self.norm = nn.RMSNorm(width, float(config["rms_norm_eps"]))

    def __call__(self, x: mx.array) -> mx.array:
        """States [B, n, D] for the target's head, of the outputs [B, n, D] of the last layer run.

        Behind the cache of the pass, if it has one; else these are all positions of a text.
        """
        read = self.read_back(self.input_norm(x), _cache.get())
        states: mx.array = self.norm(x + self.mlp((read * self.kernel).sum(axis=-2)))
        return states

    def read_back(self, rows: mx.array, cache: Any) -> mx.array:
        """[B, n, W, D] each position and those before it, the oldest first; zeros before the text.

        Args:
            rows: [B, n, D] of the positions of this pass.
            cache: of those before; its keys are [B, 1, T, D], and its values of no width.
        """
        num_rows, mask = rows.shape[1], create_attention_mask(rows, cache)
        if cache is not None:
            keys, _ = cache.update_and_fetch(rows[:, None], rows[:, None, :, :0])
            rows = keys[:, 0]
        if isinstance(mask, mx.array):  # tells what comes before what, as in a tree
            seen = mx.where(mask, mx.arange(1, rows.shape[1] + 1), 0)
            last = mx.sort(seen, axis=-1)[:, -self.window :]
            last = mx.pad(last, [(0, 0), (self.window - last.shape[1], 0)])
            return _with_zeros(rows, rows.shape[1] + 1)[:, last]
        length = num_rows + self.window - 1
        rows = _with_zeros(rows[:, -length:], length)
        if num_rows == 1:
            return rows[:, None]
        return mx.stack([rows[:, i : i + num_rows] for i in range(self.window)], axis=2)


def _with_zeros(rows: mx.array, length: int) -> mx.array:
    """Rows [B, n, D] behind as many rows of zeros as make them `length`."""
    missing = length - rows.shape[1]
    return mx.pad(rows, [(0, 0), (missing, 0), (0, 0)]) if missing else rows


class ExitModel(nn.Module):  # type: ignore[misc]
    """The target's first layers with a trained exit, as a model.

    Args:
        shortened: those layers, see `first_layers`, whose final norm is replaced.
        trained: the exit.
    """

    def __init__(self, shortened: nn.Module, trained: Exit) -> None:
        """No weights are copied."""
        super().__init__()
        norm = final_norm(shortened)
        for part in shortened.modules():
            for name in [name for name, value in part.items() if value is norm]:
                part[name] = trained
        self.model = shortened

    @property
    def layers(self) -> list[nn.Module]:
        """Those of the target."""
        return list(self.model.layers)

    def make_cache(self) -> list[Any]:
        """Those of the target's layers, and the exit's."""
        return [*make_prompt_cache(self.model), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None, **inputs: Any) -> mx.array:
        """Logits [B, n, V] of tokens [B, n]."""
        before = _cache.set(cache[-1] if cache else None)
        try:
            logits: mx.array = self.model(tokens, cache=cache[:-1] if cache else None, **inputs)
        finally:
            _cache.reset(before)
        return logits
