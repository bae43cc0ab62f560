"""The engine: each request gets the text that it gets alone, whoever comes, leaves or fails."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models import qwen2
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import tiny_model_folder
from engines import (
    ASKED,
    PROMPT,
    Client,
    ask,
    queued_together,
    running,
    settled,
    submit,
    with_flags,
)
from selection import cases, in_one_test
from specdec_mlx.batch.passes import SharedPasses
from specdec_mlx.batch_caches import BatchCaches, SlotCache
from specdec_mlx.contracts import LookUpSession
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.grammar import Grammar, GrammarProcessor
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.sequence import PromptReader
from specdec_mlx.server import engine as engine_module
from specdec_mlx.server import loading, models, prompt_echo
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import (
    Ended,
    Failed,
    PromptProgress,
    RequestError,
    ServerEndingError,
    TextPiece,
    TextRequest,
    Transcript,
)
from specdec_mlx.server.text.state import TextState
from tiny_model_folder import CHAT_TEMPLATE, make_tokenizer, write_model_folder

TEXT = "the cat in the hat and the other cat in the hat and "
OBJECT = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"cat": {"type": "string", "maxLength": 9}, "hat": {"type": "integer"}},
        "required": ["cat", "hat"],
        "additionalProperties": False,
    }
)
NUMBERS = Grammar.json_schema(
    {"type": "array", "items": {"type": "integer"}, "minItems": 24, "maxItems": 24}
)
DRAWN = {"temp": 0.8}

MIXED: list[dict[str, Any]] = [
    {},
    {"drafters": ["ngram"], "num_draft_tokens": 2},
    {"drafters": ["none"]},
    {"seed": 3, "sampling": DRAWN},
    {"seed": 4, "sampling": {"temp": 1.2, "top_p": 0.9}, "rule": "coupled"},
    {"grammar": OBJECT},
    {"grammar": OBJECT, "seed": 5, "sampling": {"temp": 1.0}},
    {"num_logprobs": 0},
    {"num_logprobs": 3},
    {"stop": ["zz", "e"]},
    {"penalties": {"repetition_penalty": 1.3}},
    {"prediction": TEXT * 3},
    {"penalties": {"logit_bias": {100: 2.0}}},
    {"seed": 6, "sampling": {"temp": 1.0, "top_k": 500_000}},  # all of the tokens
]
"""What a request may ask for; each of another prompt, two of a length of their own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "target", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with running(folder, flags=with_flags(num_draft_tokens=2)) as engine:
        yield engine


def prompt_of(i: int) -> str:
    return f"{chr(65 + i)} {TEXT * 2}"


def begin(engine: Engine, i: int, **kind: Any) -> Client:
    return submit(engine, **{"prompt": prompt_of(i), "max_tokens": 40} | kind)


def texts(engine: Engine, kinds: list[dict[str, Any]], first: int = 0) -> list[Transcript]:
    """Each asked for alone."""
    return [begin(engine, first + i, **kind).wait() for i, kind in enumerate(kinds)]


def told(written: Transcript) -> tuple[Any, ...]:
    """What does not depend on who else is served."""
    assert written.ended is not None
    ended = written.ended
    logprobs = [(one.token, round(one.logprob, 3), len(one.top)) for one in written.logprobs]
    return written.text, ended.reason, ended.stop, ended.num_written, ended.num_prompt, logprobs


