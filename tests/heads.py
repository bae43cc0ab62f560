"""Heads that torch has run, as checkpoints to load, and targets whose states are made up."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import specdec_mlx as sd
import tiny
from specdec_mlx.contracts import DraftContext, FeatureRows, KeysValues, ReadsCache
from specdec_mlx.drafters.heads.drafter import (
    DraftVocabulary,
    Head,
    HeadDrafter,
    anatomy_for_head,
)
from specdec_mlx.drafters.heads.eagle import FLAGS, Eagle3, eagle1_family
from specdec_mlx.drafters.heads.gemma4_assistant import Gemma4Assistant
from specdec_mlx.drafters.heads.hydra import Hydra
from specdec_mlx.drafters.heads.mtp import FAMILIES, SLIDING, MTPFamily, MTPHead
from specdec_mlx.drafters.heads.one_pass import DFlash, Medusa
from specdec_mlx.lab.training import trainees
from specdec_mlx.lab.training.trainees import Recipe, Size
from specdec_mlx.models.anatomy import Anatomy
from tiny_model_folder import write_model_folder

FIXTURES = Path(__file__).parent / "fixtures"
WIDTH, VOCAB, NUM_LAYERS = 32, 97, 8
NUM_MTP_LAYERS = 5  # of families that have several
CORRECTION = 23  # token emitted in place of the second draft token; see benchmarks/references.py

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
ATTENTION["intermediate_size"] = 48

Arrays = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Reference:
    """A fixture: a checkpoint, a text with the target's states, and what torch made of them."""

    config: dict[str, Any]
    weights: Arrays
    arrays: Arrays

    @property
    def prompt(self) -> list[int]:
        """The tokens before the first draft."""
        return [int(token) for token in self.arrays["prompt"]]

    def write(self, folder: Path, fmt: str = "pt", **changes: Any) -> Path:
        """As a folder that can be loaded. changes: entries of the configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config | changes))
        tensors = {name: mx.array(value) for name, value in self.weights.items()}
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": fmt})
        return folder

    def target(self) -> nn.Module:
        """A model with the ends of the fixture's target."""
        model = gemma4_target() if "full_keys" in self.arrays else target()
        ends = {"embed": model.model.embed_tokens, "head": model.get("lm_head")}
        for name in ends.keys() & self.arrays.keys():
            ends[name].weight = mx.array(self.arrays[name])
        return model

    def keys_values(self, drafter: HeadDrafter, end: int) -> Callable[[int], KeysValues]:
        """Read the target's caches at a position, whose window holds four."""
        head: Any = drafter.head

        def read(index: int) -> KeysValues:
            kind = next(kind for kind, cache in head.reads.items() if cache.index == index)
            name, begin = kind.partition("_")[0], 0 if kind == "full_attention" else end - 4
            parts = (self.arrays[f"{name}_{part}"] for part in ("keys", "values"))
            keys, values = (mx.array(part[None, :, begin:end]) for part in parts)
            return KeysValues(keys, values, end)

        return read


@cache
def reference(name: str) -> Reference:
    """A fixture by name, or two Medusa heads of one block, from nobody's file."""
    if name == "medusa":
        made = np.random.default_rng(0).standard_normal((2, VOCAB, WIDTH)).astype(np.float32)
        heads = {"0.linear.weight": made[:, :WIDTH], "0.linear.bias": made[:, 0], "1.weight": made}
        weights = {f"{j}.{part}": x[j] for part, x in heads.items() for j in range(2)}
        return Reference({"medusa_num_heads": 2}, weights, {})
    with np.load(FIXTURES / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files if key != "config"}
        config = json.loads(str(file["config"]))
    weights = {key[2:]: value for key, value in arrays.items() if key.startswith("w.")}
    return Reference(config, weights, {k: v for k, v in arrays.items() if not k.startswith("w.")})


def references() -> list[str]:
    """The names of all fixtures of heads."""
    return sorted(path.stem for path in FIXTURES.glob("*.npz"))


def loaded(
    name: str, folder: Path, options: Mapping[str, Any] | None = None, **changes: Any
) -> Any:
    """The head of a fixture, for the target with its ends; changes: of its configuration."""
    one = reference(name)
    return sd.load_head(one.write(folder, **changes), one.target(), **(options or {}))


def torch_file(path: Path, shape: int, offset: int = 0) -> Path:
    """What `torch.save` would write of {"fc.weight": tensor} on 16 bytes, wherever that points."""
    dense = f"I{offset}\n(I{shape}\ntp0\n(I1\ntp1\n".encode()
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI4\ntQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + dense + b"I00\nN" + b"tR"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"(dS'fc.weight'\n" + tensor + b"s.")
        archive.writestr("x/data/0", bytes(16))
    return path


def target(width: int = WIDTH, vocab: int = VOCAB, layers: int = NUM_LAYERS) -> nn.Module:
    """A Llama with these sizes, whose head is not tied to its embeddings."""
    sizes: dict[str, Any] = {"hidden_size": width, "vocab_size": vocab, "num_hidden_layers": layers}
    kinds = ["full_attention"] * layers
    return tiny.build("llama", layer_types=kinds, tie_word_embeddings=False, **ATTENTION | sizes)


