"""Trainees that draft on from their own states: multi-token prediction and EAGLE-3.

They are trained for several steps on these states (EAGLE-3's training-time test, Li et al. 2025,
arXiv 2503.01840, section 3.2): each position of a window begins a draft of the text's tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.drafters.heads.eagle import IDS_KEY, Eagle3, Eagle3Config
from specdec_mlx.drafters.heads.mtp import FAMILIES, LAYER, MTPHead
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary
from specdec_mlx.errors import TrainingError
from specdec_mlx.training.features import Batch
from specdec_mlx.training.trainees import Prediction, Recipe, Trainee

MTP_TYPE = "llama_mtp"
DRAFT_VOCAB = 32_000  # most tokens that an EAGLE-3 head proposes by default, as in published heads


class StepCache:
    """Keys and values of the steps of drafts that begin at every position of a window.

    Row t of step k, the k-th token of the draft begun at row t - k + 1, sees the first step up to
    there, and of later steps its own draft's.
    """

    offset = 0

    def __init__(self) -> None:
        self.steps: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add those of a step; return those of all steps, the earlier first."""
        self.steps.append((keys, values))
        all_keys, all_values = (list(parts) for parts in zip(*self.steps, strict=True))
        return mx.concatenate(all_keys, axis=2), mx.concatenate(all_values, axis=2)

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str:
        """Entries that each row of the next step sees, bool [length, steps * length]."""
        later = len(self.steps)
        if not later and not return_array:
            return "causal"
        rows, entries = mx.arange(length)[:, None], mx.arange(length)[None]
        masks = [entries <= rows - later]
        masks += [entries == rows - later + step for step in range(1, later + 1)]
        if later:  # the first rows have no draft so long: they see themselves, and do not count
            masks[-1] = entries == rows
        return mx.concatenate(masks, axis=1)


def mtp(recipe: Recipe) -> Trainee:
    """A multi-token prediction layer, a decoder layer of Llama's kind, saved as MLX copies are."""
    size, ends = recipe.size, recipe.ends
    config = {
        "model_type": MTP_TYPE,
        "architectures": ["LlamaMTP"],
        "num_hidden_layers": 1,
        **size.llama(ends.width, ends.vocab_size),
    }
    head = MTPHead(FAMILIES[MTP_TYPE], config, ends)
    if size.draft_vocab is not None and size.draft_vocab < ends.vocab_size:
        head.choose_among(_frequent(recipe, size.draft_vocab))
    names = FAMILIES[MTP_TYPE].names
    ours = {f"body.{LAYER}": LAYER, "body.norm.": f"{names['norm']}."}
    ours |= {f"{name}.": f"{theirs}." for name, theirs in names.items() if name != "norm"}
    return _recursive(head, recipe, config, ours)


def eagle3(recipe: Recipe) -> Trainee:
    """An EAGLE-3 head over the outputs of three layers, saved by SafeAILab's names."""
    size, ends = recipe.size, recipe.ends
    width, depth = size.width or ends.width, ends.num_layers
    layers = size.layers or (1, depth // 2 - 1, depth - 4)  # of the paper's code
    if not size.layers and sorted(set(layers)) != list(layers):  # of few layers the last three
        layers = tuple(range(max(1, depth - 3), depth))
    num = min(size.draft_vocab or DRAFT_VOCAB, ends.vocab_size)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        **size.llama(width, ends.vocab_size),
        "draft_vocab_size": num,
        "target_hidden_size": ends.width,
        "tie_word_embeddings": False,
        "eagle_config": {IDS_KEY: stored_ids(layers), "use_aux_hidden_state": True},
    }
    vocabulary = _frequent(recipe, num)
    own = {"own_embeddings": ends.vocab_size if width != ends.width else 0, "own_head": num}
    head = Eagle3(Eagle3Config.read(config, depth), ends, vocabulary, **own)
    known = np.zeros(ends.vocab_size, bool)
    known[np.array(vocabulary.ids)] = True
    ours = {"layers.0.": "midlayer.", "hidden_norm.": "midlayer.hidden_norm."}
    return _recursive(head, recipe, config, ours, t2d=mx.array(known))


def _recursive(
    head: MTPHead | Eagle3,
    recipe: Recipe,
    config: dict[str, Any],
    ours: Mapping[str, str],
    **ids: mx.array,
) -> Trainee:
    """The trainee of a head, whose parameters' names begin otherwise in the file: see `ours`."""
    known = None if head.vocabulary is None else head.vocabulary.ids
    if known is not None:
        ids["d2t"] = (known - mx.arange(known.size)).astype(mx.int64)

    def predictions(batch: Batch) -> Iterator[Prediction]:
        tokens = batch.tokens[:, 1:]
        states = head.rows(batch.features)[:, :-1]
        caches = [StepCache() for _ in head.make_cache()]
        for step in range(recipe.num_steps):
            states = head.forward(states, tokens, caches)
            yield states[:, step:], 1 + step
            states = mx.concatenate([states[:, :1], states[:, :-1]], axis=1)

    def rename(name: str) -> str:
        old = next((old for old in ours if name.startswith(old)), "")
        return ours.get(old, "") + name.removeprefix(old)

    return Trainee(
        *(head, recipe.ends, head.features, config, predictions, recipe.num_steps),
        vocabulary=known,
        draft_logits=head.draft_logits,
        head_names=("norm", "lm_head"),
        rename=rename,
        ids=ids,
    )


def stored_ids(layers: tuple[int, ...]) -> list[int]:
    """Ids for the config: as outputs if the first is 1, or else by input; see `output_layers`."""
    if not layers or layers[0] == 0:
        raise TrainingError(
            "Layer 0 cannot be the first that an EAGLE-3 head reads: its config could not be told "
            "from one that names outputs. Begin with layer 1."
        )
    return [layer if layers[0] == 1 else layer + 1 for layer in layers]


def _frequent(recipe: Recipe, count: int) -> DraftVocabulary:
    """The `count` most frequent of the target's tokens; the lowest ids fill up."""
    ranked = [token for token, _ in Counter(recipe.tokens.ravel().tolist()).most_common(count)]
    others = sorted(set(range(count)) - set(ranked))
    ids = np.array(sorted(ranked + others[: count - len(ranked)]))
    return DraftVocabulary(mx.array(ids - np.arange(count)), recipe.ends.vocab_size)