def plain(folder: Path, prompt: Any, max_tokens: int) -> str:
    """mlx-lm's own text."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens))


def test_a_text_is_mlx_lms_alone_and_beside_others_in_fewer_passes(
    folder: Path, engine: Engine
) -> None:
    """A chat and completions; what was read is not read again."""
    tokenizer = mlx_lm.load(str(folder))[1]
    chat = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)
    expected = plain(folder, chat, 60)
    alone = ask(engine, max_tokens=60)
    assert (alone.text, alone.ended and alone.ended.reason) == (expected, "length")
    assert alone.ended is not None
    assert alone.ended.stats is not None
    assert alone.ended.stats.target_passes < 60
    assert 0 < alone.ended.accepted <= 60
    assert not alone.ended.is_batched
    with queued_together(engine):
        both = [submit(engine, max_tokens=60), begin(engine, 0), begin(engine, 1)]
    chat_again, *others = [client.wait() for client in both]
    assert chat_again.text == expected
    assert [other.text for other in others] == [plain(folder, prompt_of(i), 40) for i in (0, 1)]
    assert all(other.ended and other.ended.is_batched for other in others)
    assert chat_again.ended is not None
    assert chat_again.ended.num_cached == len(chat) - 1


def test_progress_comes_first_and_ends_with_the_whole_prompt(folder: Path) -> None:
    with running(folder, flags=with_flags(), prefill_step_size=16) as engine:
        for is_cached in (False, True):
            client = begin(engine, 0, max_tokens=3)
            client.wait()
            read = [event for event in client.events if isinstance(event, PromptProgress)]
            assert read == client.events[: len(read)]
            total = read[0].total
            num_cached = total - 1 if is_cached else 0
            assert {event.num_cached for event in read} == {num_cached}
            assert read[0].done == num_cached
            assert read[-1].done == total
            assert len(read) >= (2 if is_cached else total // 16)


def test_all_kinds_of_requests_run_together(engine: Engine) -> None:
    """With seeds, grammars, log-probabilities, penalties and stop strings."""
    alone = [*map(told, texts(engine, MIXED))]
    for _ in range(2):  # the prompts are in the caches the second time
        with queued_together(engine):
            clients = [begin(engine, i, **kind) for i, kind in enumerate(MIXED)]
        written = [client.wait() for client in clients]
        assert [*map(told, written)] == alone
        batched = [one.ended for one in written if one.ended and one.ended.is_batched]
        assert len(batched) >= len(MIXED) - 2
    assert json.loads(alone[5][0]).keys() == {"cat", "hat"}
    assert alone[9][1] == "stop"


GOING_ON: list[dict[str, Any]] = [
    {"max_tokens": 120},
    {"seed": 3, "sampling": DRAWN, "grammar": NUMBERS, "max_tokens": 200},
]


@in_one_test("kind", GOING_ON)
def test_a_text_goes_on_without_a_seam_when_others_come(
    kind: dict[str, Any], engine: Engine
) -> None:
    """At many points; a seed, a grammar and a stop string go on where they were."""
    expected = begin(engine, 0, **kind).wait()
    if expected.ended and expected.ended.reason == "length":
        kind = kind | {"stop": [expected.text[-9:]]}
        expected = begin(engine, 0, **kind).wait()
    assert expected.ended
    assert expected.ended.reason == "stop"
    others = [*map(told, texts(engine, [{}] * 3, 1))]
    for num_events in (1, 40):
        client = begin(engine, 0, pause_at=num_events, **kind)
        with queued_together(engine, client):
            joined = [begin(engine, i) for i in (1, 2, 3)]
        written = client.wait()
        assert told(written) == told(expected)
        assert written.ended
        assert written.ended.is_batched
        assert [told(other.wait()) for other in joined] == others


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3_text"])
def test_texts_of_recurrent_and_windowed_models_go_on_as_rows(name: str, tmp_path: Path) -> None:
    """What was written is read again where caches cannot be shortened, and the text is the same."""
    folder = write_model_folder(tmp_path, name, max_position_embeddings=8192)
    with running(folder, flags=with_flags(num_draft_tokens=2), prefill_step_size=16) as engine:
        client = begin(engine, 0, pause_at=20, max_tokens=60)
        with queued_together(engine, client):
            other = begin(engine, 1)
        assert client.wait().text == plain(folder, prompt_of(0), 60)
        assert other.wait().text == plain(folder, prompt_of(1), 40)
        assert isinstance(client.events[-1], Ended)
        assert client.events[-1].is_batched


def test_clients_that_leave_at_any_point_leave_the_others_alone(engine: Engine) -> None:
    """Alone and in a batch, before the first event, while reading, and in the middle."""
    expected = [*map(told, texts(engine, [{}] * 3))]
    for num_events in (0, 1, 2, 9):
        for beside in (0, 3):
            left = begin(engine, 20 + num_events + beside, prompt=f"{num_events}" + TEXT * 40)
            others = [begin(engine, i) for i in range(beside)]
            for _ in range(num_events):
                left.next()
            left.ticket.cancel()
            assert [told(other.wait()) for other in others] == expected[:beside]
            with pytest.raises(ConnectionError):
                left.wait()
    assert told(begin(engine, 0).wait()) == expected[0]


def test_what_was_read_for_a_client_that_left_is_not_read_again(folder: Path) -> None:
    with running(folder, flags=with_flags(), prefill_step_size=16) as engine:
        client = begin(engine, 0, prompt=TEXT * 20)
        while not any(
            isinstance(event, PromptProgress) and event.done > 99 for event in client.events
        ):
            client.next()
        client.ticket.cancel()
        with pytest.raises(ConnectionError):
            client.wait()
        again = begin(engine, 0, prompt=TEXT * 20).wait()
        assert again.ended
        assert again.ended.num_cached > 99


@pytest.mark.parametrize("name", ["qwen2", "qwen3_next"])
def test_what_was_written_for_a_client_that_left_is_not_read_again(
    name: str, tmp_path: Path
) -> None:
    """Of a row of a batch too; where caches cannot be shortened, its prompt is not."""
    folder = write_model_folder(tmp_path, name, max_position_embeddings=8192)
    with running(folder, flags=with_flags()) as engine:
        others = [begin(engine, i, max_tokens=2000) for i in range(2)]
        leaving = begin(engine, 7, prompt="7 " + TEXT * 9, max_tokens=2000)
        leaving.until_text()
        while sum(isinstance(event, TextPiece) for event in leaving.events) < 9:
            leaving.next()
        for client in (leaving, *others):
            client.ticket.cancel()
        with pytest.raises(ConnectionError):
            leaving.wait()
        engine = settled(engine)
        prompt = "7 " + TEXT * 9
        num_prompt = len(make_tokenizer().encode(prompt).ids)
        said = "".join(event.text for event in leaving.events[:-1] if isinstance(event, TextPiece))
        again = begin(engine, 7, prompt=prompt + said, max_tokens=9).wait()
        assert again.ended
        assert again.ended.num_cached >= num_prompt - 1 + (5 if name == "qwen2" else 0)
        whole = begin(engine, 7, prompt=prompt, max_tokens=40).wait().text
        assert (said + again.text)[: len(whole)] == whole[: len(said + again.text)]


VICTIM = "! this one fails in the middle of what the others write"
NUM_READ = len(make_tokenizer().encode(VICTIM).ids)


def always(*args: Any) -> bool:
    return True


def after(number: int, holds: Callable[..., bool] = always) -> Callable[..., bool]:
    """From so many calls on, of those for which something holds."""
    calls = iter(range(10**9))
    return lambda *args: holds(*args) and next(calls) >= number


FAULTS: dict[str, tuple[Any, str, Callable[[], Callable[..., bool]]]] = {
    "its drafter is checked": (NGramDrafter, "check", lambda: always),
    "its drafter begins": (NGramDrafter, "begin", lambda: always),
    "its prompt is read": (
        PromptReader,
        "read",
        lambda: lambda reading, *args: len(reading.prompt) == NUM_READ,
    ),
    "its caches join the others": (
        SlotCache,
        "add_row",  # the first layer has the row already
        lambda: after(1, lambda rows, cache, *args: cache.offset + 1 == NUM_READ),
    ),
    "it is drafted for": (LookUpSession, "propose", lambda: after(3)),
    "it is told what was kept": (LookUpSession, "observe", lambda: after(3)),
    "it is kept to its grammar": (GrammarProcessor, "__call__", lambda: after(3)),
    "its caches are taken out": (
        BatchCaches,
        "extract",
        lambda: lambda caches, row, like: caches.lengths[row] == NUM_READ + 19,
    ),
    "its drafter closes": (LookUpSession, "close", lambda: always),
    "its text is made": (TextState, "add", lambda: after(3, lambda self, *a: is_victims(self))),
    "its text ends": (TextState, "end", lambda: lambda self, *args: is_victims(self)),
}
"""A method that raises where a condition on its arguments holds."""


def is_victims(state: TextState) -> bool:
    return bool(state._request.prompt == VICTIM)


@pytest.mark.parametrize(
    "fault", cases(FAULTS, "its prompt is read", "it is drafted for", "its text is made")
)
def test_a_fault_is_told_to_its_client_alone(
    fault: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside others, and alone where such a text has that part."""
    undrafted = {"drafters": ["none"], "max_tokens": 100}
    expected = [*map(told, texts(engine, [undrafted] * 2))]
    kind: dict[str, Any] = {"prompt": VICTIM, "drafters": ["ngram"], "max_tokens": 20}
    if "grammar" in fault:
        kind["grammar"] = OBJECT
    owner, name, make_holds = FAULTS[fault]
    method = getattr(owner, name, lambda *args: None)
    for is_alone in (False, True):
        if is_alone and owner in (SlotCache, BatchCaches):
            continue
        holds = make_holds()

        def failing(self: Any, *args: Any, holds: Callable[..., bool] = holds) -> Any:
            if holds(self, *args):
                raise RuntimeError("a fault was put here")
            return method(self, *args)

        with monkeypatch.context() as patch:
            others = [begin(engine, i, **undrafted) for i in range(0 if is_alone else 2)]
            for other in others:
                other.until_text()
            patch.setattr(owner, name, failing, raising=False)
            victim = submit(engine, **kind)
            # alone, a text is told whole before its drafter closes
            is_whole = is_alone and name == "close"
            fault_told = pytest.raises(RuntimeError, match="a fault was put here")
            with nullcontext() if is_whole else fault_told:
                victim.wait()
            assert [told(other.wait()) for other in others] == expected[: len(others)]
        settled(engine).prefixes.trim_to(0)
    assert told(begin(engine, 0, **undrafted).wait()) == expected[0]