def gemma4_target(**changes: Any) -> nn.Module:
    """A Gemma 4 with the sizes of the assistant's fixture, but for changes."""
    sizes = {"hidden_size": WIDTH, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
    sizes |= {"head_dim": 8, "global_head_dim": 16, "num_key_value_heads": 2}
    return tiny.build("gemma4_text", **(sizes | changes))


def features(
    drafter: HeadDrafter,
    rows: Any,
    *,
    read: tuple[int, ...] | None = None,
    keys_values: ReadsCache | None = None,
) -> FeatureRows:
    """Rows [n, W] as the target would show them; what a head should not read is another state."""
    rows = mx.array(rows)
    wanted = drafter.features.layers if read is None else read
    final = rows[:, :WIDTH] * 0.5 - 2 if wanted else rows[:, :WIDTH]
    parts: Any = mx.split(rows, len(wanted), axis=-1) if wanted else []
    layers = {i: rows[:, :WIDTH] * 0.5 + i for i in range(-1, NUM_LAYERS)}
    layers |= dict(zip(wanted, parts, strict=True))
    shown = FeatureRows(layers=layers, head_input=final)
    return shown if keys_values is None else replace(shown, keys_values=keys_values)


class Shown:
    """A session that is shown made-up rows of a text, as the loop would show them."""

    def __init__(
        self, drafter: Any, prompt: Sequence[int], context: DraftContext, chunk: int = 1000
    ) -> None:
        self.drafter, self.text, self.num_shown = drafter, list(prompt), 0
        self.session = drafter.begin(prompt, context)
        self.propose = self.session.propose
        while self.num_shown < len(self.text) - 1:
            self.show(min(chunk, len(self.text) - 1 - self.num_shown))

    def show(self, count: int) -> None:
        if isinstance(self.drafter, HeadDrafter):
            self.session.see(states(self.drafter, self.num_shown, count))
        self.num_shown += count

    def emit(self, *tokens: int) -> None:
        self.show(len(self.text) + len(tokens) - 1 - self.num_shown)
        self.session.observe(tokens)
        self.text += tokens


def states(drafter: HeadDrafter, start: int, count: int) -> FeatureRows:
    """Rows of positions, made from the position alone."""
    ends, made = drafter.head.anatomy, np.random.default_rng(0)
    values = made.standard_normal((600, NUM_LAYERS + 1, ends.width)).astype(np.float32)
    rows = mx.array(values[start : start + count])
    layers = {layer: rows[:, layer] for layer in range(NUM_LAYERS)}

    def keys_values(index: int) -> KeysValues:
        width = next(one.width for one in drafter.head.reads.values() if one.index == index)
        made = np.random.default_rng(index).standard_normal((2, 1, 2, 600, width))
        keys, values = mx.array(made[..., : start + count, :].astype(np.float32))
        return KeysValues(keys, values, start + count)

    return FeatureRows(layers, rows[:, NUM_LAYERS], keys_values=keys_values)


# Heads with random weights ------------------------------------------------------------------------


def layer_config(ends: Anatomy) -> dict[str, Any]:
    """Of a head's decoder layer, in the width of its target."""
    sizes = {"hidden_size": ends.width, "vocab_size": ends.vocab_size, "num_hidden_layers": 1}
    others = {"model_type": "llama", "max_position_embeddings": 512, "rms_norm_eps": 1e-5}
    return ATTENTION | sizes | others


def _layers(ends: Anatomy) -> tuple[int, ...]:
    return (0, ends.num_layers // 2, ends.num_layers - 1)


def eagle3(ends: Anatomy) -> Head:
    """With a third of the tokens."""
    ids = mx.arange(0, ends.vocab_size, 3)
    head = Eagle3(layer_config(ends), ends, _layers(ends))
    head.add_weights(logits=len(ids))
    head.vocabulary = DraftVocabulary(ids, ends)
    return head


def eagle1(ends: Anatomy) -> Head:
    """With a bias, which few have."""
    config = layer_config(ends)
    return MTPHead(eagle1_family(config), config, ends, has_bias=True)


def eagle3_variants(ends: Anatomy) -> Head:
    """With all that may be otherwise, and a window of five positions in its second layer."""
    layer = layer_config(ends) | {"num_hidden_layers": 2}
    layer |= {"layer_types": ["full_attention", SLIDING], "sliding_window": 5}
    head = Eagle3(layer | dict.fromkeys(FLAGS, True), ends, _layers(ends))
    head.add_weights(embeddings=ends.vocab_size)
    return head


def dflash(ends: Anatomy) -> Head:
    """Blocks of six."""
    layer = layer_config(ends) | {"model_type": "qwen3", "num_hidden_layers": 2}
    layer |= {"mask_token_id": ends.vocab_size - 1, "block_size": 6}
    return DFlash(layer, ends, _layers(ends)[:2])


def assistant(ends: Anatomy) -> Head:
    """Two layers for each kind of attention of the target; half of 32 groups of tokens."""
    kinds, caches = list(ends.last_caches), ends.last_caches
    full = caches["full_attention"]
    width = caches.get("sliding_attention", full).width
    text = layer_config(ends) | {"model_type": "gemma4_text", "hidden_size": 32, "head_dim": width}
    text |= {"layer_types": 2 * kinds, "num_hidden_layers": 2 * len(kinds)}
    text |= {"global_head_dim": full.width}
    groups = {"num_centroids": 32, "centroid_intermediate_top_k": 16}
    ordered = ends.vocab_size % 32 == 0
    return Gemma4Assistant({"text_config": text, "use_ordered_embeddings": ordered, **groups}, ends)


HEADS: dict[str, Callable[[Anatomy], Head]] = {
    "eagle3": eagle3,
    "eagle3 variants": eagle3_variants,
    "eagle1": eagle1,
    "dflash": dflash,
    "assistant": assistant,
    "medusa": lambda ends: Medusa(5, 2, ends, own_heads=ends.vocab_size),
    "medusa, target's head": lambda ends: Medusa(5, 1, ends),
    "hydra": lambda ends: Hydra(5, {1, 3}, ends.vocab_size, ends, layer_config(ends)),
}


def mtp(name: str, **changes: Any) -> Callable[[Anatomy], Head]:
    """The multi-token prediction layer of one of the models of `tiny`, by its model type."""
    config = tiny.CONFIGS[name.removesuffix("_mtp")]
    config = config.get("text_config", config) | {"model_type": name} | changes
    family = FAMILIES.get(name, FAMILIES["llama_mtp"])
    num_layers = 1 if family.further == "again" else NUM_MTP_LAYERS
    return lambda ends: MTPHead(family, config, ends, num_layers=num_layers)


def as_published(head: Head, family: MTPFamily, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """The tensors of multi-token prediction layers, by the names of the original repository."""
    stored: dict[str, mx.array] = {}
    for depth, layer in enumerate(head.levels):
        prefix = family.prefix_at(config, depth)
        ours = family.ours(len(layer.body.layers))
        named: Any = tree_flatten(layer.parameters())
        for path, value in named:
            theirs = next((old for old, new in ours.items() if path.startswith(new)), None)
            if theirs is not None:
                stored[prefix + theirs + path.removeprefix(ours[theirs])] = value
    return stored


def write_conversion(
    folder: Path,
    file: str,
    name: str = "qwen3_5",
    renamed: Callable[[str], str] = str,
    bits: int | None = None,
    less_one: bool = False,
    one_by_one: bool = False,
    **more: Any,
) -> Head:
    """A model as converters write it, with a prediction layer, which is returned.

    file: of the layer, or its index, or the model's. renamed: of published names. less_one: its
    norms are w - 1. one_by_one: its experts. more: of a config.
    """
    written = json.loads((write_model_folder(folder) / "config.json").read_text())
    size, config = {"vocab_size": written["vocab_size"]}, tiny.CONFIGS[name]
    part = config.get("text_config", config) | size
    changes = {"text_config": part} if "text_config" in config else size
    (folder / "config.json").write_text(json.dumps({**config, **changes, **more}))
    model = tiny.build(name, **changes)
    own: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), own, metadata={"format": "mlx"})
    head = random_head(mtp(name, **size), model)
    if bits is not None:
        nn.quantize(head.body, 32, bits)
    layer = as_published(head, FAMILIES[name], part)
    layer |= {key: x - 1 for key, x in layer.items() if "norm" in key and less_one}
    for key in [key for key in layer if "switch_mlp" in key and one_by_one]:
        each = enumerate(layer.pop(key))
        layer |= {key.replace("switch_mlp", f"experts.{i}"): x for i, x in each}
    layer = {renamed(key): x for key, x in layer.items()}
    if file.endswith(".json"):
        index, file = folder / file, "mtp-00001-of-00001.safetensors"
        index.write_text(json.dumps({"weight_map": dict.fromkeys(layer, file)}))
    (folder / file).parent.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / file), own | layer if file == "model.safetensors" else layer)
    return head


def write_eagle3(folder: Path, target: nn.Module) -> Path:
    """A folder with a random EAGLE-3 head for a target, as `specdec-mlx train` writes it."""
    trainee = trainees.eagle3(Recipe(target, Size(heads=4, draft_vocab=90)))
    trainee.module.load_weights(tiny.randomised(trainee.module), strict=False)
    trainee.save(folder, "float32")
    return folder


def random_head(make: Callable[[Anatomy], Head], target: nn.Module, seed: int = 3) -> Head:
    """A head for a target, as the models of `tiny` are made."""
    mx.random.seed(seed)
    head = make(anatomy_for_head(target))
    head.load_weights(tiny.randomised(head), strict=False)
    mx.eval(head.parameters())
    return head
