"""Seeing a model at work during one pass, with nothing of mlx-lm edited or copied.

While a pass is built the watched modules are instances of a subclass of their own class, whose
calls are noticed; attributes, parameter paths and `isinstance` stay what they were. Functions that
a model's file looks up as globals are answered for in the same way. Only who started the pass is
told: a context variable says who that is, so that generations on one model do not see each other's
calls, in other threads neither. The last pass to end puts everything back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from threading import Lock
from types import ModuleType
from typing import Any

import mlx.nn as nn

Watcher = Callable[[nn.Module, Any, Any], None]
"""Is told of a call when it has ended: the module, its first argument, what it returned."""

_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("watchers", default=())
"""Who watches the pass that is being built in this thread."""

Function = Callable[..., Any]
Answer = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""What to return for a call: the function, its arguments and its keyword arguments."""

_answer: ContextVar[Answer | None] = ContextVar("answer", default=None)
"""Who answers for functions in the pass that is being built in this thread."""

_lock = Lock()
_num_watching: dict[int, int] = {}
"""id of a module whose class is swapped -> passes that watch it."""

_num_answering: dict[tuple[str, str], int] = {}
"""File of a model and name of a function in it that is swapped -> passes that answer for it."""

_watched: dict[type[nn.Module], type[nn.Module]] = {}
"""A module's class -> the subclass that reports its calls."""


@contextmanager
def watching(modules: Iterable[nn.Module], watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every call of these modules made in here, `as_linear` included."""
    watched: list[nn.Module] = []
    before = _watchers.get()
    try:
        with _lock:
            for module in modules:
                _begin(module)
                watched.append(module)
        _watchers.set((*before, watcher))
        yield
    finally:
        _watchers.set(before)
        with _lock:
            for module in watched:
                _end(module)


def _begin(module: nn.Module) -> None:
    others = _num_watching.get(id(module), 0)
    if not others:
        kind = type(module)
        _set_class(module, _watched.get(kind) or _reporting(kind))
    _num_watching[id(module)] = others + 1


def _end(module: nn.Module) -> None:
    others = _num_watching.pop(id(module)) - 1
    if others:
        _num_watching[id(module)] = others
    else:
        _set_class(module, type(module).__bases__[0])


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Swap a module's class, past what MLX does about parameters when an attribute is set."""
    object.__setattr__(module, "__class__", kind)


def _reporting(kind: type[nn.Module]) -> type[nn.Module]:
    """A new subclass of a module's class that reports its calls, from now on the one in use."""

    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = method(self, *args, **kwargs)
            for watcher in _watchers.get():
                watcher(self, args[0] if args else None, output)
            return output

        return call

    methods = [name for name in ("__call__", "as_linear") if hasattr(kind, name)]
    members = {name: reporting(getattr(kind, name)) for name in methods}
    _watched[kind] = type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})
    return _watched[kind]


@contextmanager
def answering(places: Iterable[tuple[ModuleType, str]], answer: Answer) -> Iterator[None]:
    """Answer for functions when they are called in here.

    Args:
        places: files of models, and the names under which they look the functions up.
        answer: called instead of the functions; it may call them.
    """
    taken: list[tuple[ModuleType, str]] = []
    before = _answer.get()
    try:
        for file, name in places:
            _begin_answering(file, name)
            taken.append((file, name))
        _answer.set(answer)
        yield
    finally:
        _answer.set(before)
        for file, name in taken:
            _end_answering(file, name)


def _begin_answering(file: ModuleType, name: str) -> None:
    with _lock:
        others = _num_answering.get((file.__name__, name), 0)
        if not others:
            setattr(file, name, _answered(getattr(file, name)))
        _num_answering[file.__name__, name] = others + 1


def _end_answering(file: ModuleType, name: str) -> None:
    with _lock:
        others = _num_answering.pop((file.__name__, name)) - 1
        if others:
            _num_answering[file.__name__, name] = others
        else:
            setattr(file, name, getattr(file, name).__wrapped__)


@cache
def _answered(function: Function) -> Function:
    """A function that asks who answers for it in this pass, if anybody does."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = _answer.get()
        return function(*args, **kwargs) if answer is None else answer(function, args, kwargs)

    return call
