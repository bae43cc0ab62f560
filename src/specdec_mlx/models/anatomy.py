"""Watching a model during one pass, without editing or copying mlx-lm.

While a pass is built, the watched modules are instances of a subclass that reports calls, and
functions that a model's file looks up are replaced. A context variable identifies the pass, so that
other generations do not see it. The last pass to end restores everything.

One pass, which is never computed, is watched to find the parts of a model and their sizes. The
*head* is the last module that turns states into logits, and its input is the state after the final
norm. `StateReader` reads the states that a drafter wants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from threading import Lock
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache

from specdec_mlx.caches import READABLE, STRATEGIES, leaves, window_of
from specdec_mlx.contracts import FeatureRows, Features, KeysValues, ReadsCache
from specdec_mlx.errors import UnreadableError
from specdec_mlx.models.loading import PerModel

T = TypeVar("T")


V = TypeVar("V")


Call = tuple[nn.Module, Any, Any]
"""A call of a module: the module, its first argument, and its result."""


Function = Callable[..., Any]


Answer = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Called instead of a function: the function, its arguments and its keyword arguments."""


_watchers: ContextVar[tuple[Callable[[Call], object], ...]] = ContextVar("watchers", default=())
_handing: ContextVar[Callable[[nn.Module, Any], Any] | None] = ContextVar("handing", default=None)
_stand_ins: ContextVar[Mapping[int, nn.Module] | None] = ContextVar("stand_ins", default=None)
_answers: ContextVar[Mapping[Function, Answer] | None] = ContextVar("answers", default=None)
"""Watchers, hand, stand-ins and answers of the pass that this thread builds."""


_lock = Lock()


_num_passes: Counter[Hashable] = Counter()
"""Key of a swapped module or function -> number of passes that need it swapped."""


@contextmanager
def _swapped(
    things: Mapping[Hashable, T],
    swap: Callable[[Iterable[T]], None],
    put_back: Callable[[Iterable[T]], None],
    variable: ContextVar[V],
    value: V,
) -> Iterator[None]:
    """Swap things, and restore those that no other pass needs.

    In the block the context variable has the value.
    """
    before = variable.get()
    # Ctrl-C may come at any line. A swap of what is swapped already has no effect, so that what an
    # interrupted block left behind does no harm to the next one.
    with _lock:
        swap(things.values())
        # Threads share the modules: the last pass restores.
        _num_passes.update(things.keys())
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)
        with _lock:
            _num_passes.subtract(things.keys())
            ended = [key for key in things if not _num_passes[key]]
            put_back([things[key] for key in ended])
            for key in ended:
                del _num_passes[key]


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def watching(
    modules: Iterable[nn.Module], watcher: Callable[[Call], object]
) -> AbstractContextManager[None]:
    """Call `watcher` for every call of these modules in the block, `as_linear` included."""
    by_id: dict[Any, nn.Module] = {id(module): module for module in modules}
    watchers = *_watchers.get(), watcher
    return _swapped(by_id, _report, _stop_reporting, _watchers, watchers)


def handing(
    modules: Iterable[nn.Module], hand: Callable[[nn.Module, Any], Any]
) -> AbstractContextManager[None]:
    """Pass these modules `hand(module, first argument)` in place of their first argument."""
    by_id: dict[Any, nn.Module] = {id(module): module for module in modules}
    return _swapped(by_id, _report, _stop_reporting, _handing, hand)


def standing_in(
    pairs: Sequence[tuple[nn.Module, nn.Module]],
) -> AbstractContextManager[None]:
    """Make logits with the second module of each pair, where a pass calls the first one.

    Embeddings that also make the logits still embed with all their rows.
    """
    by_id: dict[Any, nn.Module] = {id(module): module for module, _ in pairs}
    stand_ins = {id(module): stand_in for module, stand_in in pairs}
    return _swapped(by_id, _report, _stop_reporting, _stand_ins, stand_ins)


_set = object.__setattr__  # past MLX's setter, which looks for parameters


