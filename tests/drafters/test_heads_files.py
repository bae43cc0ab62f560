"""Files of heads: fetched from the Hub, written by torch, damaged."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import logging
import random
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import mlx.core as mx
import numpy as np
import pytest

import heads
import specdec_mlx as sd
from selection import cases, in_one_test
from specdec_mlx.drafters.heads.eagle import IDS_KEY
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.loading import is_head
from specdec_mlx.errors import HeadError

# Fetched from the Hub ----------------------------------------------------------------------------


COMMIT = "0" * 40


class Hub(BaseHTTPRequestHandler):
    """A repository with small files, in memory; faults: a file's status, or 0 to end in it."""

    files: dict[str, bytes]
    asked: list[str]
    faults: dict[str, int]

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.command == "GET" and "/resolve/" in self.path:  # the client asks for more, at times
            self.asked.append(name)
        content, fault = self.files.get(name), self.faults.get(name)
        if fault:
            self.answer(b"", fault, {"X-Error-Code": "RepoNotFound"})
        elif content is None:
            self.answer(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        else:
            tag = f'"{hashlib.sha256(content).hexdigest()}"'
            headers = {"X-Repo-Commit": COMMIT, "ETag": tag}
            self.answer(content, 200, headers, is_cut=fault is not None)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(
        self, content: bytes, status: int = 200, headers: Any = None, is_cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if is_cut else content)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A repository that stands for the Hub, with a cache of its own."""
    handler: type[Hub] = type("OwnHub", (Hub,), {"files": {}, "asked": [], "faults": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    url = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(tmp_path / "cache")}
    constants |= {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": url}
    for name, value in constants.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield handler
    server.shutdown()
    server.server_close()


def put(hub: type[Hub], folder: Path) -> None:
    """A folder's files on the Hub."""
    hub.files |= {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_head_is_fetched_from_the_hub(hub: type[Hub], tmp_path: Path) -> None:
    """Its configuration and its tensors, once; nothing of torch's beside them."""
    reference = heads.reference("eagle3")
    put(hub, reference.write(tmp_path / "here"))
    hub.files |= dict.fromkeys(("pytorch_model.bin", "medusa_lm_head.safetensors"), b"not asked")
    assert is_head("me/head")
    assert hub.asked == ["config.json"]
    fetched, again = (sd.load_head("me/head", reference.target()) for _ in range(2))
    assert sorted(hub.asked) == ["config.json", "model.safetensors"]
    assert fetched.describe().startswith("me/head: EAGLE-3; reads the outputs of layers 1, 3, 4")
    here = sd.load_head(tmp_path / "here", reference.target())
    assert fetched.key == again.key == here.key


MODELS = ("mtp_qwen3_5", "mtp_deepseek_v3", "mtp_longcat_flash", "mtp_step3p5")


@pytest.mark.parametrize("kind", cases(MODELS, "mtp_longcat_flash"))
def test_of_a_model_on_the_hub_just_the_shards_with_the_layer_are_fetched(kind, hub, tmp_path):
    """By its index; other shards may be hundreds of gigabytes."""
    reference, index = heads.reference(kind), {"model.embed_tokens.weight": "a.safetensors"}
    for i, shard in enumerate(("b", "c")):
        weights = {name: reference.weights[name] for name in sorted(reference.weights)[i::2]}
        put(hub, heads.Reference(reference.config, weights, {}).write(tmp_path / shard))
        hub.files[f"{shard}.safetensors"] = hub.files.pop("model.safetensors")
        index |= dict.fromkeys(weights, f"{shard}.safetensors")
    hub.files["model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    fetched = sd.load_head("me/model", reference.target())
    assert sorted(set(hub.asked)) == sorted(hub.files)
    assert fetched.key == heads.loaded(kind, tmp_path / "whole").key


@pytest.fixture
def silence() -> Iterator[None]:
    """No lines of log, which would tell of each try."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("silence")
def test_what_the_hub_does_not_give_is_said(hub, tmp_path, monkeypatch):
    """No such repository, a file that ends in the middle, no file with tensors."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # before the client tries again
    target = heads.target()
    put(hub, heads.reference("eagle3").write(tmp_path / "here"))
    said = {
        ("config.json", 401): "no Hugging Face repository of that name that can be read",
        ("config.json", 0): "config.json was not fetched whole",
        ("model.safetensors", 0): "model.safetensors was not fetched whole",
    }
    for (name, fault), words in said.items():
        hub.faults = {name: fault}
        with pytest.raises(HeadError, match=words):
            sd.load_head("me/head", target)
        assert name != "config.json" or not is_head("me/head")
    hub.faults, hub.asked = {}, []
    hub.files["pytorch_model.bin"] = hub.files.pop("model.safetensors")
    with pytest.raises(HeadError, match="me/head has no safetensors"):
        sd.load_head("me/head", target, torch_files=False)
    assert "pytorch_model.bin" not in hub.asked


# Torch's own files -------------------------------------------------------------------------------


def stub(values: Any, dtype: str) -> types.SimpleNamespace:
    """What stands for a tensor of torch's."""
    x = np.array(values, dtype)
    made = types.SimpleNamespace(numpy=lambda: x, float=lambda: stub(values, "float32"))
    made.is_floating_point = lambda: x.dtype.kind == "f"
    return made


def test_torchs_files_are_read_by_torch_which_runs_no_code(monkeypatch, tmp_path):
    """Where there is nothing else; numbers with a point as float32, what is no tensor left out."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"of torch")
    tensors = {"half": ([0.5, -1.5], "float16"), "whole": ([7, -8], "int64"), "yes": ([1], "bool")}
    saved: Any = {name: stub(*given) for name, given in tensors.items()} | {"epoch": 3}
    asked: list[Any] = []

    def load(path: Path, **options: Any) -> Any:
        asked.append((path.name, options))
        return saved

    torch: Any = types.ModuleType("torch")
    torch.__version__, torch.load = "2.6.0+cpu", load
    torch.is_tensor = lambda value: isinstance(value, types.SimpleNamespace)
    torch.__spec__ = types.SimpleNamespace(name="torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    files = HeadFiles(tmp_path)
    assert files.weight_map.keys() == tensors.keys()
    read, converted = files.read(["half", "whole"])
    assert (read["half"].dtype, read["half"].tolist()) == (mx.float32, [0.5, -1.5])
    assert (read["whole"].dtype, read["whole"].tolist()) == (mx.int64, [7, -8])
    assert not converted
    assert asked == 2 * [("pytorch_model.bin", {"weights_only": True, "map_location": "cpu"})]
    saved = [1]
    for version, words in (("2.5.1", r"2\.5\.1 may run code"), ("2.6", "bin cannot be read")):
        torch.__version__ = version
        with pytest.raises(HeadError, match=words):
            HeadFiles(tmp_path).weight_map  # noqa: B018


def test_a_torch_file_is_not_read_without_torch(monkeypatch, tmp_path):
    """Nor beside safetensors of any name, nor beyond its storage; it is said how to convert it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("specdec_mlx.drafters.heads.files.find_spec", lambda name: None)
    reference = heads.reference("eagle3")
    folder = reference.write(tmp_path)
    heads.torch_file(folder / "pytorch_model.bin", 4)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert sd.load_head(folder, reference.target()).describe().startswith(f"{folder}: EAGLE-3")
    (folder / "weights.safetensors").unlink()
    for shape, offset in ((100_000, 0), (4, 10**12), (4, 0)):
        heads.torch_file(folder / "pytorch_model.bin", shape, offset)
        with pytest.raises(HeadError, match=r"Install torch, or convert it: safetensors\.torch\."):
            sd.load_head(folder, reference.target())


# Damaged files -----------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(-1, 0, 1, 2, 7, 10**6, 10**9, 2**31, 2**63, 10**30, -(10**12), 1.5, float("nan")),
    *(None, "x", "", [], [1], [[1]], {}, {"a": 1}, True, False, ["x"]),
]
"""Values of a damaged file, numbers first."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each dictionary or list in a tree with each of its keys."""
    inside = {dict: dict.items, list: enumerate}.get(type(value), lambda value: ())
    for key, part in inside(value):  # type: ignore[operator]
        yield value, key
        yield from places(part)


def damaged_config(content: bytes, rng: random.Random) -> bytes:
    """JSON with other values, or other bytes."""
    if rng.random() < 0.2:
        return with_other_bytes(content, rng)
    changed = json.loads(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        part, key = rng.choice(list(places(changed)) or [({0: 0}, 0)])
        if rng.random() < 0.2:
            del part[key]
        else:
            part[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(changed).encode()


def with_other_bytes(content: bytes, rng: random.Random) -> bytes:
    """Cut off, or with other, more or fewer bytes in the middle."""
    place, size = rng.randrange(len(content)), rng.choice([1, 5, 40])
    end = place + rng.choice([0, size, size, len(content)])
    return content[:place] + rng.randbytes(rng.choice([0, size, size])) + content[end:]


def damaged_tensors(content: bytes, rng: random.Random) -> bytes:
    """A file of safetensors whose header lies, whose tensors are others, or with other bytes."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    what = rng.choice(["header", "header", "header", "length", "bytes", "tensors", "tensors"])
    if what == "tensors":
        return other_tensors(content, rng)
    if what == "bytes":
        return with_other_bytes(content, rng)
    if what == "length":
        size = rng.choice([0, 1, end - 9, end - 7, len(content), 2**32, 2**63])
        return struct.pack("<Q", size) + content[8:]
    header = damaged_config(content[8:end], rng)
    return struct.pack("<Q", len(header)) + header + content[end:]


def other_tensors(content: bytes, rng: random.Random) -> bytes:
    """A whole file in which one tensor has another shape, type, name or other numbers."""
    tensors: Any = mx.load(io.BytesIO(content), format="safetensors")
    name = rng.choice(sorted(tensors))
    x = tensors.pop(name)
    number, infinite = rng.choice(VALUES[:8]), rng.choice([float("nan"), float("inf"), -1e30])
    types = [mx.int8, mx.uint32, mx.bool_, mx.float16, mx.int64]
    others = [x.reshape(-1), x.reshape(x.shape[::-1]), x[:0], x[: x.shape[0] // 2]]
    others += [mx.concatenate([x, x]), x.astype(rng.choice(types)), mx.array(number)]
    others += [mx.full(x.shape, number, mx.int64), mx.full(x.shape, infinite)]
    changes = [{}, *({name: other} for other in others)]
    changes += [{f"{name}.{rng.choice(['more', 'scales', '0'])}": x}]
    changes += [{"999999999.0.linear.weight": x, name: x}]
    file = io.BytesIO()
    mx.save_safetensors(file, tensors | rng.choice(changes), metadata={"format": "pt"})
    return file.getvalue()


FUZZED = {"config.json": damaged_config, "model.safetensors": damaged_tensors}
KINDS = (
    *("eagle3", "eagle1", "dflash", "gemma4_assistant", "mtp_qwen3_5", "mtp_deepseek_v3", "medusa"),
    *("mtp_step3p5", "mtp_nemotron_h", "mtp_exaone_moe", "mtp_mimo_v2_flash", "mtp_longcat_flash"),
)
PROMPT = [5, 17, 9, 33, 71]
SHARES = 4  # tests that the 80 files of each kind are spread over


@pytest.mark.parametrize("share", cases(range(SHARES), 0))
@pytest.mark.parametrize("name", FUZZED)
def test_a_damaged_file_is_refused_or_a_head_that_works(name, share, tmp_path):
    """An error of ours with the folder's name, or the target's own text; nothing else, ever."""
    refused = worked = 0
    for case in range(share, 80, SHARES):
        reference = heads.reference(KINDS[case // SHARES % len(KINDS)])
        folder, target = reference.write(tmp_path / str(case)), reference.target()
        rng = random.Random(f"{name} {case}")
        (folder / name).write_bytes(FUZZED[name]((folder / name).read_bytes(), rng))
        try:
            drafter = sd.load_head(folder, target)
        except HeadError as error:
            refused += str(folder) in str(error)
            continue
        worked += 1
        plain = [step.token for step in sd.speculate(target, PROMPT, None, max_tokens=8)]
        drafted = sd.speculate(target, PROMPT, drafter, max_tokens=8, num_draft_tokens=3)
        assert [step.token for step in drafted] == plain, case
    assert refused > 0
    assert refused + worked == 80 // SHARES


ATTENTION = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
COUNTS = {
    "eagle3": ATTENTION,
    "dflash": (*ATTENTION, "block_size"),
    "gemma4_assistant": ATTENTION,
    "mtp_step3p5": ATTENTION[:2],
}
WRONG: list[tuple[str, str, Any, str]] = [
    *((kind, key, x, "") for kind in COUNTS for key in COUNTS[kind] for x in (0, -1, 10**9)),
    *(("eagle3", IDS_KEY, [1, 3, layer], "") for layer in (99, 1.5, ["x"])),
    ("dflash", "mask_token_id", 97, "mask_token_id is 97, expected 0 to 96"),
]
"""Kind, key of its config, a value that cannot be, and the error besides the folder's name."""


@in_one_test(("kind", "key", "value", "said"), WRONG)
def test_numbers_that_cannot_be_are_refused(kind, key, value, said, tmp_path):
    """Before as many layers are made, before MLX divides by none or reads beyond an array."""
    reference = heads.reference(kind)
    config = copy.deepcopy(reference.config)
    nested = (config.get(part, {}) for part in ("text_config", "dflash_config"))
    next((part for part in nested if key in part), config)[key] = value
    folder = heads.Reference(config, reference.weights, {}).write(tmp_path)
    with pytest.raises(HeadError, match=f"{folder}.*{said}"):
        sd.load_head(folder, reference.target())


@in_one_test("wrong", [-1, 10**6])
def test_groups_of_tokens_that_the_target_lacks_are_refused(wrong: int, tmp_path: Path) -> None:
    """MLX writes beyond an array unchecked."""
    gemma, name = heads.reference("gemma4_assistant"), "masked_embedding.token_ordering"
    order = np.array(gemma.weights[name])
    order[3] = wrong
    folder = heads.Reference(gemma.config, {**gemma.weights, name: order}, {}).write(tmp_path)
    with pytest.raises(HeadError, match=f"token_ordering is {wrong}"):
        sd.load_head(folder, gemma.target())


def test_a_token_beyond_a_heads_own_embeddings_reads_its_last_row(tmp_path: Path) -> None:
    """A vocabulary may be padded otherwise; it reads nothing after the matrix."""
    reference = heads.reference("eagle1")
    rows = np.random.default_rng(0).standard_normal((90, heads.WIDTH)).astype(np.float32)
    weights = {**reference.weights, "embed_tokens.weight": rows}
    folder = heads.Reference(reference.config, weights, {}).write(tmp_path)
    head: Any = sd.load_head(folder, reference.target()).head
    state = mx.ones((1, heads.WIDTH))
    last, beyond = (head.step(state, mx.array([i]), head.make_cache()) for i in (89, 96))
    assert mx.array_equal(last, beyond)
