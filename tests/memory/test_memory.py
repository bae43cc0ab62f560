"""Laws of `Memory`: what it holds and forgets, its file, and the commands about it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny_text
from command_line import both_ways, run
from selection import cases, in_one_test
from serving import serving
from specdec_mlx import lab
from specdec_mlx.cli.commands import main
from specdec_mlx.errors import MemoryFileError, TokenizerMismatchError
from specdec_mlx.memory import file as memory_file
from specdec_mlx.memory import store
from specdec_mlx.memory.index import MAX_TOKEN, Context
from specdec_mlx.memory.store import as_memory
from tiny_model_folder import write_model_folder

CONTEXT = sd.drafters.DraftContext()
table = lab.NGramTable
some_texts = st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=12), max_size=12)


def filled(texts: Sequence[Sequence[int]], max_tokens: int = 1_000_000) -> sd.Memory:
    memory = sd.Memory(max_tokens)
    for text in texts:
        memory.add(text)
    return memory


def held(memory: sd.Memory) -> list[list[int]]:
    return [text.tolist() for text in memory.texts()]


def follows(memory: sd.Memory, tokens: Sequence[int]) -> bool:
    """Whether the memory has a place behind all of these tokens."""
    context = Context.of(tokens)
    return any(
        match == len(tokens)
        for index in memory.indexes
        for match, _ in index.nearest(context, 8, 0)
    )


# What it holds ------------------------------------------------------------------------------------


@given(some_texts, st.sampled_from([3, 10, 60, 1000]), st.sampled_from([0, 4, 30]), st.booleans())
def test_the_oldest_texts_go_first(texts, bound, young, in_bytes):
    """It holds the latest texts in order, up to its bound, and finds every place in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "YOUNG", young)
        memory = (
            sd.Memory(max_bytes=bound * store.BYTES_PER_TOKEN) if in_bytes else sd.Memory(bound)
        )
        for count, text in enumerate(texts, start=1):
            memory.add(text)
            whole = [text[-bound + 1 :] for text in texts[:count]]
            left = held(memory)
            assert left
            assert left == whole[len(whole) - len(left) :]
            assert len(memory) == sum(len(text) + 1 for text in left) <= bound
            assert len(left) == count or len(memory) + len(whole[-len(left) - 1]) + 1 > 0.9 * bound
            assert all(follows(memory, kept[:-1]) for kept in left if len(kept) > 1)
            assert memory.num_bytes == store.BYTES_PER_TOKEN * len(memory)
        left = held(memory)
        memory.compact()
        assert held(memory) == left
        assert len(memory.indexes) == bool(texts)


def test_what_is_no_token_and_no_bound_is_refused() -> None:
    memory = sd.Memory()
    for token in (-1, MAX_TOKEN + 1):
        with pytest.raises(ValueError, match=f"got token {token}"):
            memory.add([1, token])
    memory.add([MAX_TOKEN, MAX_TOKEN, 3])
    assert follows(memory, [MAX_TOKEN, MAX_TOKEN])
    for options in ({"max_tokens": 0}, {"max_bytes": 8}):
        with pytest.raises(ValueError, match=r"max_.*expected an int >="):
            sd.Memory(**options)


@given(some_texts, some_texts)
def test_merging_takes_over_what_is_lacking(ours: list[list[int]], theirs: list[list[int]]) -> None:
    """As a union of multisets, ours first; merging once more changes nothing."""
    memory, other = filled(ours), filled(theirs)
    memory.merge(other)
    once = held(memory)
    assert once[: len(ours)] == ours
    for text in [*ours, *theirs]:
        assert once.count(text) == max(ours.count(text), theirs.count(text))
    memory.merge(other)
    assert held(memory) == once


