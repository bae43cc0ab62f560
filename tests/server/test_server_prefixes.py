"""What the server has read it does not read again: after going back, and after it was ended."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import tiny
from engines import ask, queued_together, running, settled, submit, with_flags
from lossless import rows_of
from selection import FULL, cases, in_one_test
from specdec_mlx.server import prefix_files
from specdec_mlx.server.prefix_files import PrefixFiles
from specdec_mlx.server.prefixes import MOST_POINTS, Prefixes, stateful, thinned
from specdec_mlx.server.requests import Ended, Transcript
from tiny_model_folder import write_model_folder

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
KINDS = {row.caches: row.architecture for row in rows_of(PAGE.read_text()) if row.caches}
"""An architecture for each set of kinds of caches that there is."""

TEXT = [(7 * i * i + 3 * i) % 89 + 1 for i in range(90)]
CUTS = [0, 11, 40, 62, 63, 90]  # past the window of 16
OTHER = [5, 17, 80, 3]

built = cache(tiny.build)


def read(model: Any, caches: list[Any], tokens: list[int], cuts: list[int]) -> mx.array:
    """Feed the tokens in parts; the logits after the last part."""
    for start, end in pairwise(cuts):
        logits = model(mx.array([tokens[start:end]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    return logits[0]


SHORT = ("qwen3_next", "gemma3_text", "llama4", "mamba2")


@pytest.mark.parametrize("name", cases(dict.fromkeys([*SHORT, *KINDS.values()]), *SHORT))
def test_going_back_to_a_point_is_as_if_no_more_had_been_read(name: str) -> None:
    """Logits after it are bit-equal to those of caches that read so far in the same parts, but for
    attention that goes back anywhere and rounds by the width of a pass."""
    model, store = built(name), Prefixes(10)
    caches = make_prompt_cache(model)
    for start, end in pairwise(CUTS):
        read(model, caches, TEXT, [start, end])
        store.insert_cache("model", TEXT[:end], copy.deepcopy(caches))
    assert len(store.entries) == 1
    tolerance = 0.0 if stateful(caches) else 1e-4
    for kept, point in ((8, 0), (12, 11), (50, 40), (62, 62), (63, 63), (89, 63), (90, 90)):
        tokens = [*TEXT[:kept], *OTHER]
        found, rest = store.fetch_nearest_cache("model", tokens)
        position = len(tokens) - len(rest)
        assert point <= position <= kept, "windows and chunks may have room to go back a bit"
        cuts = [0, *(cut for cut in CUTS if 0 < cut < position), *[position] * (position > 0)]
        expected = read(model, make_prompt_cache(model), tokens, [*cuts, len(tokens)])
        if found is not None:
            got = read(model, found, tokens, [position, len(tokens)])
            assert mx.allclose(got, expected, rtol=tolerance, atol=tolerance).item(), kept
    store.insert_cache("model", TEXT, copy.deepcopy(caches))
    layers = [layers for entry in store.entries for layers in (entry.caches, *entry.at.values())]
    held = [cache for each in layers for cache in each]
    assert store.nbytes == sum(cache.nbytes for cache in held)


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("gemma3_text", marks=FULL)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is recurrent in part, or has windows of 16."""
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "model", request.param, max_position_embeddings=2**20)


SYSTEM = {"role": "system", "content": "You are the cat in the hat and say so in the other hat."}
SAID = ["in the hat", "and then the other one", "on the mat", "there and then and there"]


def asked(turns: list[str]) -> list[dict[str, str]]:
    """A conversation of what a user and the model said in turn."""
    roles = ["user", "assistant"] * len(turns)
    return [SYSTEM, *({"role": r, "content": t} for r, t in zip(roles, turns, strict=False))]


def ended(text: Transcript) -> Ended:
    assert text.ended is not None
    return text.ended


def cached(text: Transcript) -> int:
    return ended(text).num_cached


