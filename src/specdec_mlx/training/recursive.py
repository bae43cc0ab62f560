"""Training of heads that draft on from their own states: multi-token prediction and EAGLE-3.

While such a head drafts, its own last state takes the place of the target's. Trained on the
target's states alone it never sees that, and drafts worse with each token. So it is trained as it
is used, for several steps (EAGLE-3's training-time test, Li et al. 2025, arXiv 2503.01840,
section 3.2): of all positions of a window at once, each the begin of a draft, whose tokens are
those of the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from specdec_mlx.drafters.heads.eagle import IDS_KEY, Eagle3, Eagle3Config
from specdec_mlx.drafters.heads.mtp import FAMILIES, LAYER, MTPHead
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.errors import TrainingError
from specdec_mlx.training.features import Batch
from specdec_mlx.training.trainees import Prediction, Size, Trainee

MTP_TYPE = "llama_mtp"
DRAFT_VOCAB = 32_000
"""Tokens that an EAGLE-3 head can propose, of a larger vocabulary; as published heads have it."""


class StepCache:
    """Keys and values of the steps of drafts that begin at every position of a window.

    Row t of step k is the k-th token of the draft that began at row t - k + 1. What it may attend
    to is what it would find in the cache while drafting: true entries, made in the first step, up
    to where its draft began, and the entries of its own draft, one of each later step. Rows are at
    their own positions in each step.
    """

    offset = 0

    def __init__(self) -> None:
        """Before the first step."""
        self._keys: list[mx.array] = []
        self._values: list[mx.array] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add those of a step; those of all steps, the earlier first."""
        self._keys.append(keys)
        self._values.append(values)
        return mx.concatenate(self._keys, axis=2), mx.concatenate(self._values, axis=2)

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str:
        """Which entries each row of the next step sees, bool [length, steps * length]."""
        later = len(self._keys)
        if not later and not return_array:
            return "causal"
        return draft_mask(length, later)


def draft_mask(length: int, later: int) -> mx.array:
    """What the rows of a step attend to, bool [length, (later + 1) * length].

    Args:
        length: rows of a window.
        later: steps before this one.
    """
    rows, entries = mx.arange(length)[:, None], mx.arange(length)[None]
    masks = [entries <= rows - later]
    masks += [entries == rows - later + step for step in range(1, later + 1)]
    if later:  # the first rows have no draft of this length: they see themselves, and do not count
        masks[-1] = entries == rows
    return mx.concatenate(masks, axis=1)


class RecursiveTrainee(Trainee):
    """A head that goes on from its own states.

    Args:
        head: with random weights.
        ends: of the target.
        num_steps: tokens of the drafts that it is trained on.
    """

    def __init__(self, head: MTPHead | Eagle3, ends: TargetEnds, num_steps: int) -> None:
        """See the class."""
        self.vocabulary = None if head.vocabulary is None else head.vocabulary.ids
        super().__init__(head, ends, head.features)
        self.head = head
        self.num_steps = num_steps

    def predictions(self, batch: Batch) -> Iterator[Prediction]:
        """Of drafts that begin at all positions but the last."""
        tokens = batch.tokens[:, 1:]
        states = self.head.rows(batch.features)[:, :-1]
        caches = [StepCache() for _ in self.head.make_cache()]
        for step in range(self.num_steps):
            states = self.head.forward(states, tokens, caches)
            yield Prediction(states[:, step:], 1 + step)
            states = mx.concatenate([states[:, :1], states[:, :-1]], axis=1)

    def logits(self, states: mx.array) -> mx.array:
        """[..., Vd] of states [..., D]."""
        return self.head.draft_logits(states)

    def head_parameters(self) -> Any:
        """Its norm and matrix over the vocabulary, if it has them."""
        parameters = self.module.trainable_parameters()
        return {name: parameters[name] for name in ("norm", "lm_head") if name in parameters}

    def offsets(self) -> dict[str, mx.array]:
        """The tensor of its draft vocabulary, by the name that other programs read."""
        known = self.vocabulary
        return {} if known is None else {"d2t": (known - mx.arange(known.size)).astype(mx.int64)}


