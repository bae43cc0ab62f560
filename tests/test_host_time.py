"""What a round does on the host does not grow with the context: counted, not timed."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

import heads
from benchmarks import host_time
from benchmarks.host_time import LOOPS, Kind, Table, gaps, generate, kinds, prompt_of
from scripted import ScriptedDrafter
from specdec_mlx import loop
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import RoundRecord
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import PAUSE, Auto, Fixed
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.loop import speculate
from specdec_mlx.sampling import Sampling
from specdec_mlx.target import Verifier

K = 4
KINDS = {kind.name: kind for kind in kinds(K)}
OPERATIONS = [
    *((mx, name) for name in ("concatenate", "stack", "take_along_axis", "eval", "async_eval")),
    (Rollback, "forward"),
]


def count_calls(patch: pytest.MonkeyPatch, owner: Any, name: str, calls: Counter[str]) -> None:
    """Count the calls of a function, and the elements of the arrays that it returns."""
    call = getattr(owner, name)

    def counted(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        calls[name] += 1
        calls[f"{name}, elements"] += getattr(result, "size", 0)
        return result

    patch.setattr(owner, name, counted)


def counts(kind: Kind, context: int) -> list[Counter[str]]:
    """For rounds 3 to 13: calls by operation, and elements of their results, caches left out."""
    current: Counter[str] = Counter()
    rounds = []
    with pytest.MonkeyPatch.context() as patch, closing(generate(kind, context, 1000, K)) as stream:  # type: ignore[type-var]
        for number, _ in stream:
            if number == 3 and not rounds:
                for module, name in OPERATIONS:
                    count_calls(patch, module, name, current)
            if number >= 3 and number - 3 == len(rounds):
                rounds.append(Counter(current))
                current.clear()
            if number == 13:
                break
    return rounds[1:]


@pytest.mark.parametrize("name", KINDS)
def test_nothing_grows_with_the_context(name: str) -> None:
    """The same operations on as many elements at 520 tokens as at 8,200."""
    short, long = (counts(KINDS[name], context) for context in (520, 8200))
    assert len(short) == 10
    assert short == long
    assert min(short[0][call] for call in ("forward", "eval", "async_eval")) > 0
    assert short[0]["eval"] + short[0]["async_eval"] <= 2


@pytest.mark.parametrize(("draft_length", "policy"), [(0, Fixed), ("auto", Auto)])
def test_a_paused_draft_model_costs_a_question_a_round(draft_length, policy, monkeypatch):
    """The policy is asked whether to draft; no cache is asked, and chances are worked out in one
    round of eight."""
    calls: Counter[str] = Counter()
    tuning, drafter = Tuning(), ScriptedDrafter(lambda start, limit: [0] * limit)
    tuning.of(drafter.key).account.budget = -2.0
    options = {"max_tokens": 60, "num_draft_tokens": draft_length, "tuning": tuning, "probe": False}
    stream = speculate(Table(16), [1], drafter, **options)
    list(islice(stream, 10))
    count_calls(monkeypatch, policy, "limit", calls)
    count_calls(monkeypatch, Verifier, "measure_width", calls)
    for name in ("learn", "of_draft"):
        count_calls(monkeypatch, Chances, name, calls)
    *_, last = islice(stream, 40)
    assert last.stats.drafted == 0
    assert calls["of_draft"] <= 40 / PAUSE + 1
    assert (calls["limit"], calls["learn"], calls["measure_width"]) == (40, 0, 0)


def graph_sizes(steps: Iterator[Any]) -> list[int]:
    """Nodes of the graphs that are launched for 20 tokens, after a few."""
    sizes: list[int] = []
    launch = mx.async_eval

    def counted(*launched: Any) -> None:
        dot = io.StringIO()
        mx.export_to_dot(dot, *(array for _, array in tree_flatten(list(launched))))
        sizes.append(dot.getvalue().count("label"))
        launch(*launched)

    with pytest.MonkeyPatch.context() as patch, closing(steps):  # type: ignore[type-var]
        for number in range(25):
            if number == 5:
                patch.setattr(mx, "async_eval", counted)
            next(steps)
    return sizes


@pytest.mark.parametrize("temp", [0.0, 0.7, 1.0])
def test_a_plain_round_is_no_larger_a_graph_than_mlx_lms(temp: float) -> None:
    """As many operations as `generate_step` has, or fewer, but where noise is drawn ahead."""
    model = Table(257)
    plain = generate_step(mx.array([1, 2]), model, max_tokens=-1, sampler=make_sampler(temp))
    own = speculate(model, [1, 2], None, max_tokens=-1, sampler=Sampling(temp))
    allowed, sizes = max(graph_sizes(plain)), graph_sizes(own)
    assert len(sizes) == 20
    assert sorted(sizes)[-3] <= allowed  # of 25 positions noise is drawn before the 8th and 16th


MOST = {
    "no drafter": (35, 6),
    "nothing to draft": (67, 12),
    "a drafted round": (105, 14),
    "a head that drafts nothing": (88, 15),
}
"""Most Python calls in a round, and most files of the package that it enters; lower them with the
code, and raise them for nothing."""


class SteadyClock(Auto):
    """The automatic draft length on a machine that takes five rows at once, and no more."""

    def record(self, round_: RoundRecord) -> None:
        seconds = 1.0 if round_.fed <= 5 else float(round_.fed)
        super().record(replace(round_, seconds=seconds, steady=True))


def calls_a_round(kind: str, folder: Path) -> tuple[float, float]:
    """Calls of this package's Python functions in a round, and files that it enters.

    Medians of the rounds 16 to 80, and of a drafted round those that accept all of K tokens.
    """
    prompt = prompt_of(2 * host_time.VOCAB_SIZE) if kind == "a drafted round" else [0]
    target: Any = Table()
    length = SteadyClock()
    drafter: Any = None if kind == "no drafter" else SuffixDrafter()
    if kind == "a head that drafts nothing":
        target, drafter = heads.target(), heads.loaded("eagle3", folder)
        length.tuning.of(drafter.key).account.budget = -1e9
    options: dict[str, Any] = {"max_tokens": 2000, "num_draft_tokens": length, "probe": False}
    own, files, counted = str(Path(loop.__file__).parent), list[str](), list[tuple[int, int]]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(own):
            files.append(frame.f_code.co_filename)

    kept = (K, K) if kind == "a drafted round" else (0, 0)
    with closing(speculate(target, prompt, drafter, **options)) as stream:
        next(token for token in stream if token.stats.target_passes == 16)
        sys.setprofile(count)
        try:
            for num_passes in range(17, 81):  # from the first token of a round to that of the next
                token = next(one for one in stream if one.stats.target_passes == num_passes)
                if token.stats.rounds[-1] == token.stats.rounds[-2] == kept:
                    counted.append((len(files), len(set(files))))
                files.clear()
        finally:
            sys.setprofile(None)
    assert len(counted) > 50, token.stats.rounds
    calls, entered = zip(*counted, strict=True)
    return median(calls), median(entered)


def test_a_round_takes_no_more_python_calls_than_it_did(tmp_path: Path) -> None:
    """Counted, not timed: without a drafter, with one that finds nothing, and with its drafts."""
    found = {kind: calls_a_round(kind, tmp_path / kind) for kind in MOST}
    for kind, most in MOST.items():
        assert all(a <= b for a, b in zip(found[kind], most, strict=True)), found


@pytest.mark.parametrize(("draft_length", "most"), [(4, (59, 129)), (8, (59, 173))])
def test_a_round_with_a_draft_model_launches_no_more_than_mlx_lms(
    draft_length: int, most: tuple[int, int]
) -> None:
    """A step of the draft has fewer operations, and the pass that verifies has few more: it makes
    each row of log-probabilities an array of its own."""
    ours, theirs = (
        gaps(loop, Table(256), draft_length, 4, counts=True) for loop in LOOPS["tokens"]
    )
    for (own, other), most_calls, more in zip(
        zip(ours, theirs, strict=True), most, (0, 1), strict=True
    ):
        assert len(own) >= 3
        assert own[-1].calls <= most_calls
        assert 0 < own[-1].operations <= other[-1].operations + more