def test_another_tokenizers_memory_is_refused(tmp_path: Path) -> None:
    """By merging, by saving over it, and by a drafter when it begins for a target."""
    one, other = sd.Memory(tokenizer="a"), sd.Memory(tokenizer="b")
    with pytest.raises(TokenizerMismatchError, match="tokenizer a"):
        one.merge(other)
    with pytest.raises(ValueError, match=r"save\(path\)"):
        one.save()
    one.add([1, 2])
    one.save(tmp_path / "memory")
    with pytest.raises(MemoryFileError, match="of tokenizer a"):
        other.save(tmp_path / "memory")
    assert held(sd.Memory.load(tmp_path / "memory")) == [[1, 2]]
    with pytest.raises(TokenizerMismatchError):
        table(tokenizer="a").merge(table(tokenizer="b"))
    context = sd.drafters.DraftContext(tokenizer=tiny_text.tokenizer())
    with pytest.raises(TokenizerMismatchError, match="memory build"):
        sd.SuffixDrafter(one).check(context)
    large = filled([[1, 500]])
    with pytest.raises(TokenizerMismatchError, match="token 500, the target has 500"):
        sd.SuffixDrafter(large).begin([1], sd.drafters.DraftContext(vocab_size=500))
    fresh = sd.Memory()
    sd.SuffixDrafter(fresh).check(context)
    assert fresh.tokenizer == sd.Memory(tokenizer=tiny_text.tokenizer()).tokenizer


