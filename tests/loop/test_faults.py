"""After an exception at any call of anything the caller holds the text that was emitted.

Each case is a random generation: an architecture, a way to write, and one call of the drafter, a
processor, the sampler, the callback or a layer, prefill and probing included, that raises before or
after its work; or the caller closes the generator, or throws into it. Afterwards the caller's
caches go on as the emitted text does, caches that were only lent are as they were, and the same
model and drafter write the plain text once more.
"""

from __future__ import annotations

import copy
import functools
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from heads import HEADS, random_head
from selection import FULL, each
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.caches import check_usable
from specdec_mlx.contracts import DraftContext
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.lab.beams.search import BeamDrafting, BeamRows, BeamSearch
from specdec_mlx.options import Options

pytestmark = pytest.mark.filterwarnings("ignore:specdec_mlx")

VOCAB, NUM_TOKENS = 128, 12
BEFORE = [8, 3, 77, 5]
PROMPTS = ([5, 17, 99, 3, 64, 17, 99, 42], [9], [5, 17, 99] * 4, [30, 31, 32])
NAMES = ("llama", "qwen3_next", "gemma3_text", "gpt_oss", "mamba")


HEADS_HERE = ("eagle3", "medusa")

DRAFTER = ("begin", "propose", "propose_while", "propose_tree", "observe", "close", "see", "fork")
PLACES = (*DRAFTER, "layer", "processor", "sampler", "callback")


