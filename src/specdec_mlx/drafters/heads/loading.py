"""Loading a head for a target: what kind it is, whether it fits, its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from specdec_mlx.drafters.growing import check_branches
from specdec_mlx.drafters.heads.drafter import Head, HeadDrafter
from specdec_mlx.drafters.heads.early_exit import ExitDrafter, load_exit
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.formats import (
    FORMATS,
    Variant,
    build_head,
    kind_of,
    known_kind,
    without_its_layer,
)
from specdec_mlx.drafters.heads.mtp_families import family_of, other_formula
from specdec_mlx.drafters.heads.pard import PardDrafter
from specdec_mlx.drafters.heads.target_ends import TargetEnds, target_ends
from specdec_mlx.errors import HeadError, ModelFolderError
from specdec_mlx.models import load_model
from specdec_mlx.options import make_with, split_spec
from specdec_mlx.sampling.drafts import check_draft_temp
from specdec_mlx.types import DraftContext, Drafter, FeatureRows

MOST_NAMED = 8
"""Tensors that an error names."""

KEEPS_TYPE = ("e_score_correction_bias",)
"""Parameters whose type is not the target's: sums that choose experts."""

GROUP_SIZES = (64, 32)
"""Of quantization, the first that divides the rows."""


def load_head(
    path_or_repo: str | Path,
    target: nn.Module,
    *,
    draft_bits: int | None = None,
    greedy: bool = False,
    draft_temp: float | None = None,
    branches: int = 1,
    layers: Sequence[int] | None = None,
    pre_norm: bool | None = None,
    norms_less_one: bool | None = None,
    torch_files: bool = True,
) -> HeadDrafter | PardDrafter | ExitDrafter:
    """A trained head as a drafter for a loaded target.

    What kind it is, is told from its config.json and the names of its tensors; the drafter's
    `describe()` says it. Of a repository with more in it only the files are fetched that hold the
    head.

    Args:
        path_or_repo: a folder, or a Hugging Face name: of a head, or the original repository of a
            target that was trained with a multi-token prediction layer.
        target: the model that it is to draft for, which lends it embeddings and head.
        draft_bits: quantize the head's matrices to so many bits.
        greedy: propose the head's argmax, a point mass, whatever the target's sampling.
        draft_temp: temperature of the drafts, None for the target's own.
        branches: most tokens that it proposes at a place; with more than one its drafts are trees.
        layers: whose outputs of the target it reads, from 0, where its config is wrong.
        pre_norm: whether a head that reads the target's last state is to read it before the final
            norm; None for what its family does, which is after it for nearly all.
        norms_less_one: whether its norms are stored as w - 1; None for what its family does.
        torch_files: read what `torch.save` wrote, by torch, where there are no safetensors.

    Raises:
        HeadError: it is not known, not complete, or does not fit the target.
    """
    check_draft_temp(draft_temp)
    check_branches(branches)
    options: Any = {"greedy": greedy, "draft_temp": draft_temp, "branches": branches}
    files = HeadFiles(path_or_repo, torch_files=torch_files)
    with _explained(files):
        kind = kind_of(files.config, files.names)
        if kind == "exit":
            return load_exit(files, target, **options)
        if kind == "pard":
            model, tokenizer = load_model(path_or_repo)
            mask = files.config["pard_token"]
            files.expect("pard_token", mask, 0, target_ends(model).vocab_size - 1)
            _quantize(model, draft_bits)
            return PardDrafter(model, tokenizer, mask_token=mask, **options)
        if kind is None or FORMATS[kind].build is None:
            raise HeadError(_refusal(files, kind))
    ends = target_ends(target)
    with _explained(files):
        head, weights = build_head(kind, files, ends, Variant(layers, pre_norm, norms_less_one))
        _set_weights(head, weights, files, ends)
    _quantize(head, draft_bits)
    drafter = HeadDrafter(head, name=files.name, vocab_size=ends.vocab_size, **options)
    with _explained(files):
        mx.eval(head.parameters())
        _try_out(drafter, ends)
    return drafter


def _try_out(drafter: HeadDrafter, ends: TargetEnds) -> None:
    """Draft behind a made-up text: configurations may contradict the tensors only in a pass."""
    head: Any = drafter.head
    blank = mx.zeros((3, ends.width), ends.dtype)
    held = {cache.index: head.nothing_read(kind) for kind, cache in head.get("reads", {}).items()}
    rows = dict.fromkeys(head.features.layers, blank)
    session = drafter.begin([0] * 4, DraftContext(vocab_size=ends.vocab_size))
    session.see(FeatureRows(rows, blank, keys_values=held.__getitem__))
    mx.eval(session.propose(3).tokens)