def test_a_turn_reads_only_what_is_new_and_says_what_a_fresh_run_says(folder: Path) -> None:
    """Turn by turn; with what was said last said otherwise, as where thoughts are left out; and
    in another conversation with the same system prompt."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    turns: list[str] = []
    read_in_all = 0

    def answer(turns: list[str]) -> Transcript:
        text = ask(engine, messages=asked(turns), num_draft_tokens=3)
        prompt = tokenizer.apply_chat_template(asked(turns), add_generation_prompt=True)
        assert text.text == mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
        assert ended(text).num_prompt == len(prompt)
        return text

    with running(folder, flags=with_flags(), prefill_step_size=16) as engine:
        for question in SAID:
            turns.append(question)
            text = answer(turns)
            total = ended(text).num_prompt + ended(text).num_written
            read_in_all += total - cached(text)
            turns.append(text.text)
        assert read_in_all <= total + 2 * len(SAID)
        end = ended(text).num_prompt - 1
        assert cached(answer([*turns[:-1], turns[-1][::-1], "why"])) == end
        assert cached(answer([*turns[:-3], turns[-3][::-1], "why"])) < end
        assert cached(answer(["another one"])) == len(tokenizer.encode(SYSTEM["content"])) + 3


@FULL
def test_a_server_that_starts_again_reads_only_the_new_turn(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its files are damaged: those are put aside, with a line each, and read anew."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    disk, turns = tmp_path / "kept", list[str]()
    with running(folder, flags=with_flags(), prompt_cache=disk) as engine:
        for question in SAID:
            turns.append(question)
            turns.append(ask(engine, messages=asked(turns)).text)
    (file,) = disk.iterdir()
    assert (disk.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    prompt = tokenizer.apply_chat_template(asked([*turns, "why"]), add_generation_prompt=True)
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)
    whole, key = file.read_bytes(), file.name.partition("-")[0]
    flipped = bytes([*whole[:-99], whole[-99] ^ 1, *whole[-98:]])
    damaged = {
        "cut": (file.name, whole[:-99]),
        "flipped": (file.name, flipped),
        "foreign": (f"{key}-{'0' * 32}.safetensors", b"a letter to my aunt"),
        "without a field": renamed(key, whole.replace(b"points", b"pointt")),
        "of another model": ("0" * 16 + file.name[16:], whole),
        "whole": (file.name, whole),
    }
    for kind, (name, content) in damaged.items():
        for path in disk.iterdir():
            path.unlink()
        (disk / name).write_bytes(content)
        (disk / "letter.safetensors").write_bytes(b"not ours")
        (disk / ".part-7.safetensors").write_bytes(whole[:-99])
        caplog.clear()
        with running(folder, flags=with_flags(), prompt_cache=disk) as engine:
            reply = ask(engine, messages=asked([*turns, "why"]))
            again = ask(engine, messages=asked([*turns[:-1], "hat", "why"]), max_tokens=1)
        assert reply.text == text, kind
        assert cached(reply) in (range(len(prompt) - 12, len(prompt)) if kind == "whole" else [0])
        assert (cached(again) > len(prompt) - 50) == (kind == "whole"), "a state of its file"
        is_put_aside = kind in ("cut", "flipped", "foreign", "without a field")
        assert len(re.findall("is put aside", caplog.text)) == is_put_aside, kind
        assert (disk / f"{name}.damaged").exists() == is_put_aside
        assert (disk / "letter.safetensors").exists()
        assert not (disk / ".part-7.safetensors").exists()


KEY = "a" * 16


def renamed(key: str, content: bytes) -> tuple[str, bytes]:
    """A file's name, which is right for its content, and the content."""
    return f"{key}-{hashlib.sha256(content).hexdigest()[:32]}.safetensors", content


