"""Seeing a model at work during one pass, with nothing of mlx-lm edited or copied.

While a pass is built the watched modules are instances of a subclass that reports calls, and
functions that a model's file looks up are replaced. A context variable says who started the pass,
so that other generations do not see it. The last pass to end puts everything back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from threading import Lock
from types import ModuleType
from typing import Any, TypeVar

import mlx.nn as nn

T = TypeVar("T")

Watcher = Callable[[nn.Module, Any, Any], None]
"""Called after each call of a module: the module, its first argument, what it returned."""

Function = Callable[..., Any]
Answer = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a function: the function, its arguments and its keyword arguments."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)
"""Those of the pass that is being built in this thread."""

_lock = Lock()
_num_passes: Counter[Hashable] = Counter()
"""Key of what is swapped -> passes under way that need it so."""


@contextmanager
def _swapped(
    things: Mapping[Hashable, T], swap: Callable[[T], None], put_back: Callable[[T], None]
) -> Iterator[None]:
    """Swap things in here, unless another pass has, and put back those that no other pass needs."""
    taken: list[Hashable] = []
    try:
        with _lock:
            for key, thing in things.items():
                if not _num_passes[key]:
                    swap(thing)
                _num_passes[key] += 1
                taken.append(key)
        yield
    finally:
        with _lock:
            for key in taken:
                _num_passes[key] -= 1
                if not _num_passes[key]:
                    del _num_passes[key]
                    put_back(things[key])


@contextmanager
def held(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value in here."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def watching(modules: Iterable[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every call of these modules made in here, `as_linear` included."""
    swapped = _swapped(
        {id(module): module for module in modules},
        lambda module: _set_class(module, _reporting(type(module))),  # type: ignore[arg-type]
        lambda module: _set_class(module, type(module).__bases__[0]),
    )
    with swapped, held(_watchers, (*_watchers.get(), watcher)):
        yield


def change_class(module: nn.Module, change: Callable[[type], type]) -> None:
    """Change a module's own class for good, whether a pass is watching it or not."""
    with _lock:
        kind: Any = type(module)
        is_watched = id(module) in _num_passes
        changed: Any = change(kind.__bases__[0] if is_watched else kind)
        _set_class(module, _reporting(changed) if is_watched else changed)


def _set_class(module: nn.Module, kind: type) -> None:
    object.__setattr__(module, "__class__", kind)  # past MLX's setter, which looks for parameters


@cache
def _reporting(kind: type[nn.Module]) -> type[nn.Module]:
    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)  # other threads read what a module's call takes
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = method(self, *args, **kwargs)
            for watcher in _watchers.get():
                watcher(self, args[0] if args else None, output)
            return output

        return call

    methods = [name for name in ("__call__", "as_linear") if hasattr(kind, name)]
    members = {name: reporting(getattr(kind, name)) for name in methods}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


@contextmanager
def replacing(places: Iterable[tuple[ModuleType, str]], answer: Answer) -> Iterator[None]:
    """Have `answer` called instead of functions in here; places: files, and names in them."""
    swapped = _swapped(
        {place: place for place in places},
        lambda place: setattr(*place, _answered(getattr(*place))),
        lambda place: setattr(*place, getattr(*place).__wrapped__),
    )
    with swapped, held(_answer, answer):
        yield


@cache
def _answered(function: Function) -> Function:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = _answer.get()
        return function(*args, **kwargs) if answer is None else answer(function, args, kwargs)

    return call
