"""Models that the server loads when asked to, their prompt caches, and drafters made for them.

Such drafters are trained heads, and what learns on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import ModelProvider
from mlx_lm.utils import load_tokenizer

from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.heads.loading import is_head, load_head
from specdec_mlx.drafters.tokenizers import check_same_tokenizer
from specdec_mlx.errors import HeadError
from specdec_mlx.mlx_lm_plugin.conversation import remember
from specdec_mlx.mlx_lm_plugin.flags import check_adapter
from specdec_mlx.mlx_lm_plugin.openai_fields import RequestError, is_clients
from specdec_mlx.models import explained
from specdec_mlx.per_model import PerModel
from specdec_mlx.target.strategies import leaves
from specdec_mlx.types import DraftContext, Drafter, DraftSession, ReadsTarget, all_drafters


class HeadToLoad:
    """A trained head, or a draft model that learns on, that is loaded for each target.

    Args:
        path: folder or Hugging Face name.
        load: loads it for a target.
        draft_tokenizer: that the target's must be the same as; None for any.
    """

    def __init__(
        self, path: str, load: Callable[[nn.Module], Drafter], draft_tokenizer: Any = None
    ) -> None:
        """Nothing is loaded yet."""
        self.path = path
        self.loaded = PerModel(load)
        self.draft_tokenizer = draft_tokenizer

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with another tokenizer."""
        if None not in (self.draft_tokenizer, context.tokenizer):
            check_same_tokenizer(context.tokenizer, self.draft_tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Not without a target."""
        raise HeadError(f"{self.path} is made for a target; load it for that first.")


def with_heads(drafter: Drafter | None, target: nn.Module) -> Drafter | None:
    """The drafter, with the heads in it loaded for a target, once for each.

    Raises:
        HeadError: one does not fit.
    """
    if isinstance(drafter, HeadToLoad):
        return drafter.loaded(target)
    if isinstance(drafter, FirstOf):
        return drafter.with_each(lambda part: with_heads(part, target) or part)
    return drafter


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """What of a drafter needs no states of the target, which several texts at once do not show."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    reads = any(isinstance(part, ReadsTarget) for part in all_drafters(drafter))
    return None if reads else drafter


POSITIONS = "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"
"""What configurations call the most positions of a text."""

LONGEST_TEXT = 2**20
"""Positions of a text for models whose configuration names none."""


def longest_in(config: dict[str, Any]) -> int:
    """Positions that a model's configuration gives it, or `LONGEST_TEXT`."""
    config = {**config, **(config.get("text_config") or {})}
    named: list[int] = [config[n] for n in POSITIONS if isinstance(config.get(n), int)]
    if not named:
        return LONGEST_TEXT
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings") or named[0]
    return max(named[0], int(original * (scaling.get("factor") or 1)))


def longest_in_memory(model: nn.Module) -> int:
    """Positions whose keys and values fill this machine's memory; nothing is computed."""
    caches, sizes = make_prompt_cache(model), []
    for num_tokens in (1, 1024):
        model(mx.zeros((1, num_tokens), mx.uint32), cache=caches)
        growing = [cache for cache in leaves(caches) if not hasattr(cache, "max_size")]
        sizes.append(sum(int(cache.nbytes) for cache in growing))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory * 1024 // max(1, sizes[1] - sizes[0])


longest_text: PerModel[int] = PerModel(longest_in_memory)
"""Positions that there are for a text of a model."""


class ConversationCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt caches of earlier turns, with the tokens that they hold.

    At least one token of a prompt is left to be fed, also if it was fed before to its end.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[Any, list[Any]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
            rest = [*rest, tokens[-1]]
        if len(rest) == len(tokens):  # a cache that was trimmed to nothing
            return None, rest
        if cache is not None:
            held = tokens[: len(tokens) - len(rest)]
            remember(cache, held if all(isinstance(token, int) for token in held) else [])
        return cache, rest


class CheckingProvider(ModelProvider):  # type: ignore[misc]
    """Loads models as mlx-lm does, compares tokenizers by content, and takes up the tuning."""

    def __init__(self, kept: ExitStack | None, *args: Any) -> None:
        """Keep tunings in `kept`, if there is one; the rest is mlx-lm's."""
        self._kept = kept
        self.head: Drafter | None = None
        self.batch: Any = None
        super().__init__(*args)
        if (given := self.cli_args.model) is not None:  # `/v1/models` lists it by its full path
            self._model_map[str(Path(given).resolve())] = given

    def reset(self) -> None:
        """Keep what was learned about the models, and free their weights; nobody is served then.

        mlx-lm lets go of them here, but a local variable of its own loop still holds the target
        while the next one loads; so they are emptied.
        """
        if self.batch is not None:
            self.batch.close()
        if self._kept is not None:
            self._kept.close()
        for model in (self.model, self.draft_model):
            if model is not None:
                model.clear()
        self.head = None
        super().reset()

    def load(self, *names: Any) -> Any:
        """As in mlx-lm; what a request names that cannot be loaded is the request's fault."""
        try:
            return super().load(*names)
        except (ValueError, OSError) as error:
            raise error if is_clients(error) else RequestError(str(error)) from error

    def _load(
        self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None
    ) -> None:
        if model_path is None:
            raise RequestError("This server was started without --model. Name a model.")
        check_adapter(adapter_path)
        is_a_head = draft_model_path is not None and is_head(draft_model_path)
        with explained(model_path):
            super()._load(model_path, adapter_path, None if is_a_head else draft_model_path)
        if is_a_head:
            self._load_head(draft_model_path)
            self.model_key = (model_path, adapter_path, draft_model_path)
        if self._kept is not None:
            self._kept.enter_context(kept_tuning(self.model, str(model_path), adapter_path))
        if draft_model_path is not None and not is_a_head:
            try:
                check_same_tokenizer(self.tokenizer, load_tokenizer(draft_model_path))
            except ValueError:
                self.reset()
                raise

    def _load_head(self, path: Any) -> None:
        """A trained head that a request names as its draft model; such requests are not batched."""
        try:
            self.head = load_head(path, self.model, torch_files=False)
        except ValueError:
            self.reset()
            raise
        self.is_batchable = False
