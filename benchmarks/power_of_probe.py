"""Faults that are planted in masks, and how many the guard and the probe find: `--help`.

    python -m benchmarks.power_of_probe --seeds 20

Each fault is planted in one layer of a random model, and only passes over several positions have
it. *guard* is the measurement before the first draft, *probe* that of `specdec-mlx probe`.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama

from specdec_mlx.exactness.probe import first_inexact
from specdec_mlx.lab.probing import probe
from specdec_mlx.lab.tables import markdown_table

Sees = Callable[[mx.array, mx.array, int], mx.array]

FAULTS: dict[str, Sees] = {
    "position 0 unseen": lambda row, column, start: (column <= row) & (column != 0),
    "previous row unseen": lambda row, column, start: (
        (column <= row) & ((column != row - 1) | (row == start))
    ),
    "last cached position unseen": lambda row, column, start: (
        (column <= row) & (column != start - 1)
    ),
    "next token seen": lambda row, column, start: column <= row + 1,
    "rope off by one": lambda row, column, start: column <= row,
}
"""Position of a row, of what it may see, and of the first row -> what a row sees."""

TYPES = {
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "4 bits": mx.bfloat16,
}
DEVICES = ("alike", "simulated")
"""Rows are computed as single rows are; or float32 as TF32, and 16 bits in parts, each rounded."""

NUM_PARTS = 4


@dataclass
class _Ahead:
    """A cache that claims one position more."""

    cache: Any

    @property
    def offset(self) -> int:
        return int(self.cache.offset) + 1

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self.cache.update_and_fetch(keys, values)


class FaultyAttention(llama.Attention):  # type: ignore[misc]
    """Attention of which passes over several positions, after others, have a fault."""

    fault: str

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """See mlx-lm's."""
        if x.shape[1] > 1 and cache is not None and cache.offset:
            start, width = cache.offset, x.shape[1]
            rows, columns = mx.arange(start, start + width), mx.arange(start + width)
            mask = FAULTS[self.fault](rows[:, None], columns[None], start)
            cache = _Ahead(cache) if self.fault == "rope off by one" else cache
        output: mx.array = super().__call__(x, mask, cache)
        return output


def is_alone(x: mx.array) -> bool:
    """True for a single row."""
    return x.size == x.shape[-1]


def in_parts(x: mx.array, weight: mx.array) -> mx.array:
    """A product of several rows: float32 with 10 bits after the point, 16 bits in rounded parts."""
    if x.dtype == mx.float32:
        return shortened(x) @ shortened(weight).T
    parts = zip(mx.split(x, NUM_PARTS, -1), mx.split(weight, NUM_PARTS, -1), strict=True)
    return sum((rows @ part.T for rows, part in parts), start=mx.array(0, x.dtype))


def shortened(array: mx.array) -> mx.array:
    """Float32 numbers with 10 bits after the point, as TF32 has them."""
    bits = array.view(mx.uint32)
    return (((bits + 0x1000) >> 13) << 13).view(mx.float32)


class RoughLinear(nn.Linear):  # type: ignore[misc]
    """Several rows as a GPU computes them, a single row as it is."""

    def __call__(self, x: mx.array) -> mx.array:
        """See MLX's."""
        product: mx.array = super().__call__(x) if is_alone(x) else in_parts(x, self.weight)
        return product


class RoughQuantized(nn.QuantizedLinear):  # type: ignore[misc]
    """The same with quantized weights."""

    def __call__(self, x: mx.array) -> mx.array:
        """See MLX's."""
        if is_alone(x):
            product: mx.array = super().__call__(x)
            return product
        how = {"group_size": self.group_size, "bits": self.bits}
        return in_parts(x, mx.dequantize(self.weight, self.scales, self.biases, **how))


def make(kind: str, num_layers: int, seed: int, device: str = "alike") -> nn.Module:
    """A random model of a type, whose rows are computed as on a device."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    args = llama.ModelArgs(
        model_type="llama", num_hidden_layers=num_layers, rms_norm_eps=1e-5, **sizes, **heads
    )
    mx.random.seed(seed)
    model: nn.Module = llama.Model(args)
    weights = []
    for path, weight in tree_flatten(model.parameters()):
        noise = mx.random.normal(weight.shape)
        gain = 1.5 / math.sqrt(weight.shape[-1])
        drawn = weight + 0.25 * noise if weight.ndim == 1 else gain * noise
        weights.append((path, drawn.astype(TYPES[kind])))
    model.update(tree_unflatten(weights))
    if kind == "4 bits":
        nn.quantize(model, group_size=32, bits=4)
    rough = {nn.Linear: RoughLinear, nn.QuantizedLinear: RoughQuantized}
    for module in model.modules():
        if device == "simulated" and type(module) in rough:
            object.__setattr__(module, "__class__", rough[type(module)])
    mx.eval(model.parameters())
    return model


def plant(model: Any, layer: int, fault: str) -> None:
    """Plant a fault in one layer."""
    attention = model.layers[layer].self_attn
    attention.fault = fault
    object.__setattr__(attention, "__class__", FaultyAttention)


def verdicts(kind: str, num_layers: int, seed: int, device: str, fault: Any = None) -> list[bool]:
    """If the guard finds a fault, and if the probe does; fault: a layer and a name, or None."""
    model = make(kind, num_layers, seed, device)
    if fault is not None:
        plant(model, *fault)
    is_short = device == "simulated"
    with (
        patch("specdec_mlx.exactness.rounding.shortens_products", lambda: is_short),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return [first_inexact(model, 0) == 0, not probe(model, past_window=False).exact]


def sampled(num_layers: int, number: int) -> list[int]:
    """So many layers of a model, the first and the last among them."""
    return sorted({i * (num_layers - 1) // max(1, number - 1) for i in range(number)})


def row(kind: str, device: str, depths: Sequence[int], layers: int, seeds: int) -> dict[str, str]:
    """Shares that the guard and the probe find: of each fault, and of right models."""
    shares = {"type": kind, "rows": device}
    for fault in (None, *FAULTS):
        found = [
            verdicts(kind, depth, seed, device, None if fault is None else (layer, fault))
            for depth, seed in product(depths, range(seeds))
            for layer in (sampled(depth, layers) if fault else [0])
        ]
        guard, full = (sum(each) for each in zip(*found, strict=True))
        shares[fault or "right models"] = f"{guard}, {full} of {len(found)}"
    return shares


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[2, 8, 16], help="of the models")
    parser.add_argument("--layers", type=int, default=3, help="a model that faults are planted in")
    parser.add_argument("--seeds", type=int, default=5, help="models of each kind")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=[*TYPES])
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=[*DEVICES])
    args = parser.parse_args(argv)
    rows = []
    for kind, device in product(args.types, args.devices):
        rows.append(row(kind, device, args.depths, args.layers, args.seeds))
        print(rows[-1], file=sys.stderr, flush=True)
    print(f"{args.seeds} seeds; layers {[sampled(d, args.layers) for d in args.depths]}")
    print(markdown_table([*rows[0]], [[*each.values()] for each in rows], 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