def test_a_fault_where_a_text_joins_a_batch_is_told_to_its_client_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafter closes as it leaves the loop; the text that came is written all the same."""
    expected = told(begin(engine, 0, drafters=["none"]).wait())

    def failing(self: LookUpSession, length: int) -> None:
        raise RuntimeError("a fault was put here")

    with monkeypatch.context() as patch:
        patch.setattr(LookUpSession, "close", failing, raising=False)
        victim = submit(engine, prompt=VICTIM, drafters=["ngram"], max_tokens=4000)
        victim.until_text()
        other = begin(engine, 0, drafters=["none"])
        assert told(other.wait()) == expected
        with pytest.raises(RuntimeError, match="a fault was put here"):
            victim.wait()


def test_a_batch_that_fails_is_told_to_all_and_the_next_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [*map(told, texts(engine, [{}] * 3))]

    def failing(self: SharedPasses, rounds: Any) -> Any:
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch:
        first = begin(engine, 9, max_tokens=2000)
        first.until_text()
        patch.setattr(SharedPasses, "launch", failing)
        clients = [first, *(begin(engine, i) for i in range(3))]
        failed = 0
        for client in clients:
            try:
                client.wait()
            except RuntimeError as error:
                failed += "out of order" in str(error)
    assert failed >= 2
    assert [told(client.wait()) for client in [begin(engine, i) for i in range(3)]] == expected


def test_the_prompt_of_several_choices_is_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed: list[int] = []
    call = qwen2.Model.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        if ids.shape[0] == 1:  # of one text
            fed.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    with running(folder, flags=with_flags(num_draft_tokens=2)) as engine:
        monkeypatch.setattr(qwen2.Model, "__call__", counted)
        kind = {"prompt": f"!{TEXT * 8}", "max_tokens": 2, "sampling": {"temp": 1.0}}
        clients = [submit(engine, seed=i, **kind) for i in range(4)]
        written = [client.wait() for client in clients]
    assert len({one.text for one in written}) > 1
    assert written[0].ended
    assert sum(size for size in fed if size > 8) <= 1.1 * written[0].ended.num_prompt


WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32, a group of kv_bits
WAYS = ["the automatic length", "a draft model", "no rows", "quantized caches"]


@in_one_test("how", WAYS)
def test_texts_are_those_alone_however_they_are_drafted_for(
    how: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`auto` measures; a draft model has caches for each row; without rows one is served after the
    other, which is said once."""
    kinds = [MIXED[i] for i in ((0, 0, 3, 5) if how in WAYS[:2] else (0, 3))]
    flags = with_flags() if how == "the automatic length" else with_flags(num_draft_tokens=2)
    settings: dict[str, Any] = {}
    if how == "a draft model":  # whose rejected drafts may change what a seed draws
        kinds = kinds[:2] * 2
        draft = write_model_folder(folder.parent / "draft", "llama", seed=3)
        choice = DrafterChoice(model=DraftModel(str(draft)))
        flags = with_flags(num_draft_tokens=2, choice=choice)
    if how == "quantized caches":
        folder = write_model_folder(tmp_path, max_position_embeddings=8192, **WIDE_HEADS)
        settings = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
    with monkeypatch.context() as patch:
        if how == "no rows":
            patch.setattr(loading, "can_hold_rows", lambda model: False)
        with running(folder, flags=flags, **settings) as engine:
            alone = [*map(told, texts(engine, kinds))]
            with queued_together(engine):
                clients = [begin(engine, i, **kind) for i, kind in enumerate(kinds)]
            written = [client.wait() for client in clients]
            assert [*map(told, written)] == alone
            batched = [one.ended.is_batched for one in written if one.ended]
            assert any(batched) == (how in WAYS[:2])
    said_once = sum("cannot be rows of one batch" in message for message in caplog.messages)
    assert said_once == (how == "no rows")
    caplog.clear()


