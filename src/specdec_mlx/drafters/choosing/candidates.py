"""Find the heads and smaller models that can draft for a model, from their configs."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import scan_cache_dir, try_to_load_from_cache
from huggingface_hub.errors import CacheNotFound
from mlx_lm.utils import MODEL_REMAPPING, load_tokenizer

from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.loading import (
    VOCABULARY_MARGIN,
    config_of,
    formats,
    is_head,
    kind_of,
    refusal,
    width_read,
)
from specdec_mlx.drafters.heads.mtp import FAMILIES, OTHER_FORMULAS, of_type, text_part
from specdec_mlx.drafters.shared_vocabulary import shared_between
from specdec_mlx.errors import HeadError, ModelFolderError, TokenizerMismatchError
from specdec_mlx.files import read_text
from specdec_mlx.models.loading import check_folder, is_path
from specdec_mlx.stats.theory import best_draft_length, expected_speedup

KNOWN = Path(__file__).with_name("known.txt")
"""Each line has the beginning of a model's name, and repositories whose authors made heads for it.
Repositories marked with `SMALL` have a small model for its family."""
SMALL = "~"

CONVERTED = re.compile(
    r"([-_.](mlx|hf|\d+-?bits?|b?f(p|loat)?\d+|int\d|(mx|nv)fp\d|q\d\w*|dwq|awq|gptq|g(s|roup)?\d+|\d{6,8}))*"
)
"""Endings of a model's name that mark a conversion of the model."""


def known_repositories(model: str, small: bool = False) -> dict[str, str]:
    """Repositories with a head for a model, with a note if the head is for a relative of the model.

    With `small`, repositories of small models that can draft for it.
    """
    name = model.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    notes = {}
    for beginning, *repositories in map(str.split, KNOWN.read_text("utf-8").splitlines()):
        rest = name.removeprefix(beginning)
        # qwen3.5 is not qwen3, but llama-3 stands for 3.1 to 3.3 as well.
        is_another = rest[:1].isalnum() or (rest[:1] == "." and beginning != "llama-3")
        if rest == name or is_another:
            continue
        for repository in repositories:
            if repository.startswith(SMALL) != small:
                continue
            of_family = small or "PARD" in repository or CONVERTED.fullmatch(rest)
            notes[repository.removeprefix(SMALL)] = (
                "" if of_family else f", made for {beginning}, not for {name}"
            )
    return notes


HEADS_NAME = re.compile(r"mtp|eagle|dflash|dspark|medusa|speculator|assistant|draft")
"""Words that follow the model's name in the name of a head's repository."""


ACCEPTANCES = (0.6, 0.8)
"""Acceptance rates of a draft model on most texts, for which an expectation is printed."""


class Candidate(NamedTuple):
    """A head or a model that may draft for a model.

    Attributes:
        name: the name to print.
        kind: description for people.
        place: folder or repository, for `--draft-model`.
        size: bytes of its weights.
        cost: the paper's c, the time of a drafted token in steps of the target, estimated by size.
        refusal: the reason that it cannot draft, or None.
        doubt: the reason that it drafts only if the user names it, or None.
        note: a remark.
        reads: its size in memory and the bytes that a draft token reads, in words.
    """

    name: str
    kind: str = ""
    place: str = ""
    size: int = 0
    cost: float = 0.0
    refusal: str | None = None
    doubt: str | None = None
    note: str = ""
    reads: str = ""

    def expectation(self) -> str:
        """Best draft length and speedup for a few acceptance rates (theorem 3.8), as one line."""
        parts = []
        for acceptance in ACCEPTANCES:
            length = best_draft_length(acceptance, self.cost)
            speedup = expected_speedup(acceptance, length, self.cost)
            gain = f"{speedup:.2f} times as fast with K = {length}" if length else "does not pay"
            parts.append(f"{acceptance:.0%} accepted: {gain}")
        return "; ".join(parts)


class FoundModel(NamedTuple):
    """The draft model that "auto" stands for.

    Attributes:
        place: folder or name of the model, or None.
        lines: sentences that give the reasons.
    """

    place: str | None
    lines: list[str]