@contextmanager
def _explained(files: HeadFiles) -> Iterator[None]:
    """Raise HeadError, with the files' name, where the block cannot make a head of them."""
    try:
        yield
    except (HeadError, ModelFolderError):
        raise
    except Exception as error:  # whatever a damaged file leads to, in any module of mlx-lm's
        raise HeadError(
            f"{files.name}: its config.json and its tensors make no head that runs "
            f"({type(error).__name__}: {error}). Fetch it again, or give another."
        ) from error


def named_head(
    spec: str, path_or_repo: str | Path, target: nn.Module, draft_bits: int | None = None
) -> Drafter:
    """A head with options that were typed: `model:branches=4`.

    Args:
        spec: NAME or NAME:key=value,...; what `load_head` takes, such as branches or greedy.
        path_or_repo: a folder, or a Hugging Face name.
        target: the model that it is to draft for.
        draft_bits: quantize the head's matrices to so many bits.

    Raises:
        ValueError: an option that heads do not take.
        HeadError: the head is not known, does not fit, or drafts chains where trees are asked for.
    """
    name, options = split_spec(spec)
    load = partial(load_head, path_or_repo, target)
    return make_with("drafter", name, load, {"draft_bits": draft_bits} | options)


def is_head(path_or_repo: str | Path) -> bool:
    """True if a folder or repository says that it holds a head rather than a model of its own."""
    try:
        files = HeadFiles(path_or_repo)
    except HeadError:
        return False
    return known_kind(files.config) is not None


def _refusal(files: HeadFiles, kind: str | None) -> str:
    """Why these files cannot be loaded."""
    if kind is not None:
        return f"{files.name} holds {FORMATS[kind].label}. That cannot be loaded yet."
    found, other = family_of(files.config), other_formula(files.config)
    if found is not None:
        return without_its_layer(files, *found)
    if other is not None:
        model_type = files.config.get("model_type")
        return (
            f"{files.name}: the multi-token prediction of {model_type} {other}. It cannot be "
            "loaded yet; use a draft model, or a drafter that needs none, such as 'prompt-lookup'."
        )
    known = ", ".join(kind for kind, one in FORMATS.items() if one.loads)
    return (
        f"{files.name} is no head of a known kind ({known}): its config.json has model_type "
        f"{files.config.get('model_type')!r}. A small model with the target's tokenizer is loaded "
        "by mlx_lm.load and drafts with ModelDrafter."
    )


def _set_weights(
    head: Head, weights: dict[str, mx.array], files: HeadFiles, ends: TargetEnds
) -> None:
    """Give a head its weights, in the target's type; quantized layers where they are quantized.

    Raises:
        HeadError: some are missing, some it has no place for, or shapes do not fit.
    """

    def stored(path: str, part: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(part, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return dict(infer_quant_config(path, part, weights))

    if files.config.get("quantization") is not None:
        nn.quantize(head, class_predicate=stored)
    expected = dict(tree_flatten(head.parameters()))
    missing = sorted(expected.keys() - weights.keys())
    unknown = sorted(weights.keys() - expected.keys())
    if missing or unknown:
        what = [f"it lacks {_named(missing)}"] if missing else []
        what += [f"there is no place for {_named(unknown)}"] if unknown else []
        raise HeadError(
            f"{files.name} was recognised as {head.kind}, but {' and '.join(what)}. It is another "
            "variant, or not complete."
        )
    wrong = [n for n, x in weights.items() if x.shape != expected[n].shape]
    if wrong:
        name = wrong[0]
        raise HeadError(
            f"{files.name}: {name} has the shape {list(weights[name].shape)}, and for this target "
            f"{list(expected[name].shape)} is expected. Use a head that was trained for it."
        )
    for name, x in weights.items():
        if mx.issubdtype(x.dtype, mx.floating) and not name.endswith(KEEPS_TYPE):
            weights[name] = x.astype(ends.dtype)
    head.load_weights(list(weights.items()))


def _named(names: list[str]) -> str:
    """A few of the names, and how many more."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _quantize(head: nn.Module, bits: int | None) -> None:
    """Quantize what can be; experts' routers stay as they are."""
    if bits is None:
        return

    def how(path: str, part: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(part, "to_quantized") or path.endswith(("gate", "router", "classifier")):
            return False
        width = part.weight.shape[-1]
        size = next((size for size in GROUP_SIZES if width % size == 0), None)
        return False if size is None else {"group_size": size, "bits": bits}

    nn.quantize(head, class_predicate=how)