def test_eight_threads_at_once_lose_nothing(tmp_path: Path) -> None:
    """Generations that begin, draft and close while others write; and eight savings of one file."""
    memory, path = sd.Memory(), tmp_path / "memory"

    def work(name: int) -> None:
        for turn in range(20):
            session = sd.SuffixDrafter(memory).begin([name], CONTEXT)
            session.observe([name, turn, name, 99])
            session.propose(4)
            session.close(5)
        filled([[name] * 3]).save(path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    expected = [[name, turn, name, 99] for name in range(8) for turn in range(20)]
    assert sorted(held(memory)) == expected
    assert sorted(held(sd.Memory.load(path))) == [[name] * 3 for name in range(8)]


# Its file -----------------------------------------------------------------------------------------


@given(some_texts)
def test_a_saved_memory_is_loaded_as_it_was(texts: list[list[int]]) -> None:
    """Texts, places, bounds and tokenizer, in at most 12 bytes a token and a header."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        memory = filled(texts, 500)
        memory.tokenizer = "abc"
        memory.save(path)
        loaded = sd.Memory.load(path)
        assert held(loaded) == texts
        assert (loaded.max_tokens, loaded.tokenizer) == (500, "abc")
        assert path.stat().st_size <= 12 * len(memory) + 512
        assert [i.places for i in loaded.indexes] == [i.places for i in memory.indexes]


def in_a_process(code: str, path: Path) -> int:
    """Its exit status."""
    before = "import os, signal, sys, specdec_mlx as sd\npath = sys.argv[1]\n"
    return subprocess.run([sys.executable, "-c", before + code, str(path)], check=False).returncode


@pytest.mark.parametrize("moment", cases(["fsync", "replace"], "replace"))
def test_a_process_killed_while_saving_leaves_the_old_file(tmp_path: Path, moment: str) -> None:
    """Killed when the new one is written, or on the disk, not in its place; the lock goes too."""
    path = tmp_path / "memory"
    filled([[1, 2, 3]]).save(path)
    before = path.read_bytes()
    code = f"os.{moment} = lambda *anything: os.kill(os.getpid(), signal.SIGKILL)\n"
    code += "m = sd.Memory.load(path); m.add([4, 5, 6]); m.save()"
    assert in_a_process(code, path) == -signal.SIGKILL
    assert path.read_bytes() == before
    memory = sd.Memory.load(path)
    memory.add([7, 8])
    memory.save()
    assert held(sd.Memory.load(path)) == [[1, 2, 3], [7, 8]]
    assert {file.name for file in tmp_path.iterdir()} == {"memory", "memory.lock"}


def test_a_saving_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    """As on a full disk. One that succeeds leaves the old one to who reads it."""
    path, memory = tmp_path / "memory", filled([[1, 2, 3]])
    memory.save(path)
    before = path.read_bytes()
    memory.add([4, 5, 6])
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        full = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(memory_file.os, "fsync", full)
        memory.save()
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {"memory", "memory.lock"}
    with path.open("rb") as reader:
        memory.save()
        assert reader.read() == before != path.read_bytes()


def with_header(content: bytes, last: int | None = None, **changes: object) -> bytes:
    """A file with another header, or another last integer and the checksum that goes with it."""
    length = int.from_bytes(content[8:16], "little")
    header = json.loads(content[16 : 16 + length])
    rest = content[16 + length + -(16 + length) % memory_file.ALIGNMENT :]
    if last is not None:
        rest = rest[:-4] + last.to_bytes(4, "little", signed=True)
        header["crc32"] = zlib.crc32(rest)
    text = json.dumps(header | changes).encode()
    front = content[:8] + len(text).to_bytes(8, "little") + text
    return front + b"\x00" * (-len(front) % memory_file.ALIGNMENT) + rest


DAMAGES = {
    "empty": (lambda c: b"", "not a memory"),
    "something else": (lambda c: b"PK\x03\x04" + c[4:], "not a memory"),
    "a later format": (lambda c: c[:7] + b"\x09" + c[8:], "another version"),
    "cut in the header": (lambda c: c[:40], "header"),
    "cut in the content": (lambda c: c[:-4], "bytes after the header"),
    "a bit of the content": (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "checksum"),
    "no JSON": (lambda c: c[:16] + b"x" + c[17:], "header"),
    "a huge header": (lambda c: c[:8] + b"\xff" * 8 + c[16:], "a header of"),
    "no bound": (lambda c: with_header(c, max_tokens=None), "max_tokens is None: Expected `int`"),
    "no texts": (lambda c: with_header(c, max_tokens=0), "max_tokens is 0: Expected `int` >= 1"),
    "an unknown field": (lambda c: with_header(c, colour="red"), "colour is 'red': .* unknown"),
    "other sizes": (lambda c: with_header(c, indexes=[[1, 1]]), "does not fit"),
    "negative sizes": (lambda c: with_header(c, indexes=[[8, -1]]), r"\[0\]\[1\] is -1: Exp"),
    "a place at the end": (lambda c: with_header(c, 3), "places out of range"),
    "a place before the beginning": (lambda c: with_header(c, -1), "places out of range"),
    "another kind": (lambda c: with_header(c, kind="n-grams"), "holds 'n-grams'.*ram-table:table="),
}


@in_one_test("name", DAMAGES)
def test_what_is_no_memory_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """With the file's name and what to do; and it is not overwritten either."""
    path = tmp_path / name
    filled([[1, 2, 3]]).save(path)
    damage, words = DAMAGES[name]
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(MemoryFileError, match=words) as caught:
        sd.Memory.load(path)
    assert str(path) in str(caught.value)
    with pytest.raises(MemoryFileError):
        filled([[4, 5, 6]]).save(path)
    assert path.read_bytes() == before


def test_a_path_in_the_place_of_a_memory_is_opened_once(tmp_path: Path) -> None:
    """Two drafters of one file share it, and a file that does not exist is made at the end."""
    path = tmp_path / "memory"
    code = (
        "a, b = sd.drafters.make_drafter('suffix', memory=path), sd.SuffixDrafter(path)\n"
        "assert a.memory is b.memory\n"
        "session = a.begin([1], sd.drafters.DraftContext())\n"
        "session.observe([2, 3, 4]); session.close(4)\n"
    )
    assert not in_a_process(code, path)
    assert held(sd.Memory.load(path)) == [[2, 3, 4]]
    one, other = as_memory("process"), as_memory("process")
    assert one is not other
    assert (len(one), one.path) == (0, None)


# From files, and the commands ---------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, content in {
        "a.py": b"def first(a):\n    return a\n",
        "docs/b.md": b"Some words about it.\n",
        ".git/config": b"not for anybody",
        ".env": b"SECRET=1",
        "node_modules/x.js": b"not ours",
        "image.png": b"\x89PNG\x00\x00",
        "latin.txt": b"caf\xe9",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def words(memory: sd.Memory) -> list[str]:
    tokenizer = tiny_text.tokenizer()
    return sorted(tokenizer.decode(text) for text in held(memory))


def test_only_what_has_changed_is_read_again(project: Path, tmp_path: Path) -> None:
    """Hidden files and what is no text are skipped; changed and gone files are forgotten."""
    tokenizer = tiny_text.tokenizer()
    path = tmp_path / "memory"
    memory = sd.Memory()
    memory.add(tokenizer.encode("written by a generation"))
    found = memory.update([project], tokenizer)
    assert held(sd.Memory.from_files([project], tokenizer)) == held(memory)[1:]
    assert {"add", "from_files", "load", "merge", "prune", "save"} <= set(dir(memory))
    assert (found.read, found.unchanged, found.gone, found.skipped) == (2, 0, 0, 2)
    code, notes = "def first(a):\n    return a\n", "Some words about it.\n"
    assert words(memory) == [notes, code, "written by a generation"]
    memory.save(path)
    memory = sd.Memory.load(path)
    assert memory.update([project], tokenizer).read == 0
    (project / "a.py").write_text("def second(b): ...\n")
    (project / "docs" / "b.md").unlink()
    (project / "new.txt").write_text("something new")
    found = memory.update([project], tokenizer)
    assert (found.read, found.unchanged, found.gone) == (2, 2, 1)
    assert words(memory) == ["def second(b): ...\n", "something new", "written by a generation"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        memory.update([project / "nowhere"], tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "target")


@both_ways
def test_memories_are_built_shown_merged_and_pruned(project, model, tmp_path):
    """By commands, of which each says what there is afterwards. A long file is no warning."""
    one, both = tmp_path / "one", tmp_path / "both"
    tokenizer = shutil.copytree(model, tmp_path / "tokenizer")
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 2}))
    build = ("memory", "build", "--tokenizer", tokenizer, "--out", one)
    first = run(*build, project)
    assert "2 files read, 0 unchanged, 0 gone, 2 skipped" in first.stdout
    assert first.stderr == ""
    assert "0 files read, 4 unchanged" in run(*build, project).stdout
    filled([[1, 2, 3], [4, 5, 6]]).save(tmp_path / "two")
    merged = run("memory", "merge", both, one, tmp_path / "two")
    assert "texts          4" in merged.stdout, merged.stderr
    run("memory", "prune", both, "--max-tokens", "9")
    assert "of at most 9" in run("memory", "info", both).stdout
    assert held(sd.Memory.load(both)) == [[1, 2, 3], [4, 5, 6]]
    (tmp_path / "none").write_text("no memory")
    refused = run("memory", "info", tmp_path / "none")
    assert refused.returncode == 2
    assert "is not a memory" in refused.stderr