class Fault:
    """The call that raises: of which place, which one, with what, before or after its work."""

    place = ""
    at = 0
    after = False
    error: type[BaseException] = RuntimeError
    raised: BaseException | None = None

    @classmethod
    def arm(cls, coins: random.Random, places: Sequence[str]) -> None:
        cls.place, cls.raised = coins.choice(places), None
        most = {"layer": 40, "begin": 2, "close": 1, "callback": 5, "fork": 3}.get(cls.place, 8)
        cls.error = coins.choice([RuntimeError, KeyboardInterrupt])
        cls.at, cls.after = coins.randint(1, most), coins.random() < 0.5

    @classmethod
    def disarm(cls) -> str:
        place, cls.place = cls.place, ""
        return place

    @classmethod
    def within(cls, place: str, call: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(call, updated=())
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if place != cls.place:
                return call(*args, **kwargs)
            cls.at -= 1
            is_now = cls.at == 0
            result = None if is_now and not cls.after else call(*args, **kwargs)
            if is_now:
                cls.raised = cls.error("the fault")
                raise cls.raised
            return result

        return guarded


target = functools.cache(tiny.build)


@pytest.fixture(scope="module", autouse=True)
def _layers_may_raise() -> Iterator[None]:
    """Those of all models here, for as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        models = map(target, NAMES)
        layers = (getattr(model, "layers", None) or model.model.layers for model in models)
        for kind in {type(layer) for of_model in layers for layer in of_model}:
            patch.setattr(kind, "__call__", Fault.within("layer", kind.__call__))
        yield


@functools.cache
def plain(name: str, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
    steps = generate_step(mx.array(prompt), target(name), max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


def goes_on(name: str, caches: list[Any], text: Sequence[int], whole: Sequence[int]) -> bool:
    """True if caches hold the first tokens of a text: it is continued as it would be."""
    again = sd.speculate(target(name), [*text], max_tokens=6, prompt_cache=caches)
    return [item.token for item in again] == plain(name, tuple(whole), 6)


class Faulty:
    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.sessions: list[Any] = []
        self.begin = Fault.within("begin", self._begin)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["drafter"], name)

    def _begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.drafter.begin(prompt, context)
        session.num_closed, session.__class__ = 0, raising(type(session))
        self.sessions.append(session)
        return session


@functools.cache
def raising(kind: type) -> type:
    """The class of a session, with calls that may raise, and a count of how often it was closed."""
    # a session that has a default of the base class does not call it: it keeps what it can
    calls = {name: getattr(kind, name) for name in DRAFTER if hasattr(kind, name)}
    defaults = {name for name, call in calls.items() if call is getattr(sd.Session, name, None)}
    calls = {name: call for name, call in calls.items() if name not in defaults - {"close"}}
    members = {name: Fault.within(name, call) for name, call in calls.items()}
    close = members["close"]

    def counted(self: Any, length: int) -> None:
        self.num_closed += 1
        close(self, length)

    return type(kind.__name__, (kind,), members | {"close": counted})


def drafter_of(way: str, name: str, coins: random.Random, *, before: bool) -> Any:
    """A drafter for this way to write; None to write plainly."""
    if way == "none":
        return None
    if way == "model":
        return sd.ModelDrafter(tiny.build(name, seed=1), branches=coins.choice([1, 1, 2]))
    if way in HEADS:
        return HeadDrafter(head(way, name), branches=coins.choice([1, 2]))
    seed, held = coins.randrange(100), BEFORE if before else []

    def coming(prompt: Sequence[int]) -> list[int]:
        return plain(name, (*held, *prompt), NUM_TOKENS + 8)

    if way == "trees":
        return scripted.OracleTrees(coming, VOCAB, seed)
    return scripted.OracleDrafter(coming, VOCAB, 0.4, seed)


@functools.cache
def head(kind: str, name: str) -> Any:
    return random_head(HEADS[kind], target(name))


def how(coins: random.Random) -> dict[str, Any]:
    """Sampler and processors, which may raise and may be known to be pure."""
    options: dict[str, Any] = {}
    if Fault.place == "sampler":
        options["sampler"] = Fault.within("sampler", lambda rows: mx.argmax(rows, axis=-1))
    if Fault.place == "processor":
        processor = Fault.within("processor", lambda tokens, logits: logits)
        processor.pure = coins.random() < 0.5  # type: ignore[attr-defined]
        options["logits_processors"] = [processor]
    return options


def raised_in(part: str) -> bool:
    """True if the fault came through a module or function: `exactness`, where it is a verdict, or
    `close_all`, at the end of a generation."""
    frames = traceback.extract_tb(Fault.raised.__traceback__ if Fault.raised else None)
    return any(part in (frame.name, Path(frame.filename).stem) for frame in frames)


def notes(error: BaseException | None) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def filled(name: str, tokens: Sequence[int], model: nn.Module | None = None) -> list[Any]:
    model = model or target(name)
    caches = make_prompt_cache(model)
    if tokens:
        model(mx.array([list(tokens)]), cache=caches)
    return caches


def one_text(way: str, coins: random.Random) -> None:
    names = {"model": ("llama", "gemma3_text")} | dict.fromkeys(HEADS_HERE, ("llama",))
    name = coins.choice(names.get(way, NAMES))
    prompt, before = coins.choice(PROMPTS), coins.random() < 0.4
    held = BEFORE if before else []
    one = drafter_of(way, name, coins, before=before)
    caches = filled(name, held)
    own = len(caches)
    has_draft_caches = way == "model" and coins.random() < 0.5
    caches += filled(name, held, one.model) if has_draft_caches else []
    fresh = coins.random() < 0.2
    model = tiny.build(name) if fresh else target(name)
    Fault.arm(coins, [p for p in PLACES if way != "none" or p not in DRAFTER])
    tokens: list[int] = []
    left_at = coins.randint(1, NUM_TOKENS) if coins.random() < 0.3 else -1
    options = {
        "max_tokens": NUM_TOKENS,
        "prompt_cache": caches,
        "num_draft_tokens": coins.choice([1, 3, 8, "auto"]),
        "prefill_step_size": coins.choice([3, 2048]),
        "prompt_progress_callback": Fault.within("callback", lambda done, total: None),
        "probe": coins.random() < 0.7,
        **how(coins),
    }
    begin = functools.partial(sd.speculate, model, prompt, one and Faulty(one), **options)
    error = run_one(begin, tokens, left_at, throws=coins.random() < 0.5)
    place, told = Fault.disarm(), notes(error)
    is_probed = place == "layer" and (fresh or raised_in("exactness"))
    has_left = len(tokens) == left_at  # before he was told of a failure
    assert is_probed or has_left or (Fault.raised is not None) == ("the fault" in told), told
    text = [*held, *prompt]
    assert tokens == plain(name, tuple(text))[: len(tokens)]
    ends = [[*text, *tokens]] if tokens else [[*text], [*held]]
    try:
        check_usable(caches)
    except sd.errors.CacheRollbackError:
        by_drafter = place in DRAFTER and isinstance(Fault.raised, Exception)
        assert not by_drafter
        at_the_end = any(map(raised_in, ("close_all", "bring_caches_to")))
        assert "No way back" in told or at_the_end
        return
    held_by = copy.deepcopy(caches[:own])
    assert any(goes_on(name, copy.deepcopy(held_by), [9], [*end, 9]) for end in ends)
    if has_draft_caches and place not in ("close", "layer"):
        want = {cache.offset for cache in caches[:own]}
        assert {cache.offset for cache in caches[own:]} <= {*want, len(held)}
    again = sd.speculate(model, text, one if not before else None, max_tokens=6, num_draft_tokens=3)
    assert [item.token for item in again] == plain(name, tuple(text))[:6]


def run_one(
    begin: Callable[[], Any], tokens: list[int], left_at: int, *, throws: bool
) -> BaseException | None:
    """Take tokens until something is raised, or the caller leaves; what was raised."""
    try:
        generation = begin()
        for item in generation:
            tokens.append(item.token)
            if len(tokens) == left_at and throws:
                generation.throw(ZeroDivisionError("the caller"))
            if len(tokens) == left_at:
                generation.close()
    except (RuntimeError, KeyboardInterrupt, ZeroDivisionError) as error:
        return error
    return None


def several_texts(coins: random.Random) -> None:
    name, before = coins.choice(NAMES), coins.random() < 0.4
    held = BEFORE if before else []
    lent = filled(name, held)
    one = drafter_of(coins.choice(["none", "chains", "model"]), name, coins, before=before)
    faulty = one and Faulty(one)
    told_of: list[int] = []
    batch = BatchGeneration(
        target(name),
        faulty,
        Options(
            num_draft_tokens=coins.choice([1, 3, "auto"]),
            prefill_step_size=coins.choice([3, 2048]),
        ),
        Schedule(coins.choice([2, 3])),
        returns_caches=True,
        completes_caches=coins.random() < 0.5,
        on_error=coins.choice([None, lambda uid, error: told_of.append(uid)]),
    )
    Fault.arm(coins, [p for p in PLACES if p != "callback" and (one or p not in DRAFTER)])
    requests = [
        Request(prompt, coins.randint(3, NUM_TOKENS), prompt_cache=lent if before else None)
        for prompt in PROMPTS
    ]
    guarded = coins.randrange(len(requests) + 1)
    for i, request in enumerate(requests):
        batch.insert(replace(request, **how(coins)) if i <= guarded else request)
    texts: dict[int, list[int]] = {uid: [] for uid in range(len(requests) + 1)}
    ended: dict[int, Any] = {}

    def written() -> Iterator[Any]:
        with closing(batch.run()) as rows:
            for row in rows:
                if row.finish_reason is not None:
                    ended[row.uid] = row
                texts[row.uid].append(row.token.token)
                yield row.token

    left_at = coins.randint(1, NUM_TOKENS) if coins.random() < 0.3 else -1
    error = run_one(written, [], left_at, throws=coins.random() < 0.5)
    place, told = Fault.disarm(), notes(error)
    if not told_of:
        assert (Fault.raised is not None) == ("the fault" in told), (Fault.raised, told)
    batch.insert(Request(PROMPTS[0], 5, prompt_cache=lent if before else None))
    requests.append(Request(PROMPTS[0], 5))
    again = run_one(written, [], -1, throws=False)
    assert again is None, traceback.format_exception(again)
    assert len(texts[len(requests) - 1]) == 5
    is_of_a_row = place in ("begin", "propose", "observe", "sampler")
    if batch.on_error and isinstance(Fault.raised, Exception) and left_at < 0 and is_of_a_row:
        assert (len(told_of), error) == (1, None)
    assert not {*told_of} & {*ended}, "a text that failed came as one that has ended"
    for uid, request in enumerate(requests):
        whole = [*held, *request.prompt]
        assert texts[uid] == plain(name, tuple(whole))[: len(texts[uid])]
        if batch.on_error and error is None and left_at < 0 and uid not in told_of:
            assert len(texts[uid]) == request.max_tokens, (uid, told_of)
        if uid in ended and ended[uid].prompt_cache is not None:
            text = [*request.prompt, *texts[uid]]
            cached = ended[uid].num_cached
            check_usable(ended[uid].prompt_cache)
            assert goes_on(name, ended[uid].prompt_cache, [*text[cached:], 9], [*held, *text, 9])
    if before:
        assert goes_on(name, lent, [9], [*held, 9])
    if faulty and place != "begin":
        assert {session.num_closed for session in faulty.sessions} <= {1}


def beams(coins: random.Random) -> None:
    name, num_beams = coins.choice(NAMES[:4]), coins.choice([2, 3])
    way = coins.choice(["none", "chains", "trees", "model"])
    one = drafter_of(way, name, coins, before=False)
    assert can_hold_rows(target(name))
    Fault.arm(coins, ["layer", *DRAFTER] if one else ["layer"])
    prompt = coins.choice(PROMPTS)

    def search(drafter: Any) -> list[tuple[int, ...]]:
        rows = BeamRows(target(name), prompt, num_beams, prefill_step_size=4)
        context = DraftContext(sampling=sd.Sampling(), vocab_size=VOCAB)
        drafting = drafter and BeamDrafting(drafter, prompt, context, rows.stream)
        found = BeamSearch(rows, num_beams, 6, drafting=drafting, length=Fixed(3))
        return [beam.tokens for beam in found.run()]

    fired = False
    try:
        search(Faulty(one) if one else None)
    except (RuntimeError, KeyboardInterrupt) as error:
        fired = "the fault" in str(error)
    Fault.disarm()
    assert fired == (Fault.raised is not None)
    assert search(one) == search(None)


CASES = {"chains": 25, "batch": 30, "beams": 15} | dict.fromkeys(("none", "trees", "model"), 20)
CASES |= dict.fromkeys(HEADS_HERE, 10)
IN_SHORT = 3  # cases of each that always run


@pytest.mark.parametrize("run", ["short", pytest.param("rest", marks=FULL)])
@pytest.mark.parametrize("way", CASES)
def test_after_an_exception_anywhere_caches_hold_what_was_handed_out(way: str, run: str) -> None:
    """150 generations in all; in the short run each kind has three."""
    several = {"batch": several_texts, "beams": beams}
    write = several.get(way, functools.partial(one_text, way))

    def check(case: int) -> None:
        try:
            write(random.Random(f"{way} {case}"))
        finally:
            Fault.disarm()

    assert sum(CASES.values()) == 150
    each(range(IN_SHORT) if run == "short" else range(IN_SHORT, CASES[way]), check)
