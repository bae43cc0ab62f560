"""mlx-dspark's kernels: a stand-in with its functions, and the signatures of the real package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import tiny
from scripted import PROMPT, OracleDrafter, plain
from specdec_mlx.contracts import Features
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.kernels import make_kernels, mlx_dspark
from specdec_mlx.kernels.mlx_dspark import MlxDspark, load, why_not
from specdec_mlx.loop import speculate
from specdec_mlx.models.anatomy import StateReader

Linear: Any = nn.QuantizedLinear
call_of_mlx, attention_of_mlx = Linear.__call__, mx.fast.scaled_dot_product_attention


class StandIn:
    """The functions of mlx-dspark that are used, with its ways to patch, on MLX's own kernels.

    Attributes:
        wins: its kernels are faster here.
        calls: products and attention that ran inside its context managers.
    """

    def __init__(self) -> None:
        self.wins, self.calls = True, {"products": 0, "attention": 0}
        self.num_measured, self.ids = 0, frozenset[int]()

    def apply_small_m(
        self, target: Any, drafter: Any = None, *, target_repo: str, verbose: bool = True
    ) -> frozenset[int] | None:
        assert target_repo.startswith("specdec-mlx-")
        assert not verbose
        self.num_measured += 1
        mx.eval(mx.random.normal((4,)))  # as the package does
        layers = [m for m in target.modules() if isinstance(m, nn.QuantizedLinear)]
        return frozenset(map(id, layers)) if self.wins else None

    def apply_multirow_attn(self, target: Any, drafter: Any = None, *, verbose: bool = True) -> Any:
        return SimpleNamespace(windows=()) if self.wins else None

    @contextmanager
    def small_m_matmul(self, ids: frozenset[int] | None) -> Iterator[None]:
        if not ids:
            yield
            return

        def call(layer: Any, x: mx.array) -> mx.array:
            self.calls["products"] += id(layer) in ids
            return call_of_mlx(layer, x)

        before = Linear.__call__
        Linear.__call__ = call
        try:
            yield
        finally:
            Linear.__call__ = before

    @contextmanager
    def multirow_attention(self, cfg: Any) -> Iterator[None]:
        if cfg is None:
            yield
            return
        before = mx.fast.scaled_dot_product_attention

        def call(*args: Any, **more: Any) -> mx.array:
            self.calls["attention"] += 1
            return before(*args, **more)

        mx.fast.scaled_dot_product_attention = call
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention = before


PARTS = {
    "calibrate": ("apply_small_m", "apply_multirow_attn"),
    "small_m_qmm": ("small_m_matmul",),
    "multirow_attn": ("multirow_attention",),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """An installed mlx-dspark 0.20.3, on an Apple GPU."""
    made = StandIn()
    monkeypatch.setitem(sys.modules, "mlx_dspark", ModuleType("mlx_dspark"))
    for module, names in PARTS.items():
        functions = {name: getattr(made, name) for name in names}
        monkeypatch.setitem(sys.modules, f"mlx_dspark.{module}", SimpleNamespace(**functions))
    monkeypatch.setattr(mlx_dspark, "version", lambda name: "0.20.3")
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    why_not.cache_clear()
    yield made
    why_not.cache_clear()


def quantized() -> nn.Module:
    model = tiny.build("qwen2", tie_word_embeddings=False)
    nn.quantize(model, group_size=32, bits=4)
    return model


def written(model: nn.Module, kernels: MlxDspark) -> list[int]:
    drafter = OracleDrafter(plain(24, model=model), 128)
    how: dict[str, Any] = {"num_draft_tokens": 6, "max_tokens": 24, "kernels": kernels, "seed": 1}
    return [token.token for token in speculate(model, PROMPT, drafter, **how)]


def assert_all_is_mlxs_own() -> None:
    assert Linear.__call__ is call_of_mlx
    assert mx.fast.scaled_dot_product_attention is attention_of_mlx


def test_its_kernels_run_in_wide_passes_once_they_are_measured(stand_in: StandIn) -> None:
    """Measured once for a model, after the first token, without moving MLX's random state."""
    model, kernels, state = quantized(), MlxDspark(), mx.random.state[0].tolist()  # type: ignore[index]
    text = plain(24, model=model)
    assert kernels.active(model) == ""
    assert written(model, kernels) == text
    assert (kernels.active(model), stand_in.num_measured) == ("mlx-dspark", 1)
    assert min(stand_in.calls.values()) > 0
    before = dict(stand_in.calls)
    assert written(model, kernels) == text
    assert stand_in.num_measured == 1
    assert all(stand_in.calls[name] > before[name] for name in before)
    assert mx.random.state[0].tolist() == state  # type: ignore[index]
    assert_all_is_mlxs_own()


def test_it_respects_what_the_author_leaves_out(stand_in: StandIn) -> None:
    """On a chip where no kernel is on, nothing is patched."""
    stand_in.wins = False
    model, kernels = quantized(), MlxDspark()
    assert written(model, kernels) == plain(24, model=model)
    assert (kernels.active(model), stand_in.num_measured) == ("", 1)
    assert stand_in.calls == {"products": 0, "attention": 0}