@pytest.mark.full
def test_the_rest_is_served_after_a_model_that_is_drained(folder: Path, tmp_path: Path) -> None:
    """Requests for two models in turn: in the order in which they came."""
    second = write_model_folder(tmp_path, "llama", seed=5)
    with running(folder, flags=with_flags()) as engine:
        order: list[int] = []
        clients = []
        for i in range(6):
            model = str(second) if i % 2 else ""
            client = begin(engine, i, model=model)
            clients.append((client, second if i % 2 else folder))
        for i, (client, own) in enumerate(clients):
            assert client.wait().text == plain(own, prompt_of(i), 40)
            order.append(i)


@pytest.mark.full
def test_who_waits_for_another_model_costs_those_that_are_served_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is looked up once, and not at each token."""
    looked_up = []

    def is_in_cache(name: str) -> bool:
        looked_up.append(name)
        return False

    monkeypatch.setattr(models, "is_in_cache", is_in_cache)
    with running(folder, flags=with_flags()) as engine:
        first = begin(engine, 0, max_tokens=200)
        first.until_text()
        names_of = engine.models.names_of
        monkeypatch.setattr(
            engine.models, "names_of", lambda request: looked_up.append("") or names_of(request)
        )
        second = write_model_folder(tmp_path, "llama", seed=5)
        other = begin(engine, 1, model=str(second), max_tokens=3)
        first.wait()
        other.wait()
    assert len(looked_up) <= 2


def test_a_name_that_means_another_model_by_now_leaves_the_texts_under_way_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model comes into the cache while its request waits: the model that writes stays
    until its texts have ended."""
    second = str(write_model_folder(tmp_path, "llama", seed=5))
    with running(folder, flags=with_flags(), any_model_name=True) as engine:
        expected = told(begin(engine, 0, max_tokens=200).wait())
        names_of, is_there = engine.models.names_of, threading.Event()

        def names_by_now(request: TextRequest) -> tuple[str, str | None]:
            is_new = request.model == "new" and is_there.is_set()
            return (second, None) if is_new else names_of(request)

        monkeypatch.setattr(engine.models, "names_of", names_by_now)
        first = begin(engine, 0, max_tokens=200)
        first.until_text()
        submit_prepared = engine._queue

        def queued(ticket: Any) -> None:
            is_there.set()
            submit_prepared(ticket)

        monkeypatch.setattr(engine, "_queue", queued)
        other = begin(engine, 1, model="new", max_tokens=5)
        assert told(first.wait()) == expected
        assert other.wait().text == plain(Path(second), prompt_of(1), 5)


