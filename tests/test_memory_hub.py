"""Memories and tables pushed to and pulled from a server that speaks the Hub's HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

import specdec_mlx as sd
import tiny_text
from command_line import Done, in_this_way, run
from hub import Hub, hub_at
from selection import FULL, in_one_test
from specdec_mlx.memory.hub import FILE_NAMES, pull, push
from tiny_model_folder import write_model_folder

OPTIONS = {"source": "our notes", "licence": "mit", "token": "t"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hub]]]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with hub_at() as running:
        yield running


def a_memory(tokenizer: object = None) -> sd.Memory:
    memory = sd.Memory(tokenizer=tokenizer or tiny_text.tokenizer())
    memory.add([1, 2, 3, 4])
    memory.sources = {"/home/me/secret-project/plan.md": ("1:2", "abc")}
    return memory


def test_what_is_pushed_can_be_pulled(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    """Its texts and its tokenizer; the card says what it is, nothing says which files it read."""
    endpoint, kept = hub
    address = push(a_memory(), "me/memory", endpoint=endpoint, **OPTIONS)
    assert address.startswith(endpoint)
    assert kept.created[0].get("private", kept.created[0].get("visibility")) in (True, "private")
    card, num_bytes = kept.files["README.md"].decode(), len(kept.files[FILE_NAMES["texts"]])
    facts = ("| our notes |", "license: mit", "| tokens | 5 |", f"| bytes | {num_bytes} |")
    assert all(fact in card for fact in (f"`{a_memory().tokenizer}`", *facts))
    assert not any(b"secret-project" in content for content in kept.files.values())
    path = tmp_path / "memory"
    ours = sd.Memory()
    ours.add([7, 8, 9])
    ours.save(path)
    pull("me/memory", path, tiny_text.tokenizer(), [sd.Memory], endpoint=endpoint, token="t")
    texts = [text.tolist() for text in sd.Memory.load(path).texts()]
    assert sorted(texts) == [[1, 2, 3, 4], [7, 8, 9]]
    push(a_memory(), "me/memory", endpoint=endpoint, **OPTIONS)  # again
    kept.files.clear()
    push(counted(), "me/memory", endpoint=endpoint, **OPTIONS)
    assert "| n-grams | 3 |" in kept.files["README.md"].decode()


def counted() -> sd.drafters.NGramTable:
    table = sd.drafters.NGramTable(tokenizer=tiny_text.tokenizer())
    table.add([1, 2, 3])
    return table


@in_one_test(
    ("held", "own", "pushed", "refused", "pulled"),
    [
        (a_memory, "another", lambda: a_memory("another"), "expected another", "of tokenizer"),
        (counted, "any", a_memory, "'n-grams', and is to hold 'texts'", "expected 'texts'"),
    ],
)
def test_of_another_tokenizer_or_kind_it_is_neither_pulled_nor_overwritten(
    held: Any,
    own: str,
    pushed: Any,
    refused: str,
    pulled: str,
    hub: tuple[str, type[Hub]],
    tmp_path: Path,
) -> None:
    """Both are refused by name, and nothing is changed here or there."""
    endpoint, kept = hub
    kept.files.clear()
    push(held(), "me/memory", endpoint=endpoint, **OPTIONS)
    before = dict(kept.files)
    path, refusal = tmp_path / "memory", sd.errors.MemoryFileError
    with pytest.raises(refusal, match=f"me/memory holds .*{pulled}"):
        pull("me/memory", path, own, [sd.Memory], endpoint=endpoint)
    with pytest.raises(refusal, match=refused):
        push(pushed(), "me/memory", endpoint=endpoint, **OPTIONS)
    assert kept.files == before
    kept.files.clear()
    with pytest.raises(refusal, match="nothing to draft from"):
        pull("me/memory", path, own, [sd.Memory], endpoint=endpoint)
    assert not path.exists()


def test_a_memory_without_a_card_is_not_pushed() -> None:
    """Nothing is sent before tokenizer, source and licence are known."""
    for name, source, licence in ((None, "notes", "mit"), ("a", " ", "mit"), ("a", "b", "m\nx")):
        with pytest.raises(ValueError, match="tokenizer, source and licence"):
            push(sd.Memory(tokenizer=name), "me/memory", source=source, licence=licence)


@FULL
def test_the_commands_push_and_pull_by_the_environments_endpoint(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    """Built, pushed and pulled as processes; another tokenizer's model is refused by name."""
    endpoint, kept = hub
    model = write_model_folder(tmp_path / "model")
    another = write_model_folder(tmp_path / "another", swapped=True)
    (tmp_path / "notes.txt").write_text("the cat and the dog and the cat")
    built, pulled = tmp_path / "built", tmp_path / "pulled"

    def command(*arguments: str | Path) -> Done:
        with in_this_way("as a process"):  # the endpoint is read once in a process
            return run("memory", *arguments, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_TOKEN="t")

    run("memory", "build", "--ngrams", "--tokenizer", model, "--out", built, tmp_path / "notes.txt")
    pushed = command("push", built, "me/it", "--source", "notes", "--licence", "mit")
    assert endpoint in pushed.stdout, pushed.stderr
    assert set(kept.files) == {"README.md", FILE_NAMES["n-grams"]}
    done = command("pull", "me/it", pulled, "--tokenizer", model)
    assert "  n-grams" in done.stdout, done.stderr
    tables = [sd.drafters.NGramTable.load(path).counts() for path in (pulled, built)]
    assert tables[0] == tables[1]
    refused = command("pull", "me/it", tmp_path / "refused", "--tokenizer", another)
    assert refused.returncode == 2
    assert "me/it holds the" in refused.stderr
    assert not (tmp_path / "refused").exists()