def _report(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        kind: Any = type(module)
        # Python looks `__call__` up on the class, so that replacing it on the instance has no
        # effect.
        _set(module, "__class__", _reporting(getattr(kind, "plain_class", kind)))


def _stop_reporting(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        kind: Any = type(module)
        _set(module, "__class__", getattr(kind, "plain_class", kind))


def change_class(module: nn.Module, change: Callable[[type], type]) -> None:
    """Change a module's own class for good, whether a pass is watching the module or not."""
    with _lock:
        kind: Any = type(module)
        plain = getattr(kind, "plain_class", kind)
        changed: Any = change(plain)
        _set(module, "__class__", changed if kind is plain else _reporting(changed))


@cache
def _reporting(kind: type[nn.Module]) -> type[nn.Module]:
    def reporting(name: str) -> Callable[..., Any]:
        # An embedding that also makes the logits does so by `as_linear`, the last of the methods.
        makes_logits = name == methods[-1]

        @wraps(getattr(kind, name))  # other code reads the signature of a module's call
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            hand = _handing.get()
            if hand is not None and args:
                args = hand(self, args[0]), *args[1:]
            stand_in = (_stand_ins.get() or {}).get(id(self)) if makes_logits else None
            module = self if stand_in is None else stand_in
            # Looked up for each call: kernels may replace the method of the class in this pass.
            output = getattr(kind, name)(module, *args, **kwargs)
            for watcher in _watchers.get():
                watcher((self, args[0] if args else None, output))
            return output

        return call

    methods = [name for name in ("__call__", "as_linear") if hasattr(kind, name)]
    members: dict[str, Any] = {name: reporting(name) for name in methods}
    members |= {"__module__": kind.__module__, "plain_class": kind}
    return type(kind.__name__, (kind,), members)


def replacing(
    places: Sequence[tuple[ModuleType, str]], answer: Answer
) -> AbstractContextManager[None]:
    """Call `answer` in place of functions in the block. `places` are modules and names.

    Blocks may be nested. Each function has the answer of the innermost block that replaces it.
    """
    functions = [_original(getattr(*place)) for place in places]

    def replace(places: Iterable[tuple[ModuleType, str]]) -> None:
        for place in places:
            setattr(*place, _answered(_original(getattr(*place))))

    def put_back(places: Iterable[tuple[ModuleType, str]]) -> None:
        for place in places:
            setattr(*place, _original(getattr(*place)))

    answers = {**(_answers.get() or {}), **dict.fromkeys(functions, answer)}
    return _swapped({place: place for place in places}, replace, put_back, _answers, answers)


@cache
def _answered(function: Function) -> Function:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        answer = (_answers.get() or {}).get(function)
        return function(*args, **kwargs) if answer is None else answer(function, args, kwargs)

    _wrappers[call] = function
    return call


_wrappers: dict[Function, Function] = {}
"""The functions of `_answered`, and the functions that they stand for."""


def _original(function: Function) -> Function:
    return _wrappers.get(function, function)


NUM_WATCHED = 7
"""Positions of the watched pass. A prime that no other axis has, such as parallel streams."""


class Tap(NamedTuple):
    """A call of a module, and the axis of positions of the states that are read there.

    Attributes:
        call: number of the call in a pass. A model with loops calls a layer several times.
        is_input: the states are the argument of the call, not its result.
    """

    module: nn.Module
    axis: int
    call: int = -1
    is_input: bool = False

    def rows(self, calls: Sequence[Call], text: int | None = None) -> mx.array:
        """[n, D] one row for each position. Parallel streams follow each other in a row.

        Args:
            calls: all calls of the module in a pass.
            text: index of a text among several, whose axis is the one before.
        """
        _, argument, made = calls[self.call]
        output = made[0] if isinstance(made, tuple) else made
        states: mx.array = argument if self.is_input else output
        if text is not None:
            states = mx.take(states, mx.array([text]), axis=self.axis - 1)
        # the usual layout needs one operation
        if self.axis == 1 and states.shape[0] == 1:
            return states.reshape(states.shape[1], -1)
        return mx.moveaxis(states, self.axis, 0).reshape(states.shape[self.axis], -1)


@dataclass(frozen=True)
class LastCache:
    """One of a model's caches.

    Attributes:
        index: among all caches, with nested ones counted.
        width: of a key.
    """

    index: int
    width: int


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. They are modules of the model, and do not keep the model alive.

    Attributes:
        vocab_size: V.
        head: tap of the head's input, or the reason why there is no head.
        norm: makes the head's input, or None.
        width, dtype: of the head's input.
        embedding: the first module that makes states of ids, or None.
        layers: tap of each decoder layer's output, or the reason why there is none.
        last_caches: kind of attention -> the last cache that it fills.
        modules: weak references to all modules.
    """

    vocab_size: int
    head: Tap | str
    norm: nn.Module | None
    width: int
    dtype: mx.Dtype
    embedding: nn.Module | None
    layers: Sequence[Tap | str]
    last_caches: Mapping[str, LastCache]
    modules: Sequence[ref[nn.Module]]

    def fits(self, model: nn.Module) -> bool:
        """True until a module is replaced, as by adapters or by quantizing in place."""
        return [*map(id, model.modules())] == [id(known()) for known in self.modules]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def embed(self, tokens: mx.array) -> Any:
        """Embeddings [..., n, D] of ids [..., n], before any scaling."""
        assert self.embedding is not None
        return self.embedding(tokens)

    def logits(self, states: mx.array) -> Any:
        """Logits [..., V] of the head's input [..., D], before any soft cap."""
        head = self.head_tap().module
        return getattr(head, "as_linear", head)(states)

    def head_tap(self) -> Tap:
        return _readable("The input of this target's head", self.head)

    def layer_tap(self, index: int) -> Tap:
        name = f"Layer {index} of this target"
        if not 0 <= index < len(self.layers):
            raise UnreadableError(
                f"{name} cannot be read: it has layers 0 to {len(self.layers) - 1}. Use a drafter "
                "that was trained for this target."
            )
        return _readable(name, self.layers[index])


def anatomy_of(model: nn.Module) -> Anatomy:
    """The parts of a loaded model, found again after modules were replaced."""
    anatomy = _known(model)
    if not anatomy.fits(model):
        anatomy = _watch(model)
        _known.put(anatomy, model)
    return anatomy


def _watch(model: nn.Module) -> Anatomy:
    calls: list[Call] = []
    parts = [part for part in model.modules() if part is not model]
    caches = make_prompt_cache(model)
    with watching(parts, calls.append):
        logits = model(mx.zeros((1, NUM_WATCHED), mx.int32), cache=caches)
    vocab_size = logits.shape[-1]
    head: Tap | str = "no module makes its logits out of states"
    states = logits
    # The last such call is the head: an adapter wraps the layer inside it, and a scale of logits
    # has equal shapes.
    for module, argument, made in calls:
        axis = _axis_of_positions(argument)
        if axis is None or not _is(made, mx.floating):
            continue
        if (*argument.shape[:-1], vocab_size) == made.shape != argument.shape:
            head, states = Tap(module, axis, is_input=True), argument
    # The norm is the module whose output is the head's input, without modules inside it.
    norms = [m for m, _, made in calls if made is states and not m.children()]
    embeddings = [m for m, ids, made in calls if _is(ids, mx.integer) and _is(made, mx.floating)]
    last_caches = {}
    for index, leaf in enumerate(leaves(caches)):
        if readable_kind(leaf) is not None and not leaf.empty():
            kind = "full_attention" if window_of(leaf) is None else "sliding_attention"
            last_caches[kind] = LastCache(index, leaf.keys.shape[-1])
    return Anatomy(
        vocab_size=vocab_size,
        head=head,
        norm=norms[0] if norms and isinstance(head, Tap) else None,
        width=states.shape[-1],
        dtype=states.dtype,
        embedding=embeddings[0] if embeddings else None,
        layers=_layers(list(getattr(model, "layers", ())), calls),
        last_caches=last_caches,
        modules=[ref(module) for module in model.modules()],
    )


def _layers(layers: Sequence[nn.Module], calls: Sequence[Call]) -> list[Tap | str]:
    """Taps of the layers in the order of a pass, in which a model with loops repeats them."""
    ids = set(map(id, layers))
    steps = [call for call in calls if id(call[0]) in ids]
    num_loops = len(steps) // len(layers) if layers else 0
    in_order = [step[0] for step in steps] == [*layers] * num_loops
    # A layer that is shared in another way, or called as a function, gives no single output.
    if not in_order or not num_loops:
        return [_layer(layer, calls) for layer in layers]
    loops = [step // len(layers) - num_loops for step in range(len(steps))]
    taps = [_tap(made, layer, loop) for loop, (layer, _, made) in zip(loops, steps, strict=True)]
    for last in range(len(layers) - 1, len(steps) - 1, len(layers)):
        # A norm may stand between two loops. Heads were trained on the input of the next loop.
        layer, states, _ = steps[last + 1]
        taps[last] = _tap(states, layer, loops[last + 1], is_input=True)
    return taps


def _layer(layer: nn.Module, calls: Sequence[Call]) -> Tap | str:
    outputs = [made for module, _, made in calls if module is layer]
    if len(outputs) != 1:
        return f"it is called {len(outputs)} times a pass"
    return _tap(outputs[0], layer)


def _tap(made: Any, layer: nn.Module, call: int = -1, *, is_input: bool = False) -> Tap | str:
    axis = _axis_of_positions(first(made))
    return "it has no states" if axis is None else Tap(layer, axis, call, is_input)


_known = PerModel(_watch)


def first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _axis_of_positions(states: Any) -> int | None:
    """The axis of positions of a value in the watched pass. None if it has none."""
    if not _is(states, mx.floating):
        return None
    axes = [axis for axis, size in enumerate(states.shape[:-1]) if size == NUM_WATCHED]
    return axes[0] if len(axes) == 1 else None


def _is(value: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, kind)


def _readable(name: str, tap: Tap | str) -> Tap:
    if isinstance(tap, str):
        instead = "Use a drafter that works on tokens, such as 'prompt-lookup'."
        raise UnreadableError(f"{name} cannot be read: {tap}. {instead}")
    return tap


class StateReader:
    """Reads the states of a model's passes. Raises UnreadableError.

    Attributes:
        wanted: the features to read.
        features: of the latest pass, or None.
        num_rows: positions of the latest pass.
        modules: modules whose calls are watched.
    """

    def __init__(
        self, model: nn.Module, wanted: Features, keys_values: ReadsCache | None = None
    ) -> None:
        self._keys_values = keys_values if wanted.caches else None
        self.wanted = wanted
        self.features: FeatureRows | None = None
        self.num_rows = 0
        self._head = anatomy_of(model).head_tap() if wanted.head_input else None
        self._layers = {i: anatomy_of(model).layer_tap(i) for i in wanted.layers}
        taps = [*self._layers.values(), *([self._head] if self._head else [])]
        self.modules: list[nn.Module] = [tap.module for tap in taps]

    def read(self, run: Callable[[], mx.array]) -> mx.array:
        """Run a pass with logits [n, V], and keep the wanted features, all lazy."""
        self.features, calls = None, list[Call]()
        with watching(self.modules, calls.append):
            logits = run()
        self.num_rows = logits.shape[0]
        self.features = self.rows(calls, logits)
        return logits

    def rows(self, calls: Sequence[Call], logits: mx.array, text: int | None = None) -> FeatureRows:
        """Features of a pass, from its calls and logits [n, V]. `text` as in `Tap.rows`."""
        seen = defaultdict[int, list[Call]](list)
        for call in calls:
            seen[id(call[0])].append(call)
        head, layers = self._head, dict[int, mx.array]()
        # In a batch the states have the rows of the longest text.
        num_rows = logits.shape[0]
        for index, tap in self._layers.items():
            layers[index] = tap.rows(seen[id(tap.module)], text)[:num_rows]
        head_input = None
        if head is not None:
            head_input = head.rows(seen[id(head.module)], text)[:num_rows]
        return FeatureRows(
            layers=layers,
            head_input=head_input,
            top_tokens=top_tokens(logits, self.wanted.top) if self.wanted.top else None,
            keys_values=self._keys_values,
        )


def top_tokens(logits: mx.array, number: int) -> mx.array:
    """The likeliest tokens [n, number] of logits [n, V], the likeliest first."""
    number = min(number, logits.shape[-1])
    # A partition and a sort of a few are cheaper than a sort of the vocabulary.
    best = mx.argpartition(-logits, kth=number - 1, axis=-1)[:, :number]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def keys_values_of(caches: Sequence[Any], index: int) -> KeysValues:
    """Contents of a cache as slices of its buffers. Raises UnreadableError."""
    cache = check_readable(caches, index)
    # mlx-lm 0.31 has no `keys_and_values`
    keys, values = getattr(cache, "keys_and_values", lambda: cache.state)()
    if readable_kind(cache) is QuantizedKVCache:
        how = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = mx.dequantize(*keys, **how), mx.dequantize(*values, **how)
    # A pass of several positions leaves more rows than the window in the buffer.
    if readable_kind(cache) is RotatingKVCache:
        keys, values = (part[..., -cache.max_size :, :] for part in (keys, values))
    return KeysValues(keys, values, cache.offset)


def readable_kind(cache: Any) -> type | None:
    """The class in `READABLE` that a cache belongs to, or None."""
    # Classes of mlx-vlm are registered with the strategies of mlx-lm's classes.
    strategy = STRATEGIES.get(type(cache))
    return next((k for k in READABLE if isinstance(cache, k) or strategy is STRATEGIES[k]), None)


def check_readable(caches: Sequence[Any], index: int) -> Any:
    all_caches = list(leaves(caches))
    kind = type(all_caches[index]).__name__ if index < len(all_caches) else "no cache"
    if index >= len(all_caches) or readable_kind(all_caches[index]) is None:
        raise UnreadableError(
            f"Cache {index} of this target, {kind}, has no keys and values that a drafter can "
            f"read; expected one of {', '.join(known.__name__ for known in READABLE)}. Use "
            "another drafter."
        )
    return all_caches[index]


vocab_size_of = PerModel(lambda model: anatomy_of(model).vocab_size)
"""V of a loaded model."""


def _group_of(model: nn.Module) -> mx.distributed.Group | None:
    for module in model.modules():
        for group in (getattr(module, "group", None), getattr(module, "sharding_group", None)):
            if isinstance(group, mx.distributed.Group) and group.size() > 1:
                return group
        if getattr(module, "pipeline_size", 1) > 1:
            return mx.distributed.init()
    return None


group_of: Any = PerModel(_group_of)
"""The ranks that a tensor-parallel or pipelined model is spread over, or None."""