class MTPTrainee(RecursiveTrainee):
    """A multi-token prediction layer: one decoder layer of Llama's kind.

    Args:
        ends: of the target.
        size: how large it becomes.
        num_steps: tokens of the drafts that it is trained on.
        tokens: [n] what its draft vocabulary is counted on, if it is to have one.
    """

    head: MTPHead

    def __init__(self, ends: TargetEnds, size: Size, num_steps: int, tokens: np.ndarray) -> None:
        """Random weights."""
        size = size.for_width(ends.width)
        self.config = {
            "model_type": MTP_TYPE,
            "architectures": ["LlamaMTP"],
            "num_hidden_layers": 1,
            **size.llama(ends.vocab_size),
        }
        head = MTPHead(FAMILIES[MTP_TYPE], self.config, ends)
        if size.draft_vocab is not None and size.draft_vocab < ends.vocab_size:
            head.choose_among(frequent_vocabulary(tokens, size.draft_vocab, ends))
        super().__init__(head, ends, num_steps)

    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """As MLX copies of such layers have it: names without a prefix."""
        names = FAMILIES[MTP_TYPE].names
        ours = {f"body.{LAYER}": LAYER, "body.norm.": f"{names['norm']}."}
        ours |= {f"{name}.": f"{theirs}." for name, theirs in names.items() if name != "norm"}
        return self.config, _renamed(self.module, ours) | self.offsets()


class Eagle3Trainee(RecursiveTrainee):
    """An EAGLE-3 head, over the outputs of three layers.

    Args:
        ends: of the target.
        size: how large it becomes.
        num_steps: tokens of the drafts that it is trained on.
        tokens: [n] what its draft vocabulary is counted on.
    """

    head: Eagle3

    def __init__(self, ends: TargetEnds, size: Size, num_steps: int, tokens: np.ndarray) -> None:
        """Random weights."""
        size = size.for_width(size.width or ends.width)
        layers = size.layers or spread(ends.num_layers)
        num = min(size.draft_vocab or DRAFT_VOCAB, ends.vocab_size)
        self.config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            **size.llama(ends.vocab_size),
            "draft_vocab_size": num,
            "target_hidden_size": ends.width,
            "tie_word_embeddings": False,
            "eagle_config": {IDS_KEY: stored_ids(layers), "use_aux_hidden_state": True},
        }
        head = Eagle3(
            Eagle3Config.read(self.config, ends.num_layers),
            ends,
            frequent_vocabulary(tokens, num, ends),
            own_embeddings=ends.vocab_size if size.width != ends.width else 0,
            own_head=num,
        )
        super().__init__(head, ends, num_steps)

    def files(self) -> tuple[dict[str, Any], dict[str, mx.array]]:
        """As SafeAILab and SpecForge have it."""
        ours = {"layers.0.": "midlayer.", "hidden_norm.": "midlayer.hidden_norm."}
        tensors = _renamed(self.module, ours)
        known = np.zeros(self.ends.vocab_size, bool)
        known[np.array(self.vocabulary)] = True
        return self.config, tensors | self.offsets() | {"t2d": mx.array(known)}


def spread(num_layers: int) -> tuple[int, ...]:
    """Three layers to read: an early one, one in the middle, a late one.

    For deep targets the paper's own; a target of a few layers gives the last three, but not the
    first layer, which cannot be named first.
    """
    low = (1, num_layers // 2 - 1, num_layers - 4)
    return low if low[0] < low[1] < low[2] else tuple(range(max(1, num_layers - 3), num_layers))


def stored_ids(layers: tuple[int, ...]) -> list[int]:
    """Ids for the config: as outputs if the first is 1, or else by input; see `output_layers`."""
    if not layers or layers[0] == 0:
        raise TrainingError(
            "Layer 0 cannot be the first that an EAGLE-3 head reads: its config could not be told "
            "from one that names outputs. Begin with layer 1."
        )
    return [layer if layers[0] == 1 else layer + 1 for layer in layers]


def frequent_vocabulary(tokens: np.ndarray, count: int, ends: TargetEnds) -> DraftVocabulary:
    """The `count` most frequent of the target's tokens."""
    ids = frequent_tokens(tokens, count)
    return DraftVocabulary(mx.array(ids - np.arange(count)), ends.vocab_size)


def frequent_tokens(tokens: np.ndarray, count: int) -> np.ndarray:
    """The `count` most frequent ids, in their own order; the lowest ids fill up."""
    ranked = [token for token, _ in Counter(tokens.ravel().tolist()).most_common(count)]
    known = set(ranked)
    fill = (token for token in range(count) if token not in known)
    return np.array(sorted(ranked + [next(fill) for _ in range(count - len(ranked))]))


def _renamed(module: Any, ours: dict[str, str]) -> dict[str, mx.array]:
    """A module's parameters, with the beginnings of their names replaced."""
    renamed = {}
    for name, value in tree_flatten(module.parameters()):
        old = next((old for old in ours if name.startswith(old)), "")
        renamed[ours.get(old, "") + name.removeprefix(old)] = value
    return renamed
