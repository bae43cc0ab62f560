"""Trainees: a module, the features that it reads, and its predictions for a batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Features
from specdec_mlx.drafters.heads.drafter import DraftVocabulary, anatomy_for_head
from specdec_mlx.drafters.heads.eagle import IDS_KEY, Eagle3
from specdec_mlx.drafters.heads.mtp import FAMILIES, MTPHead
from specdec_mlx.drafters.heads.one_pass import Medusa
from specdec_mlx.drafters.reduced_models import first_layers
from specdec_mlx.errors import TrainingError
from specdec_mlx.lab.papers.early_exit import EXIT_LAYER, WINDOW, Exit, final_norm
from specdec_mlx.lab.papers.parallel_sampling import LOOK_AHEAD, LookAhead, looking_ahead
from specdec_mlx.lab.training.features import Batch, save_arrays, save_json
from specdec_mlx.models.anatomy import Anatomy, StateReader
from specdec_mlx.models.loading import explained
from specdec_mlx.trees.tree_pass import TreeLayout, takes_trees, tree_pass

NORM_EPS = 1e-5
LLAMA = {"hidden_act": "silu", "rms_norm_eps": NORM_EPS, "rope_theta": 10000.0}
LLAMA |= {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
MTP_TYPE = "llama_mtp"
MEDUSA_NAMES = {r"^blocks\.(\d+)\.(\d+)\.": r"\1.\2.linear."}
DRAFT_VOCAB = 32_000  # most tokens that an EAGLE-3 head proposes by default, as in published heads
HEAD_DIM = 64  # default width of an attention head
AT_ONCE = 2**22  # logits that are made at a time, 16 MB for each position of a draft
EXIT_WINDOW = 8  # positions of an exit's convolution; the first layers read the text before them

Prediction = tuple[mx.array, int]
"""States [batch, n, D] for one position of many drafts, and the place in the window of the first:
row i is compared with the target's logits at first + i."""

TYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}  # in a file


@dataclass(frozen=True)
class Size:
    """Size of a new module. None means a default that fits the target.

    Attributes:
        width: of the states of EAGLE-3 and draft models.
        mlp: width of the MLP.
        heads: attention heads.
        kv_heads: attention heads of keys and values.
        head_dim: width of an attention head.
        layers: layers that EAGLE-3 reads, from 0; the last layer of an early exit; or the depth of
            a draft model.
        draft_vocab: number of tokens that can be proposed.
        guesses: Medusa heads, or look-ahead embeddings.
    """

    width: int | None = None
    mlp: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: tuple[int, ...] | None = None
    draft_vocab: int | None = None
    guesses: int = 3

    def llama(self, width: int, vocab_size: int) -> dict[str, Any]:
        """Configuration of decoder layers of this size, with Hugging Face's names."""
        heads = self.heads or max(1, width // HEAD_DIM)
        return {
            "hidden_size": width,
            "intermediate_size": self.mlp or 3 * width,
            "head_dim": self.head_dim or width // heads,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads or heads,
            "vocab_size": vocab_size,
            **LLAMA,
        }


@dataclass(frozen=True)
class Recipe:
    """Inputs of a function that makes a trainee.

    Attributes:
        target: the target.
        size: of a new module.
        num_steps: draft length of a recursive head.
        tokens: [n] of the texts, to count the most frequent.
        tokenizer: the target's.
        init: draft model to begin with.
        vocabulary: tokens that a recursive head proposes. By default the most frequent.
    """

    target: nn.Module
    size: Size = Size()
    num_steps: int = 3
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    tokenizer: Any = None
    init: str | None = None
    vocabulary: DraftVocabulary | None = None

    @property
    def anatomy(self) -> Anatomy:
        return anatomy_for_head(self.target)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"hidden_size": self.anatomy.width, "vocab_size": self.anatomy.vocab_size}