def test_max_tokens_is_the_least_of_what_is_asked_and_what_fits(tmp_path: Path) -> None:
    """Only a prompt that does not fit is refused, with both numbers."""
    folder = write_model_folder(tmp_path, max_position_embeddings=64)
    for default, wanted, written in [(None, None, 34), (None, 500, 34), (7, None, 7), (7, 9, 9)]:
        with running(folder, flags=with_flags(), max_tokens=default) as engine:
            text = ask(engine, prompt=list(range(10, 41)), max_tokens=wanted)
            assert text.ended
            assert (text.ended.reason, text.ended.num_written) == ("length", written)
            assert ask(engine, prompt=list(range(10, 74)), max_tokens=9).ended
            with pytest.raises(RequestError) as raised:
                ask(engine, prompt=list(range(10, 75)), max_tokens=1)
            error = raised.value
            found = (error.code, error.num_tokens, error.most)
            assert found == ("context_length_exceeded", 65, 64)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"prompt": [7, 10**9]}, ValueError, "holds token"),
    ({"prompt": []}, RequestError, "empty"),
    ({"drafters": ["nobody"]}, ValueError, "Unknown drafter"),
    ({"rule": "nothing"}, ValueError, "nothing"),
    ({"penalties": {"logit_bias": {10**9: 1.0}}}, RequestError, "there is no token"),
    ({"messages": [{"role": "user"}], "template": {"tools": 3, "x": 1}}, RequestError, ""),
]


