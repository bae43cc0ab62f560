"""Seeing a model's modules at work during one pass, with nothing of mlx-lm edited or copied.

While a pass is built the watched modules are instances of a subclass of their own class, whose
calls are noticed; attributes, parameter paths and `isinstance` stay what they were. Only who
started the pass is told: a context variable says who that is, so that generations on one model do
not see each other's calls, in other threads neither. The last pass to end puts the classes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import mlx.nn as nn

Watcher = Callable[[nn.Module, Any, Any], None]
"""Is told of a call when it has ended: the module, its first argument, what it returned."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
"""Who watches the pass that is being built in this thread."""

_lock = Lock()
_num_watching: dict[int, int] = {}
"""id of a module whose class is swapped -> passes that watch it."""

_watched: dict[type[nn.Module], type[nn.Module]] = {}
"""A module's class -> the subclass that reports its calls."""


@contextmanager
def watching(modules: Iterable[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every call of these modules made in here, `as_linear` included."""
    watched: list[nn.Module] = []
    before = _watchers.get()
    try:
        for module in modules:
            _begin(module)
            watched.append(module)
        _watchers.set((*before, watcher))
        yield
    finally:
        _watchers.set(before)
        for module in watched:
            _end(module)


def _begin(module: nn.Module) -> None:
    with _lock:
        others = _num_watching.get(id(module), 0)
        if not others:
            kind = type(module)
            _watched[kind] = _watched.get(kind) or _reporting(kind)
            module.__class__ = _watched[kind]
        _num_watching[id(module)] = others + 1


def _end(module: nn.Module) -> None:
    with _lock:
        others = _num_watching.pop(id(module)) - 1
        if others:
            _num_watching[id(module)] = others
        else:
            module.__class__ = type(module).__bases__[0]


def _reporting(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a module's class that reports its calls."""

    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = method(self, *args, **kwargs)
            for watcher in _watchers.get():
                watcher(self, args[0] if args else None, output)
            return output

        return call

    methods = [name for name in ("__call__", "as_linear") if hasattr(kind, name)]
    members = {name: reporting(getattr(kind, name)) for name in methods}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