@dataclass
class Trainee:
    """A drafter in training, for one target.

    Attributes:
        module: the weights, in float32.
        anatomy: the target's embeddings and head.
        features: the states of the target that the module reads.
        config: content of `config.json`.
        predictions: yields the states for the first, second, ... token of drafts.
        num_steps: tokens of a draft.
        renamed: pattern of parameter names -> their names in the file.
        reads_text: True if draft tokens are read like text. Then one prediction serves for all.
        is_recursive: True if the module drafts on from its own states.
        vocabulary: tokens that have logits. None for all.
        draft_logits: makes logits [..., Vd] from states. None for the target's head.
        head_names: parameters that `draft_logits` uses.
        ids: extra tensors of the file.
        tokenizer: saved with the module, if not None.
        rows_at_once: states whose logits are made together.
    """

    module: Any
    anatomy: Anatomy
    features: Features
    config: dict[str, Any]
    predictions: Callable[[Batch], Iterator[Prediction]]
    num_steps: int = 3
    renamed: Mapping[str, str] = field(default_factory=dict)
    reads_text: bool = False
    is_recursive: bool = False
    vocabulary: DraftVocabulary | None = None
    draft_logits: Callable[[mx.array], mx.array] | None = None
    head_names: tuple[str, ...] = ()
    ids: Mapping[str, mx.array] = field(default_factory=dict)
    tokenizer: Any = None

    def __post_init__(self) -> None:
        self.module.set_dtype(mx.float32)
        known = self.vocabulary
        self.target_logits = (known or self.anatomy).logits
        self.logits = self.draft_logits or self.target_logits
        num_logits = self.anatomy.vocab_size if known is None else known.ids.size
        self.rows_at_once = max(1, AT_ONCE // num_logits)

    def save(self, folder: Path, dtype: str) -> None:
        save_json(folder / "config.json", self.config | {"torch_dtype": dtype})
        self.save_weights(folder, dtype)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(str(folder))

    def save_weights(self, folder: Path, dtype: str) -> None:
        """Write `model.safetensors`. An old file stays until the new file is complete."""
        tensors = dict(self.ids)
        for name, x in tree_flatten(self.module.parameters()):
            # Integer tensors, such as ids of tokens, keep their dtype.
            kind = TYPES[dtype] if mx.issubdtype(x.dtype, mx.floating) else x.dtype
            for ours, theirs in self.renamed.items():
                name = re.sub(ours, theirs, name)
            tensors[name] = x.astype(kind)
        save_arrays(folder / "model.safetensors", tensors, {"format": "mlx"})


def medusa(recipe: Recipe) -> Trainee:
    """Medusa heads that use the target's output matrix. At first they predict like the target."""
    anatomy, count = recipe.anatomy, recipe.size.guesses
    head = Medusa(count, 1, anatomy)
    # Zero residual blocks: at first each head returns the state that it gets.
    head.update(tree_map(mx.zeros_like, head.parameters()))

    def predictions(batch: Batch) -> Iterator[Prediction]:
        states = head.rows(batch.features)
        for i in range(count):
            yield head.state(states[:, : -1 - i], i), 1 + i

    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "medusa_num_heads": count,
        "medusa_num_layers": 1,
        **recipe.sizes,
    }
    return Trainee(head, anatomy, head.features, config, predictions, count, MEDUSA_NAMES)


def branches_behind(size: int, count: int) -> TreeLayout:
    """Tree of a text [size] with a chain of `count` nodes after each token."""
    text_places = mx.arange(size)
    of_token = mx.concatenate([text_places, mx.repeat(text_places, count)])
    after = text_places[:, None] + mx.arange(1, count + 1)
    depths = mx.concatenate([text_places, after.reshape(-1)])
    is_text = mx.arange(depths.size) < size
    # A node sees the text up to its token, and its own chain up to itself.
    is_before = is_text & (of_token <= of_token[:, None])
    is_same_chain = ~is_text & (of_token == of_token[:, None]) & (depths <= depths[:, None])
    return TreeLayout(depths, is_before | is_same_chain)


def look_ahead(recipe: Recipe) -> Trainee:
    """PaSS embeddings. One pass of the frozen target reads them after every token."""
    target, count = recipe.target, recipe.size.guesses
    if not takes_trees(Rollback.of(target)):
        raise TrainingError(
            "PaSS is trained by passes over trees, which this target's caches do not take. Train "
            "another kind, such as mtp."
        )
    head, wanted = LookAhead(target, count), Features(head_input=True)

    def states_behind(tokens: mx.array) -> mx.array:
        size, reader = tokens.shape[0], StateReader(target, wanted)
        ids = mx.concatenate([tokens, mx.repeat(tokens, count)])
        inputs = ids, make_prompt_cache(target), branches_behind(size, count)
        with looking_ahead(target, mx.tile(head.rows, (size, 1))):
            reader.read(lambda: tree_pass(target, *inputs))
        assert reader.features is not None
        assert reader.features.head_input is not None
        # Rows after the text are chains, `count` nodes for each token.
        return reader.features.head_input[size:].reshape(size, count, -1)

    def predictions(batch: Batch) -> Iterator[Prediction]:
        states = mx.stack([states_behind(window) for window in batch.tokens])
        for i in range(count):
            yield states[:, : -1 - i, i], 1 + i

    kind = {"model_type": "pass", "architectures": ["PaSS"]}
    config = kind | {LOOK_AHEAD: count} | recipe.sizes
    return Trainee(head, recipe.anatomy, wanted, config, predictions, count)