@in_one_test(("wrong", "kind", "words"), WRONG[:-1])
def test_a_request_that_is_wrong_is_told_so_and_the_next_is_served(
    wrong: dict[str, Any], kind: type[Exception], words: str, engine: Engine
) -> None:
    with pytest.raises(kind, match=words):
        ask(engine, **wrong)
    assert ask(engine).ended


def test_a_template_of_a_request_is_refused_before_it_is_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template is a program. Tokens are counted under the same rule."""
    run = list[Any]()
    monkeypatch.setattr(TokenizerWrapper, "apply_chat_template", lambda *a, **more: run.append(a))
    wrong: dict[str, Any] = {"messages": ASKED, "template": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(RequestError, match="chat_template cannot be set by a request"):
        ask(engine, **wrong)
    with pytest.raises(RequestError, match="chat_template cannot be set by a request"):
        engine.num_tokens(TextRequest(**wrong))
    assert not run


def test_a_grammar_is_compiled_apart_from_the_texts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is written while one is compiled that takes long; then that is kept to."""
    begun, may_end = threading.Event(), threading.Event()
    grammar_begin = Grammar.begin

    def slow(self: Grammar, tokenizer: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return grammar_begin(self, tokenizer)

    with monkeypatch.context() as patch:
        patch.setattr(Grammar, "begin", slow)
        waits = begin(engine, 0, grammar=OBJECT, max_tokens=60)
        assert begun.wait(60)
        assert begin(engine, 1).wait().text
        may_end.set()
        assert json.loads(waits.wait().text).keys() == {"cat", "hat"}


PICK = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"which": {"enum": ["cat", "hat"]}},
            "required": ["which"],
        },
    },
}
TOOLS_TOO = CHAT_TEMPLATE + "{# <tool_call> tool_call.name #}"  # so that a parser is found
PREPARED: list[dict[str, Any]] = [
    {"tools": [PICK], "tool_choice": "required", "parallel_calls": False},
    {"tools": [PICK], "tool_choice": "pick"},
    {"tools": [PICK], "grammar": OBJECT},
    {"grammar": OBJECT},
    {
        "stop": ["e"],
        "penalties": {"logit_bias": {40: 3.0}},
        "prediction": TEXT,
        "seed": 3,
        "sampling": DRAWN,
    },
]
"""Requests for which something is made of the tokenizer or the model before the first token."""


