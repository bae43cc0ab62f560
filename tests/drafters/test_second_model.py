"""One drafter, two models with different tokenizers in turn: each is drafted for as if alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.utils import load_tokenizer

import specdec_mlx as sd
import tiny_text
from selection import cases, in_one_test
from serving import complete, serving, text_of
from specdec_mlx import lab
from specdec_mlx.drafters.choosing.registry import MODEL_DRAFTER, takes_model
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.lab.papers.recycling import SuccessorTable
from specdec_mlx.memory.persistent import fingerprint_of
from specdec_mlx.server.prefix_files import place_of
from tiny_model_folder import write_model_folder

NUM_TOKENS = 32
PROMPT = "the cat in the hat and the cat in the hat"
NARROW = 258  # entries of a vocabulary that lacks merges and names of roles


@cache
def wide() -> tuple[nn.Module, Any]:
    """A model and its tokenizer."""
    return tiny_text.model(), tiny_text.tokenizer()


@cache
def narrow() -> tuple[nn.Module, Any]:
    """A model with fewer tokens, each with another id than in the wide one."""
    single = tuple(reversed(tiny_text.BYTES))
    tokenizer = tiny_text.tokenizer(tiny_text.bpe((), tiny_text.SPECIAL[:2], single))
    return tiny_text.model(7, NARROW), tokenizer


ORDERS = [(wide, narrow, wide, narrow), (narrow, wide, narrow, wide)]


def named(name: str, **options: Any) -> Any:
    """The drafter of a name, with a draft model where it needs one."""
    if takes_model(name.partition(":")[0]):
        model, tokenizer = wide()
        options = {"draft_model": model, "draft_tokenizer": tokenizer} | options
    return sd.drafters.make_drafter(name, **options)


DRAFTERS: dict[str, Callable[[], Any]] = {
    "auto": partial(named, "auto"),
    "lookahead": partial(named, "lookahead"),
    "model without a tokenizer": lambda: sd.ModelDrafter(tiny_text.model(5)),
    "auto with all": lambda: named("trees:memory=process,recycling=true"),
    "a kept table": lambda: lab.TabledNGramDrafter(table=lab.NGramTable()),
    "kept successors of pairs": lambda: lab.RecyclingDrafter(table=SuccessorTable(), context=2),
    "tree of": lambda: lab.TreeOf(sd.SuffixDrafter(sd.Memory()), sd.NGramDrafter()),
    "best of": lambda: sd.BestOf(sd.SuffixDrafter(sd.Memory()), named(MODEL_DRAFTER)),
    "cascade, remembering": lambda: lab.Cascade(
        named(MODEL_DRAFTER), sd.SuffixDrafter(sd.Memory())
    ),
}
"""Whatever is kept from text to text, alone or in a combination, and a draft model."""


def said(
    pair: tuple[nn.Module, Any], drafter: Any, knows: bool = True
) -> tuple[list[int], sd.stats.SpeculationStats]:
    """Tokens and account of a text; where only tokens are handed over, no tokenizer is known."""
    model, tokenizer = pair
    prompt = tokenizer.encode(PROMPT)
    options: Any = {"max_tokens": NUM_TOKENS, "drafter": drafter, "num_draft_tokens": 4}
    if knows:
        text = sd.generate(model, tokenizer, prompt, **options)
        return list(text.tokens), text.stats
    items = list(sd.speculate(model, prompt, **options))
    return [item.token for item in items], items[-1].stats


@cache
def alone(make: Callable[[], Any]) -> list[int]:
    """Tokens of plain decoding."""
    return said(make(), None)[0]


@in_one_test(("order", "knows"), zip(ORDERS, [True, False], strict=True))
@pytest.mark.parametrize("name", cases(DRAFTERS, "auto with all", "kept successors of pairs"))
def test_two_models_in_turn_get_their_own_texts(name: str, order: Any, knows: bool) -> None:
    """In both orders, with tokenizers and without: what was kept of the one is not proposed to the
    other, and each drafts the second time at least as well as at first."""
    drafter = DRAFTERS[name]()
    texts = [said(make(), drafter, knows) for make in order]
    assert [tokens for tokens, _ in texts] == [alone(make) for make in order]
    accepted = [stats.accepted if drafter is not None else 0 for _, stats in texts]
    assert accepted[2] >= accepted[0]
    assert accepted[3] >= accepted[1]
    if "memory" in name or "kept" in name:
        assert sum(accepted[2:]) > sum(accepted[:2])


@in_one_test("order", ORDERS)
def test_what_is_kept_of_the_first_tokenizer_is_not_changed_by_another(order: Any) -> None:
    """Its texts, counts and successors are the same after a text of the other one."""
    memory, counts, successors = sd.Memory(), lab.NGramTable(), SuccessorTable()
    drafter = sd.drafters.FirstOf(
        sd.SuffixDrafter(memory),
        lab.TabledNGramDrafter(table=counts),
        lab.RecyclingDrafter(table=successors),
    )

    def held() -> Any:
        known = {context: list(found.texts) for context, found in successors.successors.items()}
        return [text.tolist() for text in memory.texts()], counts.counts(), known

    said(order[0](), drafter)
    before = held()
    said(order[1](), drafter)
    assert all(before)
    assert held() == before


@in_one_test("made", ["loaded", "opened", "of a tokenizer", "of files"])
def test_what_was_made_for_one_tokenizer_is_refused_by_another(made: str, tmp_path: Path) -> None:
    """At the call, before a token; the file is as it was."""
    (model, tokenizer), path = wide(), tmp_path / "memory"
    (tmp_path / "text.txt").write_text(PROMPT)
    memory = sd.Memory.from_files([tmp_path / "text.txt"], tokenizer)
    memory.save(path)
    content = path.read_bytes()
    choices: dict[str, Any] = {
        "loaded": lambda: sd.Memory.load(path),
        "opened": lambda: str(path),
        "of a tokenizer": lambda: sd.Memory(tokenizer=tokenizer),
        "of files": lambda: memory,
    }
    drafter = sd.SuffixDrafter(choices[made]())
    for _ in range(2):
        with pytest.raises(TokenizerMismatchError, match="holds token ids of tokenizer"):
            said(narrow(), drafter)
        assert said((model, tokenizer), drafter)[1].drafted > 0
    assert path.read_bytes() == content


def test_each_loaded_draft_model_has_a_place_of_its_own_among_kept_caches() -> None:
    """Addresses come again, where one model is dropped and the next one loaded."""
    places = set()
    for seed in range(50):
        model = nn.Linear(1, seed + 1)
        place = place_of(model)
        assert place == place_of(model)
        places.add(place)
        del model
    assert len(places) == 50


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose tokenizers give two ids to each other's tokens."""
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "one"), write_model_folder(root / "two", swapped=True)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> list[str]:
    """The texts of both."""
    with serving("--model", str(folders[0]), "--drafter", "none") as client:
        return [text_of(complete(client, model=str(folder))) for folder in folders]