def early_exit(recipe: Recipe) -> Trainee:
    """A convolution, an MLP and a norm after the first layers. At first only the norm acts."""
    target, anatomy, size = recipe.target, recipe.anatomy, recipe.size
    num_layers = size.layers[0] if size.layers else max(1, len(target.layers) // 2)
    norm = final_norm(first_layers(target, num_layers))
    config = {
        "model_type": "early_exit",
        EXIT_LAYER: num_layers,
        WINDOW: EXIT_WINDOW,
        "intermediate_size": size.mlp or anatomy.width,
        "rms_norm_eps": getattr(norm, "eps", NORM_EPS),
        **recipe.sizes,
    }
    module = Exit(config)
    # The exit starts as the target's own norm over the first layers.
    module.norm.weight = norm.weight

    def predictions(batch: Batch) -> Iterator[Prediction]:
        yield module(batch.features.layers[num_layers - 1]), 0

    features = Features(layers=(num_layers - 1,))
    return Trainee(module, anatomy, features, config, predictions, reads_text=True)


def draft_model(recipe: Recipe) -> Trainee:
    """A loaded draft model, or a small Llama. TrainingError for quantized weights."""
    size, anatomy, tokenizer = recipe.size, recipe.anatomy, recipe.tokenizer
    if recipe.init is None:
        width = size.width or max(64, anatomy.width // 2)
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": size.layers[0] if size.layers else 2,
            **size.llama(width, anatomy.vocab_size),
            "tie_word_embeddings": True,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        }
        module = llama.Model(llama.ModelArgs.from_dict(config))
    else:
        with explained(recipe.init):
            loaded: Any = mlx_lm.load(recipe.init, return_config=True)
        module, tokenizer, config = loaded
        if "quantization" in config:
            raise TrainingError(
                f"{recipe.init} is quantized, and quantized weights cannot be trained. Give the "
                "original."
            )

    def predictions(batch: Batch) -> Iterator[Prediction]:
        yield module(batch.tokens), 0  # logits, because a model's head may do more than multiply

    rest: Any = {"reads_text": True, "draft_logits": lambda logits: logits, "tokenizer": tokenizer}
    return Trainee(module, anatomy, Features(), config, predictions, **rest)


# Heads that draft on from their own states. They are trained for several steps on these states
# (EAGLE-3's training-time test, Li et al. 2025, arXiv 2503.01840, section 3.2): each position of a
# window begins a draft of the text's tokens.


class StepCache:
    """Keys and values of drafts that begin at every position of a window.

    Row t of step k holds token k of the draft that began at row t - k + 1. It sees the first step
    up to that row, and the later steps of its own draft.
    """

    offset = 0

    def __init__(self) -> None:
        self.steps: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.steps.append((keys, values))
        all_keys, all_values = (list(parts) for parts in zip(*self.steps, strict=True))
        return mx.concatenate(all_keys, axis=2), mx.concatenate(all_values, axis=2)

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Entries that each row of the next step sees, bool [length, steps * length]."""
        later = len(self.steps)
        # The draft begun at row s is in row s + i after i steps, so row t began at t - later.
        before = mx.arange(length)[:, None] - mx.arange(length) - later
        same_draft = [before == -step for step in range(1, later + 1)]
        return mx.concatenate([before >= 0, *same_draft], axis=1)


def mtp(recipe: Recipe) -> Trainee:
    """A multi-token prediction layer, which is a Llama decoder layer, saved in MLX's format."""
    size, anatomy = recipe.size, recipe.anatomy
    config = {
        "model_type": MTP_TYPE,
        "architectures": ["LlamaMTP"],
        "num_hidden_layers": 1,
        **size.llama(anatomy.width, anatomy.vocab_size),
    }
    family = FAMILIES[MTP_TYPE]
    head = MTPHead(family, config, anatomy)
    count = size.draft_vocab or anatomy.vocab_size
    if recipe.vocabulary is not None or count < anatomy.vocab_size:
        head.vocabulary = _vocabulary(recipe, count)
    renamed = {f"^{re.escape(new)}": old for old, new in family.ours().items()}
    return _recursive(head, recipe, config, renamed)


def eagle3(recipe: Recipe) -> Trainee:
    """An EAGLE-3 head that reads three layers, saved with SafeAILab's names."""
    size, anatomy = recipe.size, recipe.anatomy
    width, depth = size.width or anatomy.width, anatomy.num_layers
    layers = size.layers or (1, depth // 2 - 1, depth - 4)  # as in the paper's code
    # Small targets: the last three layers.
    if not size.layers and sorted(set(layers)) != list(layers):
        layers = tuple(range(max(1, depth - 3), depth))
    vocabulary = _vocabulary(recipe, size.draft_vocab or DRAFT_VOCAB)
    num = vocabulary.ids.size
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        **size.llama(width, anatomy.vocab_size),
        "draft_vocab_size": num,
        "target_hidden_size": anatomy.width,
        "tie_word_embeddings": False,
        "eagle_config": {IDS_KEY: stored_ids(layers), "use_aux_hidden_state": True},
    }
    head = Eagle3(config, anatomy)
    head.add_weights(embeddings=anatomy.vocab_size if width != anatomy.width else 0, logits=num)
    head.vocabulary = vocabulary
    known = np.zeros(anatomy.vocab_size, bool)
    known[np.array(vocabulary.ids)] = True
    renamed = {r"^layers\.0\.": "midlayer.", "^hidden_norm": "midlayer.hidden_norm"}
    return _recursive(head, recipe, config, renamed, t2d=mx.array(known))


def _recursive(
    head: MTPHead | Eagle3,
    recipe: Recipe,
    config: dict[str, Any],
    renamed: Mapping[str, str],
    **ids: mx.array,
) -> Trainee:
    known = None if head.vocabulary is None else head.vocabulary.ids
    if known is not None:
        # EAGLE-3 files store differences: target id = draft id + d2t[draft id].
        ids["d2t"] = (known - mx.arange(known.size)).astype(mx.int64)

    def predictions(batch: Batch) -> Iterator[Prediction]:
        tokens = batch.tokens[:, 1:]
        states = head.rows(batch.features)[:, :-1]
        caches = [StepCache() for _ in head.make_cache()]
        for step in range(recipe.num_steps):
            states = head.forward(states, tokens, caches)
            yield states[:, step:], 1 + step
            # Row t of the next step continues the draft of row t - 1. Row 0 is a placeholder.
            states = mx.concatenate([states[:, :1], states[:, :-1]], axis=1)

    return Trainee(
        *(head, recipe.anatomy, head.features, config, predictions, recipe.num_steps),
        is_recursive=True,
        vocabulary=head.vocabulary,
        draft_logits=head.draft_logits,
        head_names=("norm", "lm_head"),
        renamed=renamed,
        ids=ids,
    )


def stored_ids(layers: tuple[int, ...]) -> list[int]:
    """Layer ids for the config. See `fused_layers`.

    If the first layer is 1, ids count outputs of layers. Otherwise they count inputs.
    """
    if not layers or layers[0] == 0:
        raise TrainingError(
            "Layer 0 cannot be the first that an EAGLE-3 head reads: its config could not be told "
            "from one that names outputs. Begin with layer 1."
        )
    return [layer if layers[0] == 1 else layer + 1 for layer in layers]


def _vocabulary(recipe: Recipe, count: int) -> DraftVocabulary:
    """The recipe's vocabulary, or the `count` most frequent tokens."""
    if recipe.vocabulary is not None:
        return recipe.vocabulary
    # A stable sort fills the vocabulary with the lowest ids.
    counts = np.bincount(recipe.tokens.ravel(), minlength=recipe.anatomy.vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[:count])
    return DraftVocabulary(mx.array(ids), recipe.anatomy)


KINDS: Mapping[str, Callable[[Recipe], Trainee]] = {
    "mtp": mtp,
    "eagle3": eagle3,
    "medusa": medusa,
    "pass": look_ahead,
    "exit": early_exit,
    "draft": draft_model,
}
