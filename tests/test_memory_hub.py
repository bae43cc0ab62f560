"""Memories and tables pushed to and pulled from a server that speaks the Hub's HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec_mlx as sd
import tiny_text
from command_line import Done, in_this_way, run
from hub import Hub, hub_at
from selection import FULL
from specdec_mlx.errors import MemoryFileError
from specdec_mlx.memory.hub import FILE_NAMES, pull, push
from specdec_mlx.memory.kept import Kept
from tiny_model_folder import write_model_folder

OPTIONS = {"source": "our notes", "licence": "mit", "token": "t"}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[type[Hub]]:
    with hub_at(tmp_path / "cache") as running:
        yield running


def a_memory() -> sd.Memory:
    memory = sd.Memory(tokenizer=tiny_text.tokenizer())
    memory.add([1, 2, 3, 4])
    memory.sources = {"/home/me/secret-project/plan.md": ("1:2", "abc")}
    return memory


def test_what_is_pushed_can_be_pulled(hub: type[Hub], tmp_path: Path) -> None:
    """Its texts and its tokenizer; the card says what it is, nothing says which files it read."""
    at = {"endpoint": hub.endpoint}
    address = push(a_memory(), "me/memory", **OPTIONS, **at)
    assert address.startswith(hub.endpoint)
    assert hub.created[0].get("private", hub.created[0].get("visibility")) in (True, "private")
    card = hub.files["README.md"].decode()
    fingerprint, size = a_memory().tokenizer, len(hub.files[FILE_NAMES["texts"]])
    facts = (f"`{fingerprint}`", "| our notes |", "license: mit", "| tokens | 5 |", f"s | {size} |")
    assert all(fact in card for fact in facts)
    assert not any(b"secret-project" in content for content in hub.files.values())
    path, ours = tmp_path / "memory", sd.Memory()
    ours.add([7, 8, 9])
    ours.save(path)
    pull("me/memory", path, tiny_text.tokenizer(), [sd.Memory], **at, token="t")
    texts = [text.tolist() for text in sd.Memory.load(path).texts()]
    assert sorted(texts) == [[1, 2, 3, 4], [7, 8, 9]]
    push(a_memory(), "me/memory", **OPTIONS, **at)  # again


def counted(tokenizer: object) -> sd.drafters.NGramTable:
    table = sd.drafters.NGramTable(tokenizer=tokenizer)
    table.add([1, 2, 3])
    return table


def test_what_does_not_go_together_is_neither_pulled_nor_overwritten(hub, tmp_path):
    """Another tokenizer's memory and another kind are refused by name; nothing is changed."""
    other = sd.Memory(tokenizer="another")
    other.add([1, 2])

    def refused(what: str, *pushed: Kept) -> None:
        before = dict(hub.files)
        for kept in pushed:
            with pytest.raises(MemoryFileError, match=what):
                push(kept, "me/memory", **OPTIONS, endpoint=hub.endpoint)
        assert hub.files == before
        with pytest.raises(MemoryFileError, match=what):
            pull("me/memory", tmp_path / "m", "another", [sd.Memory], endpoint=hub.endpoint)
        assert not (tmp_path / "m").exists()

    push(a_memory(), "me/memory", **OPTIONS, endpoint=hub.endpoint)
    refused("me/memory holds the memory of tokenizer .* expected another", other)
    hub.files.clear()
    refused("nothing to draft from")
    push(counted(tiny_text.tokenizer()), "me/memory", **OPTIONS, endpoint=hub.endpoint)
    assert "| n-grams | 3 |" in hub.files["README.md"].decode()
    refused("holds 'n-grams', (and is to hold|expected) 'texts'", a_memory())


def test_a_memory_without_a_card_is_not_pushed() -> None:
    """Nothing is sent before tokenizer, source and licence are known."""
    for name, source, licence in ((None, "notes", "mit"), ("a", " ", "mit"), ("a", "b", "m\nx")):
        with pytest.raises(ValueError, match="tokenizer, source and licence"):
            push(sd.Memory(tokenizer=name), "me/memory", source=source, licence=licence)


@FULL
@pytest.mark.parametrize("kind", ["texts", "n-grams"])
def test_the_commands_push_and_pull_by_the_environments_endpoint(kind, hub, tmp_path):
    """Built, pushed and pulled as processes; another tokenizer's model is refused by name."""
    endpoint = hub.endpoint
    model = write_model_folder(tmp_path / "model")
    another = write_model_folder(tmp_path / "another", swapped=True)
    (tmp_path / "notes.txt").write_text("the cat and the dog and the cat")
    built, pulled = tmp_path / "built", tmp_path / "pulled"

    def command(*arguments: str | Path) -> Done:
        with in_this_way("as a process"):  # the endpoint is read once in a process
            return run("memory", *arguments, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0", HF_TOKEN="t")

    flags = ("--ngrams",) if kind == "n-grams" else ()
    run("memory", "build", *flags, "--tokenizer", model, "--out", built, tmp_path / "notes.txt")
    pushed = command("push", built, "me/it", "--source", "notes", "--licence", "mit")
    assert endpoint in pushed.stdout, pushed.stderr
    assert set(hub.files) == {"README.md", FILE_NAMES[kind]}
    done = command("pull", "me/it", pulled, "--tokenizer", model)
    assert f"  {kind}" in done.stdout, done.stderr
    assert facts(pulled, kind) == facts(built, kind)
    refused = command("pull", "me/it", tmp_path / "refused", "--tokenizer", another)
    assert refused.returncode == 2
    assert "me/it holds the" in refused.stderr
    assert not (tmp_path / "refused").exists()


def facts(path: Path, kind: str) -> object:
    """All that a file keeps."""
    if kind == "n-grams":
        return sd.drafters.NGramTable.load(path).counts()
    return [text.tolist() for text in sd.Memory.load(path).texts()]