@cache
def written() -> bytes:
    """A file of a model with recurrent states, of `TEXT` and of states at some positions."""
    model = built("qwen3_next")
    caches = make_prompt_cache(model)
    with tempfile.TemporaryDirectory() as folder:
        files = PrefixFiles(Path(folder), KEY, 10**9)
        store = Prefixes(10)
        for start, end in pairwise(CUTS):
            read(model, caches, TEXT, [start, end])
            held = copy.deepcopy(caches)
            store.insert_cache("model", TEXT[:end], held, files if end == len(TEXT) else None)
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def fetched(name: str, content: bytes, tokens: list[int]) -> tuple[Any, list[str]]:
    """What a new server has of `tokens` with this file, and the files that are there then."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        files = PrefixFiles(Path(folder), KEY, 10**9)
        store = Prefixes(10)
        found = [store.fetch_nearest_cache("model", tokens, files)[0] for _ in range(2)]
        assert found[0] is not None or found[1] is None
        return found[0], [path.name for path in Path(folder).iterdir()]


def header_of(content: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Header of the format, ours in it, and the rest of a file."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["0.prefix"]), content[8 + size :]


WRONG: dict[str, list[Any]] = {
    "key": ["b" * 16, 1, None],
    "tokens": [[], 5, None, "abc", [1.5], [True], {"1": 2}, [TEXT]],
    "points": [5, "ab", [0], [11, 11], [62, 40], [91], [-3], ["40"], [40.0], {"40": 1}],
    "layers": [0, -1, None, "4", True, 2.0, [4]],
}


@in_one_test("field", WRONG)
def test_a_header_that_lacks_a_field_or_has_another_type_is_put_aside(field: str) -> None:
    """Whatever stands there in its place, in a file whose name is right for its content."""
    header, ours, rest = header_of(written())
    for tokens in ([*TEXT, 3], [*TEXT[:50], *OTHER]):
        assert fetched(*renamed(KEY, written()), tokens)[0] is not None
    without = {name: value for name, value in ours.items() if name != field}
    for wrong in (without, *(ours | {field: value} for value in WRONG[field]), ours | {"more": 1}):
        header["__metadata__"]["0.prefix"] = json.dumps(wrong)
        front = json.dumps(header).encode()
        content = len(front).to_bytes(8, "little") + front + rest
        for tokens in ([*TEXT, 3], [*TEXT[:50], *OTHER]):
            found, names = fetched(*renamed(KEY, content), tokens)
            assert found is None, wrong
            assert all(name.endswith(".damaged") for name in names), wrong


@given(st.data())
def test_no_flipped_bit_and_no_cut_is_an_error_or_a_wrong_cache(data: st.DataObject) -> None:
    """Wherever it is, in the header more than elsewhere: the text is read anew."""
    whole = bytearray(written())
    size = 8 + int.from_bytes(whole[:8], "little")
    last = data.draw(st.sampled_from([8, size, len(whole)])) - 1
    names = [whole.index(name.encode()) for name in WRONG]
    place = data.draw(st.integers(0, last) | st.sampled_from(names))
    if data.draw(st.booleans()):
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del whole[place:]
    name = renamed(KEY, written())[0]
    for tokens in ([*TEXT, 3], [*TEXT[:50], *OTHER]):
        assert fetched(name, bytes(whole), tokens)[0] is None


def test_a_folder_that_is_only_read_gives_its_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a part of a file was left in it, and the time of a use cannot be set."""

    def refuse(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    name, content = renamed(KEY, written())
    (tmp_path / name).write_bytes(content)
    (tmp_path / ".part-7.safetensors").write_bytes(content[:99])
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    files = PrefixFiles(tmp_path, KEY, 10**9)
    caches, rest = Prefixes(10).fetch_nearest_cache("model", [*TEXT, 3], files)
    assert (caches is not None, rest) == (True, [3])


def test_a_full_disk_keeps_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files before are there still."""

    def write_a_part(path: str, *more: Any) -> None:
        Path(path).write_bytes(b"a part")
        raise RuntimeError("[write] Unable to write 9 bytes to file.")

    name, content = renamed(KEY, written())
    (tmp_path / name).write_bytes(content)
    files, store = PrefixFiles(tmp_path, KEY, 10**9), Prefixes(10)
    caches, _ = store.fetch_nearest_cache("model", [*TEXT, 3], files)
    assert caches is not None
    monkeypatch.setattr(prefix_files, "save_prompt_cache", write_a_part)
    store.insert_cache("model", TEXT, caches, files)
    assert "Unable to write" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == [name]


def with_config(**changes: Any) -> Callable[[Path], str | None]:
    """A change of the configuration in a model's folder."""

    def change(folder: Path) -> str | None:
        config = json.loads((folder / "config.json").read_text())
        assert config.keys() & changes.keys() or "rope_scaling" in changes
        (folder / "config.json").write_text(json.dumps(config | changes))
        return None

    return change


def with_a_row_edited(folder: Path) -> str | None:
    """Between the places that a fingerprint reads; the file's size and time are as they were."""
    file = folder / "model.safetensors"
    before, weights = file.stat(), dict(mx.load(str(file)))
    name = next(name for name in weights if name.endswith("k_proj.weight"))
    weights[name][3] = -weights[name][3]
    mx.save_safetensors(str(file), weights, metadata={"format": "mlx"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return None


def with_adapter(scale: float) -> Callable[[Path], str | None]:
    """A LoRA adapter with the same weights at any scale."""

    def change(folder: Path) -> str | None:
        adapter = folder.with_name(f"{folder.name} adapter")
        adapter.mkdir(exist_ok=True)
        options = {"rank": 2, "scale": scale, "dropout": 0.0, "keys": ["self_attn.k_proj"]}
        config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": options}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        plain, _ = mlx_lm.load(str(folder))[:2]
        linear_to_lora_layers(plain, 1, options)
        weights = [(n, x) for n, x in tree_flatten(plain.parameters()) if "lora_" in n]
        values = {name: mx.arange(x.size).reshape(x.shape) % 3 * 1.0 for name, x in weights}
        mx.save_safetensors(str(adapter / "adapters.safetensors"), values)
        return str(adapter)

    return change


def with_nothing(folder: Path) -> str | None:
    """Copied, with another time."""
    copied = folder.with_name(f"{folder.name} copied")
    shutil.copytree(folder, copied)
    shutil.rmtree(folder)
    shutil.copytree(copied, folder, copy_function=shutil.copy)
    return None


OTHERS: dict[str, tuple[str, Callable[[Path], str | None]]] = {
    "the same": ("qwen3_moe", with_nothing),
    "YaRN": (
        "qwen3_moe",
        with_config(
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        ),
    ),
    "linear scaling": ("qwen3_moe", with_config(rope_scaling={"type": "linear", "factor": 2.0})),
    "rope_theta": ("qwen3_moe", with_config(rope_theta=777.0)),
    "rms_norm_eps": ("qwen3_moe", with_config(rms_norm_eps=0.1)),
    "experts a token": ("qwen3_moe", with_config(num_experts_per_tok=1)),
    "sliding_window": ("gemma3_text", with_config(sliding_window=8)),
    "a row": ("qwen3_moe", with_a_row_edited),
    "an adapter": ("qwen3_moe", with_adapter(1.0)),
    "its scale": ("qwen3_moe", with_adapter(20.0)),
}


@pytest.mark.parametrize("name", cases(OTHERS, "the same", "YaRN", "a row", "its scale"))
def test_kept_caches_are_of_one_configuration_one_adapter_and_one_set_of_weights(
    name: str, tmp_path: Path
) -> None:
    """After any change between two starts the prompt is read anew, and the text is the model's; the
    same model goes on with them, with other times of its files too.
    """
    folder, (architecture, change) = tmp_path / "model", OTHERS[name]
    write_model_folder(folder, architecture, max_position_embeddings=2**20)
    kept: dict[str, Any] = {"flags": with_flags(), "prompt_cache": tmp_path / "kept"}
    adapter = with_adapter(1.0)(folder) if name == "its scale" else None
    with running(folder, adapter_path=adapter, **kept) as engine:
        ask(engine, messages=asked(SAID[:1]), max_tokens=8)
    adapter = change(folder)
    model, tokenizer = mlx_lm.load(str(folder), adapter_path=adapter)[:2]
    prompt = tokenizer.apply_chat_template(asked(SAID[:1]), add_generation_prompt=True)
    with running(folder, adapter_path=adapter, **kept) as engine:
        reply = ask(engine, messages=asked(SAID[:1]), max_tokens=8)
    assert reply.text == mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
    assert cached(reply) == (len(prompt) - 1 if name == "the same" else 0)


@FULL
def test_a_model_that_was_changed_while_another_was_served_is_read_anew(tmp_path: Path) -> None:
    """In the memory of one server; an unchanged one goes on with what was kept."""
    one, two = (write_model_folder(tmp_path / name, "qwen3_moe") for name in ("one", "two"))
    with running(one, flags=with_flags()) as engine:
        for folder in (one, two, one):
            reply = ask(engine, messages=asked(SAID[:1]), max_tokens=8, model=str(folder))
        assert cached(reply) == ended(reply).num_prompt - 1
        ask(engine, messages=asked(SAID[:1]), max_tokens=8, model=str(two))
        with_config(rope_theta=777.0)(one)
        reply = ask(engine, messages=asked(SAID[:1]), max_tokens=8, model=str(one))
    assert cached(reply) == 0


def test_files_reach_beyond_memory_and_are_bounded(folder: Path, tmp_path: Path) -> None:
    """Two conversations in turn, where memory holds one; then files for one of them alone."""
    settings: dict[str, Any] = {"flags": with_flags(), "prompt_cache_size": 1}

    def second_turns(**more: Any) -> list[bool]:
        """True for each conversation whose second turn read no more than that."""
        found = []
        with running(folder, **settings, **more) as engine:
            texts = [ask(engine, messages=asked([name])).text for name in SAID[:2]]
            for name, text in reversed([*zip(SAID, texts, strict=False)]):
                reply = ask(engine, messages=asked([name, text, "why"]))
                found.append(cached(reply) > ended(reply).num_prompt - 12)
        return found

    assert second_turns(prompt_cache=tmp_path) == [True, True]
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    bounded = tmp_path / "bounded"
    most = int(1.5 * size)
    assert second_turns(prompt_cache=bounded, prompt_cache_limit=most) == [True, False]
    assert sum(path.stat().st_size for path in bounded.iterdir()) <= 1.5 * size


def test_rows_of_a_batch_are_kept_too(folder: Path, tmp_path: Path) -> None:
    """Answers of a batch, one that a stop string ends among them; the next server goes on."""
    with running(folder, flags=with_flags(), prompt_cache=tmp_path) as engine:
        whole = ask(engine, messages=asked(SAID[:1]), max_tokens=40)
        kinds: list[dict[str, Any]] = [{}, {"stop": [whole.text[20:24]], "max_tokens": 40}]
        with queued_together(engine):
            clients = [submit(engine, messages=asked([SAID[2], "so"]), **kind) for kind in kinds]
            clients += [submit(engine, messages=asked(SAID[:1]), **kind) for kind in kinds]
        texts = [client.wait() for client in clients]
    assert all(ended(text).is_batched for text in texts[1:])
    assert ended(texts[-1]).stop is not None
    with running(folder, flags=with_flags(), prompt_cache=tmp_path) as engine:
        stopped = ask(engine, messages=asked([SAID[0], texts[-1].text, "why"]), max_tokens=1)
        assert cached(stopped) >= ended(whole).num_prompt - 1, "what stopped it was no answer"
        reply = ask(engine, messages=asked([SAID[0], texts[-2].text, "why"]), max_tokens=1)
        assert cached(reply) > ended(reply).num_prompt - 12


def test_memory_is_bounded_in_bytes(folder: Path) -> None:
    """The least recently used go first; a text that is written beside others counts."""
    with running(folder, flags=with_flags(), prompt_cache_size=99) as engine:
        for i in range(4):
            ask(engine, prompt=f"{i} {SAID[1]}")
        most = settled(engine).prefixes.nbytes // 2
        engine.prefixes.trim_to(most)
        assert 0 < engine.prefixes.nbytes <= most
        assert cached(ask(engine, prompt=f"3 {SAID[1]}")) > 0
        assert cached(ask(engine, prompt=f"0 {SAID[1]}")) == 0


def test_states_are_fewer_the_longer_ago_they_were() -> None:
    """The first, of the system prompt, stays."""
    left = [*thinned({p: [] for p in range(10, 1000, 10)}, 1000)]
    assert (len(left), left[0], left[-1]) == (MOST_POINTS, 10, 990)
    assert sum(p > 700 for p in left) > MOST_POINTS / 2
