"""Models, prompt caches and trained heads that the server loads when requests name them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import ModelProvider
from mlx_lm.utils import hf_repo_to_path, load_tokenizer

from specdec_mlx.contracts import DraftContext, Drafter, DraftSession, all_drafters
from specdec_mlx.draft_length.store import kept_tuning
from specdec_mlx.drafters.choosing.choice import NamedModel
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.shared_vocabulary import check_same_tokenizer
from specdec_mlx.errors import HeadError
from specdec_mlx.memory.store import state_of
from specdec_mlx.mlx_lm_plugin.conversation import remember, with_parts
from specdec_mlx.mlx_lm_plugin.flags import check_adapter
from specdec_mlx.mlx_lm_plugin.openai_fields import RequestError, is_clients
from specdec_mlx.mlx_lm_plugin.prefix_files import (
    Points,
    PrefixFiles,
    States,
    back_at,
    split,
    stateful,
    thinned,
)
from specdec_mlx.models import PerModel, explained
from specdec_mlx.verify.row_pass import reads_caches


class HeadToLoad:
    """A trained head, or a draft model that learns on, which is loaded for each target."""

    def __init__(self, path: str, load: Callable[..., Drafter | None], tokenizer: Any) -> None:
        """Load later, for a target with the tokenizer, None for any."""
        self.path, self.loaded, self.own_tokenizer = path, PerModel(load), tokenizer

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError for a target with another tokenizer."""
        if None not in (self.own_tokenizer, context.tokenizer):
            check_same_tokenizer(context.tokenizer, self.own_tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Raise HeadError: it is to be loaded first."""
        raise HeadError(f"{self.path} is made for a target; load it for that first.")


def with_heads(drafter: Drafter | None, target: nn.Module) -> Drafter | None:
    """The drafter, with its heads loaded for a target; raises HeadError if one does not fit."""

    def loaded(part: Drafter) -> Drafter:
        return (part.loaded(target) or part) if isinstance(part, HeadToLoad) else part

    return None if drafter is None else with_parts(drafter, loaded)


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """The drafter without parts that read the target's caches, which a batch does not give."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    return None if any(map(reads_caches, all_drafters(drafter))) else drafter


# Names of the most positions of a text in configurations
POSITIONS = "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"
LONGEST_TEXT = 2**20  # positions for models whose configuration names none
configuration: PerModel[dict[str, Any]] = PerModel(lambda model: {})  # that a model was loaded by


def longest_text(model: nn.Module) -> int:
    """Positions that a model's configuration gives a text, or `LONGEST_TEXT`."""
    config = configuration(model)
    config = {**config, **(config.get("text_config") or {})}
    named: list[int] = [config[n] for n in POSITIONS if isinstance(config.get(n), int)]
    if not named:
        return LONGEST_TEXT
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = scaling.get("original_max_position_embeddings") or named[0]
    return max(named[0], int(original * (scaling.get("factor") or 1)))


class ConversationCache(LRUPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt caches, with the tokens that they hold; one token is always left to feed.

    One entry stands for a conversation. Where its caches cannot be shortened, the ends of the
    shorter entries that it takes the place of are states to go back to. of_content: gives for a
    model's key one of what was loaded by it, and its files, None for none.
    """

    of_content: Callable[[Any], tuple[Any, PrefixFiles | None]] = staticmethod(
        lambda key: (key, None)
    )

    def fetch_nearest_cache(self, model: Any, tokens: list[Any]) -> tuple[Any, list[Any]]:
        """The cache [layers] that holds most of `tokens`, or None, and the tokens it lacks."""
        model, files = self.of_content(model)
        caches, at, length = self._nearest(model, tokens[:-1])
        if files is not None:
            kept, reached = files.longest(tokens[:-1])
            if reached > length and (entry := files.load(kept)) is not None:
                super().insert_cache(model, kept, entry)
                caches, at, length = self._nearest(model, tokens[:-1])
        if length == 0:
            return None, tokens
        held = tokens[:length]
        if stateful(caches):  # which takes its states along, also where it leaves the entry's text
            super().insert_cache(model, held, [*copy.deepcopy(caches), Points(at)])
        remember(caches, held if all(isinstance(token, int) for token in held) else [])
        return caches, tokens[length:]

    def _nearest(self, model: Any, tokens: list[Any]) -> tuple[list[Any], States, int]:
        """What `back_at` gives of the entry that holds most of the tokens."""
        found = self._trie.search(model, tokens)
        longest: tuple[list[Any], States, int] = [], {}, 0
        for held in filter(None, (found.exact, found.longer, found.shorter)):
            common = found.common_prefix if held is found.longer else len(held)
            entry = self._trie.get(model, held).prompt_cache
            longest = max(longest, back_at(entry, len(held), common), key=lambda one: one[-1])
        return longest

    def insert_cache(
        self,
        model: Any,
        tokens: list[Any],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Keep the caches that hold `tokens`, in the place of those that hold a part of them."""
        at: States = {}
        model, files = self.of_content(model)
        while stateful(prompt_cache) and (held := self._longest_held(model, tokens)):
            caches, earlier = split(self._pop(model, held).prompt_cache)
            at |= earlier | {len(held): stateful(caches)}
        at = thinned({p: states for p, states in at.items() if p < len(tokens)}, len(tokens))
        kept = [*prompt_cache, Points(at)] if at else prompt_cache
        super().insert_cache(model, tokens, kept, cache_type=cache_type)
        has_ended = cache_type == "assistant"
        if has_ended and files is not None:
            files.save(tokens, prompt_cache, at)

    def _longest_held(self, model: Any, tokens: list[Any]) -> list[Any] | None:
        found = self._trie.search(model, tokens)
        held: list[Any] | None = found.exact or found.shorter
        return held

    def _pop(self, model: Any, tokens: list[Any]) -> Any:
        """Take an entry out."""
        entry = self._trie.pop(model, tokens)
        self._lru.remove(model, tokens)
        self._n_bytes -= entry.nbytes
        self._n_bytes_by_type[entry.cache_type] -= entry.nbytes
        return entry


class CheckingProvider(ModelProvider):  # type: ignore[misc]
    """Loads models as mlx-lm does, also heads; compares tokenizers by content; keeps tunings."""

    head: Drafter | None = None
    batch: Any = None
    files: tuple[str, ...] = ()  # of what is loaded, with their sizes and times

    def __init__(self, kept: ExitStack | None, *args: Any) -> None:
        """Keep tunings in `kept`, None to keep none; `args` are mlx-lm's."""
        self._kept = kept
        super().__init__(*args)
        if (given := self.cli_args.model) is not None:  # `/v1/models` lists it by its full path
            self._model_map[str(Path(given).resolve())] = given

    def reset(self) -> None:
        """Keep the tunings, and empty the models: mlx-lm's loop still holds the target."""
        if self.batch is not None:
            self.batch.close()
        if self._kept is not None:
            self._kept.close()
        for model in filter(None, (self.model, self.draft_model)):
            for part in list(model.modules()):  # some of which are kept with what is known of it
                part.clear()
        self.head = None
        super().reset()

    def load(self, *names: Any) -> Any:
        """As in mlx-lm; raises RequestError for a model or adapter that cannot be loaded."""
        try:
            return super().load(*names)
        except (ValueError, OSError) as error:
            raise error if is_clients(error) else RequestError(str(error)) from error

    def _load(self, model: Any, adapter: Any = None, draft_model: Any = None) -> None:
        if model is None:
            raise RequestError("This server was started without --model. Name a model.")
        check_adapter(adapter)
        is_head = NamedModel(draft_model).is_head
        with explained(model):
            super()._load(model, adapter, None if is_head else draft_model)
        names = filter(None, (model, adapter, None if is_head else draft_model))
        self.files = tuple(state for name in names for state in _states(str(name)))
        if self._kept is not None:
            self._kept.enter_context(kept_tuning(self.model, str(model), adapter))
        try:
            if is_head:
                self.head = load_head(draft_model, self.model, torch_files=False)
                self.model_key = (model, adapter, draft_model)
                self.is_batchable = False
            elif draft_model is not None:
                check_same_tokenizer(self.tokenizer, load_tokenizer(draft_model))
        except ValueError:
            self.reset()
            raise


def _states(name: str) -> list[str]:
    """Name, size and time of each file that was loaded by a folder or a Hugging Face name."""
    folder = Path(name).expanduser()
    folder = folder if folder.exists() else hf_repo_to_path(name)
    return [f"{path} {state_of(str(path))}" for path in sorted(folder.iterdir())]