def test_what_is_prepared_for_one_model_is_made_anew_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models of different vocabularies in turn: each request gets the text that it gets of a
    server that has only its model, whether it comes while the other model is loaded and idle, or
    while that one is written with."""
    monkeypatch.setattr(tiny_model_folder, "CHAT_TEMPLATE", TOOLS_TOO)
    special, merges = tiny_model_folder.SPECIAL, tiny_model_folder.MERGES
    vocabularies = {
        "small": ([*special, "<tool_call>", "</tool_call>"], merges[:1]),
        "large": (
            [*special, *map("<|{}|>".format, range(90)), "</tool_call>", "<tool_call>"],
            merges,
        ),
    }
    folders: dict[str, str] = {}
    alone: dict[str, list[Any]] = {}
    for name, (marks, pairs) in vocabularies.items():
        monkeypatch.setattr(tiny_model_folder, "SPECIAL", marks)
        monkeypatch.setattr(tiny_model_folder, "MERGES", pairs)
        folders[name] = str(write_model_folder(tmp_path / name, max_position_embeddings=4096))
        with running(folders[name], flags=with_flags()) as engine:
            alone[name] = [seen(ask(engine, max_tokens=60, **kind)) for kind in PREPARED]
    with running(folders["large"], flags=with_flags()) as engine:
        orders = ("small", "large", "small"), ("large", "small", "large")  # each begins anew
        for i, kind in enumerate(PREPARED):  # all wait while the one before is served
            order = orders[i % 2]
            clients = [submit(engine, max_tokens=60, model=folders[name], **kind) for name in order]
            for name, client in zip(order, clients, strict=True):
                assert seen(client.wait()) == alone[name][i], (name, kind)


def test_a_request_whose_model_is_freed_while_it_is_prepared_is_prepared_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of a model that was freed have no parts any more."""
    prepare = engine_module.prepare

    def freed_meanwhile(*args: Any) -> Any:
        if threading.current_thread() is started._thread:
            return prepare(*args)
        started.unload().result(60)
        raise AttributeError("'Model' object has no attribute 'model'")

    with running(folder, flags=with_flags()) as started:
        monkeypatch.setattr(engine_module, "prepare", freed_meanwhile)
        assert begin(started, 0).wait().text == plain(folder, prompt_of(0), 40)


def seen(text: Transcript) -> tuple[Any, ...]:
    """What a client sees of a text, but for the ids of its calls."""
    assert text.ended
    calls = [(call["name"], call["arguments"]) for call in text.calls]
    return text.text, calls, text.ended.reason


def test_log_probabilities_are_the_tokens_own(folder: Path, engine: Engine) -> None:
    """Those of the model, of the written token, alone and in a batch, and of an echoed prompt."""
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    prompt = tokenizer.encode(PROMPT)

    def check(tokens: list[int], given: list[Any]) -> None:
        logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0]
        rows = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for place, one in enumerate(given, start=len(tokens) - len(given)):
            assert one.token == tokens[place]
            if place:
                assert one.logprob == pytest.approx(rows[place - 1, one.token].item(), abs=2e-3)
                best = mx.max(rows[place - 1]).item()
                assert one.top[0][2] == pytest.approx(best, abs=2e-3)

    for beside in (0, 2):
        others = [begin(engine, i, max_tokens=200) for i in range(beside)]
        text = ask(engine, prompt=PROMPT, num_logprobs=2)
        check([*prompt, *(one.token for one in text.logprobs)], text.logprobs)
        for other in others:
            other.wait()
    for max_tokens in (0, 5):
        echoed = ask(engine, prompt=prompt, num_logprobs=1, echo=True, max_tokens=max_tokens)
        assert echoed.text.startswith(PROMPT)
        assert len(echoed.logprobs) == len(prompt) + max_tokens
        assert math.isnan(echoed.logprobs[0].logprob)
        check([one.token for one in echoed.logprobs], echoed.logprobs)
    assert ask(engine, prompt=PROMPT, echo=True).text.startswith(PROMPT)