def choose_for(model: str, *, fetch: bool = False, where: Path | None = None) -> FoundModel:
    """Choose the draft model for `--draft-model auto`: a head for the model, or a small model.

    Args:
        model: folder or name of a model that is here.
        fetch: fetch a known head if nothing is here.
        where: folder of model folders, or a Hugging Face cache. By default the model's folder, its
            neighbours and the default cache.

    Raises:
        ModelFolderError: the model is not here.
    """
    folder = locate(model)
    cached = [part for part in folder.parts if part.startswith("models--")]
    name = cached[-1].removeprefix("models--").replace("--", "/") if cached else folder.name
    known = [repository for repository, note in known_repositories(name).items() if not note]
    places = [*(() if cached else models_in(folder.parent)), *models_in(where)]
    others = {place.resolve(): (model_name, place) for model_name, place in places}
    ways = [*own_layer(folder), *find_heads(name, folder, others.values())]
    # This loads the tokenizer of every model here, so it is left out if there is a head.
    if all(way.refusal or way.doubt for way in ways):
        ways += find_candidates(str(folder), where)
    chosen, lines = None, list[str]()
    for way in ways:
        fault = way.refusal or way.doubt or (chosen and "one is enough")
        if fault is None:
            chosen = way.place
            lines.insert(0, f"{way.name} drafts: {way.kind} for {name}.")
        else:
            lines.append(f"{way.name} is left out: {fault.rstrip('.')}.")
    if chosen is None and known and fetch:
        chosen = known[0]
        lines.insert(0, f"{chosen} drafts: fetched, as known for {name}.")
    if chosen is None:
        more = f" Known: {', '.join(known)}; auto:fetch=true fetches the first." if known else ""
        lines.insert(0, f"Nothing here drafts for {name} but look-up in the text.{more}")
    return FoundModel(chosen, lines)


def own_layer(folder: Path) -> list[Candidate]:
    """The prediction layer of the model in a folder, as a list of at most one candidate."""
    config = config_of(folder)
    name, kind = "its own prediction layer", formats()["mtp"].label
    if (other := of_type(config, OTHER_FORMULAS)) is not None:
        return [Candidate(name, kind, refusal=f"not to be loaded: it {other}")]
    if (family := of_type(config, FAMILIES)) is not None:
        kind = f"{kind} ({family.prefix_at(text_part(config)).rstrip('.')})"
    try:
        files = HeadFiles(folder)
        if files.own_layers():
            return [Candidate(name, kind, str(folder / str(files.list_file)), note="here")]
        # mlx-lm's conversions drop the layer, and the original repository has it.
        fault = refusal(files) if files.is_apart else "to be fetched from its original repository"
    except HeadError as error:
        fault = str(error)
    return [Candidate(name, kind, refusal=fault)] if family or files.is_apart else []


def find_heads(
    model: str, folder: Path | None, places: Iterable[tuple[str, Path]]
) -> list[Candidate]:
    """The heads for a model among these places.

    Args:
        model: name of the model.
        folder: folder of the model, which is left out.
        places: name and folder of each possible head.
    """
    target = {} if folder is None else config_of(folder)
    known, heads = known_repositories(model), []
    for name, place in places:
        if is_head(place) and (folder is None or not place.samefile(folder)):
            config = config_of(place)
            kind = formats()[kind_of(config) or "mtp"].label
            # A head that fits by its sizes only may have been trained on another model's states.
            doubt = "nothing says that it was made for this model; name it to take it"
            heads.append(
                Candidate(
                    name,
                    kind,
                    str(place),
                    refusal=why_not(config, target),
                    doubt=None if _is_for(name, model) else doubt,
                    note="here" + known.get(name, ""),
                )
            )
    return heads


def _is_for(head: str, model: str) -> bool:
    model_name, head_name = (place.rpartition("/")[2].lower() for place in (model, head))
    known = known_repositories(model).items()
    if head_name in (place.rpartition("/")[2].lower() for place, note in known if not note):
        return True
    starts = (i for i in range(len(model_name) + 1) if CONVERTED.fullmatch(model_name[i:]))
    base = model_name[: next(starts)]
    return head_name.startswith(base) and bool(HEADS_NAME.search(head_name[len(base) :]))


