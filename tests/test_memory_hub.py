"""Memories and tables pushed to and pulled from a server that speaks the Hub's HTTP interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

import specdec_mlx as sd
import tiny_text
from command_line import Done, in_this_way, run
from hub import Hub, hub_at
from selection import cases
from specdec_mlx.memory.hub import FILE_NAMES, pull, push
from tiny_model_folder import write_model_folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Hub]]]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with hub_at() as running:
        yield running


def a_memory() -> sd.Memory:
    memory = sd.Memory(tokenizer=tiny_text.tokenizer())
    memory.add([1, 2, 3, 4])
    memory.sources = {"/home/me/secret-project/plan.md": ("1:2", "abc")}
    return memory


def test_what_is_pushed_can_be_pulled(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    """Its texts and its tokenizer; the card says what it is, nothing says which files it read."""
    endpoint, kept = hub
    options = {"source": "our notes", "licence": "mit", "token": "t", "endpoint": endpoint}
    address = push(a_memory(), "me/memory", **options)
    assert address.startswith(endpoint)
    assert kept.created[0].get("private", kept.created[0].get("visibility")) in (True, "private")
    card = kept.files["README.md"].decode()
    fingerprint = a_memory().tokenizer
    for fact in (f"`{fingerprint}`", "| our notes |", "license: mit", "| tokens | 5 |"):
        assert fact in card
    assert f"| bytes | {len(kept.files[FILE_NAMES['texts']])} |" in card
    assert not any(b"secret-project" in content for content in kept.files.values())
    path = tmp_path / "memory"
    ours = sd.Memory()
    ours.add([7, 8, 9])
    ours.save(path)
    pull("me/memory", path, tiny_text.tokenizer(), [sd.Memory], endpoint=endpoint, token="t")
    texts = [text.tolist() for text in sd.Memory.load(path).texts()]
    assert sorted(texts) == [[1, 2, 3, 4], [7, 8, 9]]
    push(a_memory(), "me/memory", **options)  # again


def test_another_tokenizers_memory_is_neither_pulled_nor_overwritten(
    hub: tuple[str, type[Hub]], tmp_path: Path
) -> None:
    """Both are refused by name, and nothing is changed here or there."""
    endpoint, kept = hub
    options = {"source": "notes", "licence": "mit", "token": "t", "endpoint": endpoint}
    push(a_memory(), "me/memory", **options)
    before = dict(kept.files)
    with pytest.raises(sd.errors.MemoryFileError, match="me/memory holds the memory of tokenizer"):
        pull("me/memory", tmp_path / "memory", "another", [sd.Memory], endpoint=endpoint, token="t")
    assert not (tmp_path / "memory").exists()
    other = sd.Memory(tokenizer="another")
    other.add([1, 2])
    with pytest.raises(sd.errors.MemoryFileError, match="expected another"):
        push(other, "me/memory", **options)
    assert kept.files == before


def test_a_memory_without_a_card_is_not_pushed() -> None:
    """Nothing is sent before tokenizer, source and licence are known."""
    for name, source, licence in ((None, "notes", "mit"), ("a", " ", "mit"), ("a", "b", "m\nx")):
        with pytest.raises(ValueError, match="tokenizer, source and licence"):
            push(sd.Memory(tokenizer=name), "me/memory", source=source, licence=licence)


def counted(tokenizer: object) -> sd.drafters.NGramTable:
    table = sd.drafters.NGramTable(tokenizer=tokenizer)
    table.add([1, 2, 3])
    return table


def test_a_repository_holds_one_kind(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    """The other one is refused by name, pushed or pulled, and nothing is changed."""
    endpoint, kept = hub
    options = {"source": "notes", "licence": "mit", "token": "t", "endpoint": endpoint}
    push(counted(tiny_text.tokenizer()), "me/memory", **options)
    before = dict(kept.files)
    assert "| n-grams | 3 |" in before["README.md"].decode()
    with pytest.raises(sd.errors.MemoryFileError, match="holds 'n-grams', and is to hold 'texts'"):
        push(a_memory(), "me/memory", **options)
    assert kept.files == before
    with pytest.raises(sd.errors.MemoryFileError, match="holds 'n-grams', expected 'texts'"):
        pull("me/memory", tmp_path / "memory", "any", [sd.Memory], endpoint=endpoint)
    kept.files.clear()
    with pytest.raises(sd.errors.MemoryFileError, match="nothing to draft from"):
        pull("me/memory", tmp_path / "memory", "any", [sd.Memory], endpoint=endpoint)
    assert not (tmp_path / "memory").exists()


@pytest.mark.parametrize("kind", cases(["texts", "n-grams"], "n-grams"))
def test_the_commands_push_and_pull_by_the_environments_endpoint(
    kind: str, hub: tuple[str, type[Hub]], tmp_path: Path
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

    flags = ("--ngrams",) if kind == "n-grams" else ()
    run("memory", "build", *flags, "--tokenizer", model, "--out", built, tmp_path / "notes.txt")
    pushed = command("push", built, "me/it", "--source", "notes", "--licence", "mit")
    assert endpoint in pushed.stdout, pushed.stderr
    assert set(kept.files) == {"README.md", FILE_NAMES[kind]}
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