@both_ways
def test_a_command_drafts_from_a_memory_and_adds_to_it(model: Path, tmp_path: Path) -> None:
    """The same text in fewer passes the second time; what was typed is not in the file."""
    path = tmp_path / "memory"
    asked = ("--model", model, "--prompt", "the cat", "--max-tokens", "40", "--temp", "0")
    generate = ("generate", *asked, "--num-draft-tokens", "4", "--memory", path)
    first, second = run(*generate), run(*generate)
    assert first.returncode == second.returncode == 0, first.stderr
    text = first.stdout.partition("==========")[2].partition("==========")[0]
    assert text == second.stdout.partition("==========")[2].partition("==========")[0]
    kept = held(sd.Memory.load(path))
    assert kept[0] == kept[1]
    assert len(kept[0]) == 40
    session = sd.SuffixDrafter(sd.Memory.load(path)).begin(kept[0][:5], sd.drafters.DraftContext())
    assert session.propose(4).tokens == kept[0][5:9]


@pytest.mark.parametrize("whom", cases(["user", "key"], "user"))
def test_each_user_or_key_of_a_server_has_a_memory(whom: str, model: Path) -> None:
    """What one was told is drafted for that one; without a user's name, for nobody; in no file."""
    ask = {"model": "default_model", "prompt": "the cat", "max_tokens": 40, "temperature": 0.0}
    flags = ("--model", str(model), "--memory-for", whom, "--memory")
    refused = run("server", *flags, "memory")
    assert (refused.returncode, "--memory process" in refused.stderr) == (2, True)
    with serving(*flags, "process") as client:

        def passes(key: str, **user: str) -> tuple[int, str]:
            reply = client.with_options(api_key=key).completions.create(
                extra_body={"num_draft_tokens": 4}, **ask, **user
            )
            account = reply.usage.speculation
            assert account["drafter"] == "auto"
            return account["target_passes"], reply.choices[0].text

        alone, text = passes("one", user="she")
        again, text_again = passes("one", user="she" if whom == "user" else "he")
        others = [passes("two", user="he" if whom == "user" else "she")]
        if whom == "user":
            others += [passes("one"), passes("one")]
    assert again < alone
    assert text_again == text
    assert others == [(alone, text)] * len(others)