def why_not(config: Mapping[str, Any], target: Mapping[str, Any]) -> str | None:
    """The reason that a head cannot draft for a target, from their configs, or None."""
    if not formats()[kind_of(config) or "mtp"].loads:
        return "cannot be loaded yet"
    try:
        model = text_part(target)
        widths = {width_read(config), model.get("hidden_size")} - {None}
        sizes = [part.get("vocab_size") for part in (text_part(config), model)]
        vocabularies = [size for size in sizes if size is not None]
        # Padding makes vocabularies of one tokenizer differ by a few hundred ids.
        if vocabularies and max(vocabularies) - min(vocabularies) > VOCABULARY_MARGIN:
            return "another vocabulary"
    except (AttributeError, TypeError):
        return "its config.json is damaged"
    is_gemma4 = str(model.get("model_type")).startswith("gemma4")
    if kind_of(config) == "gemma4_assistant" and not is_gemma4:
        return "for Gemma 4"
    return "another width" if "pard_token" not in config and len(widths) > 1 else None


def find_candidates(model: str, where: Path | None = None) -> list[Candidate]:
    """The models that can draft for `model`, cheapest first, and then the models that cannot.

    Args:
        model: folder or name of a model that is here.
        where: folder of model folders, or a Hugging Face cache. None is the default cache.
    """
    target = locate(model)
    size, tokenizer = weight_bytes(target), load_tokenizer(target)
    others = [
        _candidate(name, folder, size, tokenizer)
        for name, folder in models_in(where)
        if folder.resolve() != target.resolve() and not is_head(folder)
    ]
    return sorted(others, key=lambda c: (c.refusal is not None, c.size, c.name))


def locate(model: str) -> Path:
    """The folder of a model that is here. Raises ModelFolderError."""
    folder = Path(model).expanduser()
    if not folder.exists():
        config = None if is_path(model) else try_to_load_from_cache(model, "config.json")
        if not isinstance(config, str):
            raise ModelFolderError(
                f"{model} is no folder here and not in the Hugging Face cache. Fetch it first: "
                f"hf download {model}"
            )
        folder = Path(config).parent
    check_folder(folder)
    return folder


def models_in(where: Path | None) -> Iterator[tuple[str, Path]]:
    if where is not None and not where.is_dir():
        raise ModelFolderError(f"There is no folder {where}. Give one that holds model folders.")
    if where is not None and not any(where.glob("models--*")):
        for config in sorted([*where.glob("config.json"), *where.glob("*/config.json")]):
            yield config.parent.name, config.parent
        return
    try:
        repos = scan_cache_dir(where).repos
    except (CacheNotFound, ValueError):  # or it is no folder
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model" and repo.revisions:
            latest = max(repo.revisions, key=lambda revision: revision.last_modified)
            yield repo.repo_id, latest.snapshot_path


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def _candidate(name: str, folder: Path, target_size: int, target_tokenizer: Any) -> Candidate:
    size, refusal = 0, None
    try:
        check_folder(folder)
        size = weight_bytes(folder)
        kind = json.loads(read_text(folder / "config.json"))["model_type"]
        if importlib.util.find_spec(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}") is None:
            refusal = f"mlx-lm knows no model type {kind}"
        elif size >= target_size:
            refusal = "not smaller"
        else:
            shared = shared_between(target_tokenizer, load_tokenizer(folder))
            # With another tokenizer, a token of the target may take several draft tokens.
            steps = 1.0 if shared is None else shared.draft_tokens_per_token
            cost = steps * size / target_size
            pays = best_draft_length(ACCEPTANCES[0], cost) > 0
            doubt = None if pays else "too large to pay"
            return Candidate(
                name,
                "a small model with the same tokenizer",
                str(folder),
                size,
                cost,
                doubt=doubt if shared is None else "another tokenizer",
            )
    except TokenizerMismatchError as error:
        refusal = f"another tokenizer: {error}"
    # transformers, tokenizers and the file system may raise anything.
    except Exception as error:
        refusal = f"cannot be read: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    return Candidate(name, size=size, refusal=refusal)