@pytest.mark.full
@in_one_test(
    ("order", "flags"),
    [
        ("1212", ()),
        ("2112", ()),
        ("2121", ("--drafter", "auto-recycling")),
        ("1221", ("--drafter", "suffix:memory=process", "--drafter", "ngram")),
    ],
)
def test_a_server_remembers_for_each_tokenizer(
    order: str, flags: tuple[str, ...], folders: tuple[Path, Path], plain: list[str]
) -> None:
    """On a loopback address, by default: its own model first, or another one; later answers of each
    are drafted from its first one.
    """
    accepted: dict[str, list[int]] = {"1": [], "2": []}
    with serving("--model", str(folders[0]), "--no-tuning", *flags) as client:
        for key in order:
            folder = folders[int(key) - 1]
            reply = complete(client, model=str(folder), extra_body={"num_draft_tokens": 4})
            accepted[key].append(reply.usage.speculation["accepted"])
            assert text_of(reply) == plain[int(key) - 1]
    assert all(second > first for first, second in accepted.values())


@pytest.mark.full
@in_one_test("kind", ["memory", "table"])
def test_a_servers_file_is_its_own_models(
    kind: str,
    folders: tuple[Path, Path],
    plain: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Refused at the start if it is another tokenizer's; for other models that requests name it is
    left out, with one line of log each."""
    (one, two), path = map(str, folders), tmp_path / kind
    caplog.clear()
    drafter = {"memory": "suffix", "table": "ngram-table"}[kind]
    flags = (
        ("--memory", str(path)) if kind == "memory" else ("--drafter", f"ngram-table:table={path}")
    )
    with serving("--model", one, *flags) as client, caplog.at_level(logging.WARNING):
        texts = [text_of(complete(client, model=model)) for model in (one, two, one, two)]
    assert texts == plain * 2
    assert sum("is left out" in line for line in caplog.messages) == 1
    kept = getattr(sd.drafters.make_drafter(f"{drafter}:{kind}={path}"), kind)
    kept.save()
    assert kept.tokenizer == fingerprint_of(load_tokenizer(folders[0]))
    if kind == "memory":
        assert [len(text) for text in kept.texts()] == [60, 60]
    with (
        pytest.raises(TokenizerMismatchError, match="holds token ids"),
        serving("--model", two, *flags),
    ):
        pass