# Counts instead of texts --------------------------------------------------------------------------


def counted(texts: Sequence[Sequence[int]]) -> lab.NGramTable:
    made = table(max_order=3)
    for text in texts:
        made.add(text)
    return made


@given(some_texts, some_texts)
def test_tables_count_saved_loaded_and_merged(ours, theirs):
    """Every n-gram of every text, once; merging is counting both."""
    texts = [*ours, *theirs]
    slices = [text[i : i + n] for text in texts for n in (2, 3) for i in range(len(text) - n + 1)]
    expected = Counter(map(tuple, slices))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        counted(ours).save(path)
        merged = table.load(path)
        merged.merge(counted(theirs))
        assert merged.counts() == expected
        merged.save()
        assert table.load(path).counts() == expected


@in_one_test(
    ("kind", "content", "expected"),
    [
        (sd.Memory, held, [[1, 2, 3], [4, 5], [7, 8]]),
        (table, table.counts, {(1, 2): 1, (2, 3): 1, (1, 2, 3): 1, (4, 5): 2, (7, 8): 1}),
    ],
)
def test_two_that_save_one_file_lose_and_double_nothing(kind, content, expected, tmp_path):
    """However often, in turns, after both have loaded it; what was there stands first."""
    first, path = kind(), tmp_path / kind.__name__
    first.add([1, 2, 3])
    first.save(path)
    one, other = kind.load(path), kind.load(path)
    one.add([4, 5])
    other.add([4, 5])
    other.add([7, 8])
    for _ in range(2):
        one.save()
        other.save()
    assert content(kind.load(path)) == expected == content(other)


def test_a_table_is_drafted_from_and_written_to() -> None:
    """Where the text's own counts know no context as long; prompts are not counted."""
    kept = counted([[1, 2, 3, 4, 5]])
    drafter = lab.TabledNGramDrafter(table=kept)
    key = repr(drafter)
    assert drafter.begin([1, 2], CONTEXT).propose(3).tokens == [3, 4, 5]
    session = drafter.begin([9, 2, 7, 8, 2], CONTEXT)
    assert session.propose(1).tokens == [7]  # its own, of equal length
    session.observe([6, 6])
    session.close(6)
    assert {ngram for ngram in kept.counts() if 6 in ngram} == set()
    session = drafter.begin([9], CONTEXT)
    session.observe([6, 6])
    session.close(3)
    assert kept.counts()[6, 6] == 1
    assert repr(drafter) == key


def test_a_table_may_be_named_by_its_path(tmp_path: Path) -> None:
    """It is made with the drafter's orders, one for the whole process; a memory is refused."""
    path = tmp_path / "table"
    one, other = (lab.TabledNGramDrafter(max_order=3, table=str(path)) for _ in range(2))
    assert one.table is other.table
    one.table.add([1, 2, 1])
    one.table.save()
    assert table.load(path).counts() == {(1, 2): 1, (2, 1): 1, (1, 2, 1): 1}
    filled([[1, 2]]).save(tmp_path / "memory")
    for take, file, got in (
        (sd.SuffixDrafter, path, "n-grams"),
        (sd.Memory.load, path, "n-grams"),
        (table.load, tmp_path / "memory", "texts"),
    ):
        with pytest.raises(MemoryFileError, match=f"holds '{got}'"):
            take(str(file))
    with pytest.raises(ValueError, match="orders 3 to 2"):
        table(max_order=2, min_order=3)


def test_a_copy_to_share_has_the_texts_and_no_names_of_files(tmp_path: Path) -> None:
    """`memory export`; an existing file is never overwritten."""
    (tmp_path / "secret-name.txt").write_text("the cat and the dog and the cat")
    memory, copy = sd.Memory(), tmp_path / "public.memory"
    memory.update([tmp_path / "secret-name.txt"], tiny_text.tokenizer())
    memory.save(tmp_path / "project.memory")
    arguments = ["memory", "export", str(tmp_path / "project.memory"), str(copy)]
    assert main(arguments) == 0
    assert b"secret-name" in (tmp_path / "project.memory").read_bytes()
    assert b"secret-name" not in copy.read_bytes()
    assert [[*t] for t in sd.Memory.load(copy).texts()] == [[*t] for t in memory.texts()]
    assert main(arguments) == 2