def test_taps_survive_its_patch_of_quantized_layers(stand_in: StandIn) -> None:
    """States that heads read are those of the pass, and the tapped layer runs on the kernel."""
    model, kernels = quantized(), MlxDspark()
    wanted = Features(layers=(0, 1), head_input=True)
    assert isinstance(model.lm_head, nn.QuantizedLinear)
    ids = mx.array([PROMPT])
    reader = StateReader(model, wanted)

    def read() -> Any:
        reader.read(lambda: model(ids)[0])
        return reader.features

    plainly = read()
    kernels._waiting.append(mlx_dspark.ref(model))
    kernels.measure()
    with kernels.around(model, 8, 0):
        tapped = read()
    num_layers = sum(isinstance(m, nn.QuantizedLinear) for m in model.modules())
    assert stand_in.calls["products"] == num_layers
    assert mx.array_equal(tapped.head_input, plainly.head_input)
    for index in (0, 1):
        assert mx.array_equal(tapped.layers[index], plainly.layers[index])
    assert_all_is_mlxs_own()
    again = read()
    assert stand_in.calls["products"] == num_layers
    assert mx.array_equal(again.head_input, plainly.head_input)


def test_everything_is_restored_after_an_exception(stand_in: StandIn) -> None:
    """Also MLX's own classes and functions."""
    model, kernels = quantized(), MlxDspark()
    kernels._waiting.append(mlx_dspark.ref(model))
    kernels.measure()
    with pytest.raises(ZeroDivisionError), kernels.around(model, 8, 0):
        raise ZeroDivisionError
    assert_all_is_mlxs_own()
    with kernels.around(model, 8, 0):
        assert Linear.__call__ is not call_of_mlx
    assert_all_is_mlxs_own()


def test_a_second_thread_goes_without(stand_in: StandIn) -> None:
    """The package patches for all threads, so that only one thread enters it at a time."""
    model, kernels, meet = quantized(), MlxDspark(), Barrier(2, timeout=60)
    kernels._waiting.append(mlx_dspark.ref(model))
    kernels.measure()

    def hold() -> None:
        with kernels.around(model, 8, 0):
            meet.wait()
            meet.wait()

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        meet.wait()
        patched = Linear.__call__
        with kernels.around(model, 8, 0):
            assert Linear.__call__ is patched
        assert Linear.__call__ is patched
        meet.wait()
        held.result()
    assert_all_is_mlxs_own()


def test_where_it_cannot_run_it_is_silent(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an Apple GPU, and with an older package: nothing is imported or patched."""
    monkeypatch.delitem(sys.modules, "mlx_dspark.calibrate")
    model = quantized()
    for change, words in (
        ((mx.metal, "is_available", lambda: False), "Apple GPU"),
        ((mlx_dspark, "version", lambda name: "0.19.9"), "0.19.9 is older than 0.20"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            why_not.cache_clear()
            kernels = MlxDspark()
            assert written(model, kernels) == plain(24, model=model)
            assert words in kernels.report()
            assert not kernels._waiting
    assert stand_in.num_measured == 0


def test_a_changed_package_is_left_out_in_words(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that takes other arguments is not called, and the text goes on."""
    changed = SimpleNamespace(small_m_matmul=lambda: None)
    monkeypatch.setitem(sys.modules, "mlx_dspark.small_m_qmm", changed)
    model, kernels = quantized(), MlxDspark()
    with pytest.warns(UserWarning, match="small_m_matmul of mlx-dspark 0.20.3 is not as it was"):
        assert written(model, kernels) == plain(24, model=model)
    assert kernels.active(model) == ""
    assert "not as it was" in kernels.report()
    assert stand_in.num_measured == 0


def test_its_name_without_the_package_gives_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "auto" goes without, and the name raises."""

    def missing(name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(mlx_dspark, "version", missing)
    make_kernels.__globals__["_single"].cache_clear()
    why_not.cache_clear()
    with pytest.raises(MissingPackageError, match=r"pip install .specdec-mlx\[kernels\]"):
        make_kernels("mlx-dspark")
    auto = make_kernels("auto")
    why_not.cache_clear()
    assert auto is make_kernels("split")


def installed_files() -> str | None:
    try:
        return str(distribution("mlx-dspark").locate_file("mlx_dspark"))
    except PackageNotFoundError:
        return None


@pytest.mark.skipif(installed_files() is None, reason="the job `kernels` of ci.yml installs it")
def test_the_real_package_has_these_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions take what we pass, and its own gate leaves out the chips after M4.

    Only the modules with these functions are imported, which run on any machine.
    """
    package: Any = ModuleType("mlx_dspark")
    package.__path__ = [installed_files()]
    monkeypatch.setitem(sys.modules, "mlx_dspark", package)
    functions = load()
    assert functions.keys() == mlx_dspark.FUNCTIONS.keys()
    calibrate: Any = importlib.import_module("mlx_dspark.calibrate")
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "applegpu_g17s"})
    monkeypatch.delenv("MLX_DSPARK_FORCE_SMALL_M", raising=False)
    assert calibrate.small_m_qmm_shapes(None, target_repo="x", verbose=False) == []
    # None stands for "off" in both context managers
    with (
        functions["small_m_qmm.small_m_matmul"](None),
        functions["multirow_attn.multirow_attention"](None),
    ):
        assert_all_is_mlxs_own()
    for name in [*sys.modules]:
        if name.startswith("mlx_dspark."):
            monkeypatch.delitem(sys.modules, name)