def test_a_prompt_is_scored_no_further_for_a_client_that_left(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, score = list[int](), prompt_echo.token_logprob

    def leave(tokenizer: Any, token: int, *more: Any) -> Any:
        scored.append(token)
        for ticket in engine._tickets:
            ticket.cancel()
        return score(tokenizer, token, *more)

    monkeypatch.setattr(prompt_echo, "token_logprob", leave)
    with pytest.raises(ConnectionError):
        ask(engine, prompt=PROMPT, echo=True, num_logprobs=1)
    assert len(scored) == 1


def test_num_tokens_is_that_of_the_prompt_for_any_thread(engine: Engine) -> None:
    text = ask(engine)
    assert text.ended
    assert engine.num_tokens(TextRequest(messages=ASKED)) == text.ended.num_prompt


def test_the_process_may_end_at_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told, and what was learned is kept, while a model is loaded for minutes."""
    monkeypatch.setattr(engine_module, "GRACE", 0.1)
    loads, may_load, kept = threading.Event(), threading.Event(), list[bool]()
    load = Models.load

    def slow(self: Models, request: TextRequest) -> Any:
        if request.model:
            loads.set()
            assert may_load.wait(60)
        return load(self, request)

    monkeypatch.setattr(Models, "load", slow)
    monkeypatch.setattr(Models, "keep", lambda self: kept.append(True))
    with running(folder, flags=with_flags()) as engine:
        clients = [submit(engine, model="other", prompt=PROMPT), begin(engine, 0)]
        assert loads.wait(60)
        engine.end()
        num_kept = len(kept)
        may_load.set()
        for client in clients:
            with pytest.raises(ServerEndingError):
                client.wait()
        assert num_kept == 1


STATES = ["not started", "idle", "loading", "reading", "writing", "written together", "waiting"]


@pytest.mark.parametrize("state", STATES)
def test_stop_ends_it_in_every_state(
    state: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All who wait are told that the server ends, and so are those who come later."""
    settings = ServerSettings(model=str(folder), flags=with_flags(), prefill_step_size=16)
    engine = Engine(Models(settings), settings)
    clients: list[Client] = []
    if state == "loading":
        loads, may_load = threading.Event(), threading.Event()
        load = Models.load_default

        def slow(self: Models) -> Any:
            loads.set()
            assert may_load.wait(60)
            return load(self)

        monkeypatch.setattr(Models, "load_default", slow)
        starts = threading.Thread(target=engine.start)
        starts.start()
        assert loads.wait(60)
        clients.append(begin(engine, 0))
        threading.Timer(0.2, may_load.set).start()
    elif state != "not started":
        engine.start()
    if state == "reading":
        clients.append(begin(engine, 0, prompt=TEXT * 150))
        clients[0].next()
    if state in ("writing", "written together", "waiting"):
        number = 3 if state == "written together" else 1
        clients += [begin(engine, i, max_tokens=8000) for i in range(number)]
        for client in clients:
            client.until_text()
    if state == "waiting":
        clients.append(begin(engine, 5, model=str(folder.parent / "another")))
    engine.stop()
    if state == "loading":
        starts.join(60)
        assert not starts.is_alive()
    assert not engine.is_alive
    clients.append(begin(engine, 0))
    for client in clients:
        with pytest.raises(ServerEndingError):
            client.wait()
        assert isinstance(client.events[-1], Failed)
        assert sum(isinstance(event, Ended | Failed) for event in client.events) == 1
    engine.stop()


def test_what_cannot_be_served_is_said_by_start(folder: Path, tmp_path: Path) -> None:
    for settings, words in (
        (ServerSettings(model=str(tmp_path / "nobody")), "There is no folder"),
        (ServerSettings(model=str(folder), adapter_path=str(tmp_path)), "adapter_config.json"),
        (ServerSettings(model=str(folder), kv_bits=8), "kv_bits=8"),
    ):
        engine = Engine(Models(settings), settings)
        with pytest.raises((ValueError, OSError), match=words):
            engine.start()
        engine.stop()


def test_what_is_measured_once_is_measured_before_requests_come(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request takes as many passes as the next one like it, alone and beside another."""
    passes = [0]
    call = qwen2.Model.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        passes[0] += 1
        return call(self, *args, **kwargs)

    with monkeypatch.context() as patch, running(folder, flags=with_flags()) as engine:
        patch.setattr(qwen2.Model, "__call__", counted)
        counts = []
        for first in ("A", "B"):
            passes[0] = 0
            ask(engine, prompt=f"{first} cat", drafters=["prompt-lookup"], num_draft_tokens=2)
            settled(engine)
            counts.append(passes[0])
        assert counts[0] <= 26
        assert abs(counts[0] - counts[1]) <= 3, "texts differ, and so do their drafts"
        passes[0] = 0
        both = [submit(engine, prompt=f"{i} cat", drafters=["none"]) for i in range(2)]
        for client in both:
            client.wait()
        assert settled(engine).models.loaded is not None
        assert passes[0] <= 2 * 26
