"""The kernels of the package mlx-dspark (extra `kernels`), for Apple GPUs.

Its products with quantized weights and its attention cost about the same for 5 to 8 rows. The
package measures them once on each machine and keeps the results in its own cache folder. It leaves
a kernel out where it is slower or wrong, and on chips on which its author has not verified it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from threading import Lock
from typing import Any
from weakref import ref

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.kernels.contract import Kernels
from specdec_mlx.models.loading import PerModel

PACKAGE, OLDEST = "mlx-dspark", (0, 20)
MOST = 16  # rows that its kernels take

FUNCTIONS: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    "calibrate.apply_small_m": ([None], {"target_repo": "", "verbose": False}),
    "calibrate.apply_multirow_attn": ([None], {"verbose": False}),
    "small_m_qmm.small_m_matmul": ([None], {}),
    "multirow_attn.multirow_attention": ([None], {}),
}
"""The functions of the package that are called here, and arguments that each must take.

The first two measure, and return what the last two take. These are context managers."""


@dataclass
class Measured:
    """Results for one model.

    Attributes:
        is_known: the model was measured.
        ids: ids of the layers whose products run on a kernel, or None.
        attention: the shapes of attention that run on a kernel, or None.
        layers: the layers of `ids`. They are kept, so that no other layer gets such an id.
    """

    is_known: bool = False
    ids: frozenset[int] | None = None
    attention: Any = None
    layers: Sequence[nn.Module] = ()


@dataclass(eq=False)
class MlxDspark(Kernels):
    """The kernels of mlx-dspark, as far as they can run here. They are left out in silence."""

    name = PACKAGE
    _functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    _measured: PerModel[Measured] = field(default_factory=lambda: PerModel(lambda _: Measured()))
    _waiting: list[ref[nn.Module]] = field(default_factory=list)
    _lock: Any = field(default_factory=Lock)

    def around(
        self, model: nn.Module, rows: int, context: int
    ) -> AbstractContextManager[object, bool | None]:
        if rows > MOST or why_not() is not None:
            return nullcontext()
        measured = self._measured(model)
        if not measured.is_known:
            self._waiting.append(ref(model))
        return self._entered(measured) if self.active(model) else nullcontext()

    @contextmanager
    def _entered(self, measured: Measured) -> Iterator[None]:
        # The package replaces functions for all threads, and restores them in reverse order. A
        # second thread therefore goes without kernels.
        if not self._lock.acquire(blocking=False):
            yield
            return
        try:
            products = self._functions["small_m_qmm.small_m_matmul"]
            attention = self._functions["multirow_attn.multirow_attention"]
            with products(measured.ids), attention(measured.attention):
                yield
        finally:
            self._lock.release()

    def active(self, model: nn.Module) -> str:
        measured = self._measured(model)
        return self.name if measured.ids or measured.attention is not None else ""

    def measure(self) -> None:
        """Have the package measure the models of earlier passes: seconds, once on each machine."""
        while self._waiting:
            model = self._waiting.pop()()
            if model is not None and not self._measured(model).is_known:
                self._measured.put(self._measure(model), model)

    def _measure(self, model: nn.Module) -> Measured:
        # The package draws numbers from MLX's global state, which decides later texts.
        global_state: Any = mx.random.state
        before = mx.array(global_state[0])
        try:
            self._functions = self._functions or load()
            how: dict[str, Any] = {"verbose": False}
            layers = [m for m in model.modules() if isinstance(m, nn.QuantizedLinear)]
            measure = self._functions["calibrate.apply_small_m"]
            ids = measure(model, target_repo=_cache_name(layers), **how) if layers else None
            attention = self._functions["calibrate.apply_multirow_attn"](model, **how)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"specdec_mlx: the kernels of {PACKAGE} are left out ({reason}). Passes run on "
                "MLX's own kernels.",
                stacklevel=2,
            )
            return Measured(is_known=True)
        finally:
            global_state[0][:] = before
        return Measured(True, ids, attention, [m for m in layers if id(m) in (ids or ())])

    def report(self) -> str:
        reason = why_not()
        if reason is None:
            try:
                load()
            except Exception as error:
                reason = f"{error}"
        if reason is not None:
            return f"off: {reason}"
        return f"{version(PACKAGE)} can run; it measures each shape on the first text"


def installed_version() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


@cache
def why_not() -> str | None:
    """Why the package cannot be used here, or None. The package is not imported."""
    installed = installed_version()
    if installed is None:
        return 'not installed. pip install "specdec-mlx[kernels]"'
    if _numbers(installed) < OLDEST:
        return f"version {installed} is older than {'.'.join(map(str, OLDEST))}"
    return None if mx.metal.is_available() else "it needs an Apple GPU"


def _numbers(text: str) -> tuple[int, ...]:
    parts = takewhile(str.isdecimal, text.split("."))
    return tuple(map(int, parts))


def load() -> dict[str, Callable[..., Any]]:
    """The functions of `FUNCTIONS` by name.

    Raises ImportError if the package lacks a function, or if a function takes other arguments.
    """
    functions = {}
    for name, (args, more) in FUNCTIONS.items():
        module, _, attribute = name.partition(".")
        try:
            function = getattr(importlib.import_module(f"mlx_dspark.{module}"), attribute)
            inspect.signature(function).bind(*args, **more)
        except (AttributeError, TypeError) as error:
            raise ImportError(
                f"{name} of {PACKAGE} {version(PACKAGE)} is not as it was in 0.20 ({error})"
            ) from error
        functions[name] = function
    return functions


def _cache_name(layers: Sequence[nn.Module]) -> str:
    """A name for the shapes of quantized layers, under which the package keeps its results."""
    shapes = sorted({f"{m['weight'].shape} {m.bits} {m.group_size}" for m in layers})
    return f"specdec-mlx-{hashlib.sha256(' '.join(shapes).encode()).hexdigest()[:16]}"
