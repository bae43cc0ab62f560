"""mlx-lm's own calls speculate once we are installed, and not before or after.

The second half is what mlx-lm's own tests check of its calls, with the plugin in force: on a tiny
model that is its own draft model, against the same call without it.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.models.cache import (
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.cli.commands import main
from specdec_mlx.errors import MlxLmVersionError
from specdec_mlx.mlx_lm_plugin import install, patched, uninstall
from specdec_mlx.sampling import read_sampler
from specdec_mlx.sequence import SHOWS_PROMPT
from tiny_model_folder import write_model_folder

steps: Any = importlib.import_module("mlx_lm.generate")
NAMES = ("generate_step", "speculative_generate_step", "batch_generate")
PROMPT = "the cat in the hat and the other cat in the hat"
WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}  # 32, a group of kv_bits
Pair = tuple[Any, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), **WIDE_HEADS)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """A model and its tokenizer."""
    return mlx_lm.load(str(folder))


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    """Every test leaves mlx-lm's names as they were."""
    before = dict(vars(steps))
    yield
    uninstall()
    assert vars(steps) == before


def stock(pair: Pair, prompt: Any = PROMPT, **options: Any) -> str:
    """The text of mlx-lm's own call."""
    return str(mlx_lm.generate(*pair, prompt, **{"max_tokens": 40} | options))


def test_a_stock_call_writes_the_same_text_in_fewer_passes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate and stream_generate, unchanged; the passes are counted in the model itself."""
    widths: list[int] = []
    kind = type(pair[0])
    call = kind.__call__

    def counted(self: Any, ids: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        widths.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    expected = stock(pair, max_tokens=80)
    passes = len(widths)
    with patched(num_draft_tokens=4):
        assert stock(pair, max_tokens=80) == expected  # probes and finds the vocabulary's size
        widths.clear()
        streamed = mlx_lm.stream_generate(*pair, PROMPT, max_tokens=80)
        assert "".join(response.text for response in streamed) == expected
    assert len(widths) < 0.8 * passes
    widths.clear()
    assert stock(pair, max_tokens=80) == expected
    assert len(widths) == passes


IN_ANOTHER_SERIES = f"""
import sys, mlx_lm, mlx_lm.models.cache, mlx_lm.utils
mlx_lm.__version__ = "0.31.2"
steps = sys.modules["mlx_lm.generate"]
del steps.speculative_generate_step
del mlx_lm.models.cache.LRUPromptCache
del mlx_lm.utils.does_model_support_input_embeddings
before = dict(vars(steps))
import specdec_mlx as sd
from specdec_mlx.errors import MlxLmVersionError
assert all(vars(steps)[name] is value for name, value in before.items())
try:
    sd.install()
except MlxLmVersionError:
    print(sd.generate(*mlx_lm.load(sys.argv[1]), {PROMPT!r}, max_tokens=40), end="")
"""


def test_importing_changes_nothing_and_needs_no_name_of_the_extension(
    folder: Path, pair: Pair
) -> None:
    """In a fresh process: a mlx-lm without what we replace is imported, used, and not extended."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_SERIES, folder], capture_output=True, text=True
    )
    assert done.stdout == stock(pair), done.stderr


def test_only_four_names_are_touched_and_restored_exactly(monkeypatch: Any) -> None:
    """Functions also where another module has them by name, one that comes later included."""
    early, late = ModuleType("early"), ModuleType("late")
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "late", late)
    early.generate_step = steps.generate_step  # type: ignore[attr-defined]
    before, package = dict(vars(steps)), dict(vars(mlx_lm))
    install()
    changed = {name for name, value in vars(steps).items() if before[name] is not value}
    assert changed == {*NAMES, "GenerationResponse"}
    for name in NAMES:
        assert inspect.signature(getattr(steps, name)) == inspect.signature(before[name])
    assert mlx_lm.batch_generate is steps.batch_generate is not before["batch_generate"]
    late.generate_step = steps.generate_step  # type: ignore[attr-defined]
    assert early.generate_step is late.generate_step  # type: ignore[attr-defined]
    uninstall()
    assert vars(steps) == before
    assert vars(mlx_lm) == package
    assert early.generate_step is late.generate_step is steps.generate_step  # type: ignore[attr-defined]
    uninstall()


def test_blocks_nest_and_the_inner_one_counts(pair: Pair) -> None:
    """Each block's account is of its own generations; install() counts where no block does."""
    outermost: Any = install(None)
    with patched("ngram", num_draft_tokens=2) as outer, patched(num_draft_tokens=4) as inner:
        stock(pair)
        assert inner.stats is not None
        assert (outer.stats, outermost.stats) == (None, None)
    stock(pair)
    assert outermost.stats.drafted == 0
    again: Any = install(num_draft_tokens=3)
    stock(pair)
    assert again.stats.drafted > 0


def test_blocks_may_overlap_in_threads(pair: Pair) -> None:
    """Entered and left in any order, from several threads, the names come back."""
    expected = stock(pair)

    def work(index: int) -> None:
        for _ in range(3):
            with patched(num_draft_tokens=index):
                pass

    with ThreadPoolExecutor(4) as pool, patched(num_draft_tokens=4):
        done = [pool.submit(work, index) for index in range(4)]
        assert stock(pair) == expected
    assert [each.exception() for each in done] == [None] * 4
    assert not any(hasattr(getattr(steps, name), "__wrapped__") for name in NAMES)


def test_what_others_put_over_ours_stays(pair: Pair) -> None:
    """Someone who wrapped our step keeps their wrapper; beneath it mlx-lm's own step runs again."""
    original = steps.generate_step
    install(num_draft_tokens=4)
    ours = steps.generate_step

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    steps.generate_step = theirs
    uninstall()
    assert steps.generate_step is theirs
    steps.generate_step = original
    assert theirs(mx.array([1]), pair[0]).gi_code is original(mx.array([1]), pair[0]).gi_code


def test_an_older_mlx_lm_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In calls and commands, before these begin."""
    for version in ("0.31.2", "0.30.0", "0.9"):
        monkeypatch.setattr(mlx_lm, "__version__", version)
        with pytest.raises(MlxLmVersionError, match=rf"{version} .*pip install 'mlx-lm>=0.31.3"):
            install()
    for command in ("generate", "chat", "benchmark"):
        assert main([command, "--help"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("specdec-mlx: mlx-lm 0.9 is older than 0.31.3")
        assert said.err.count("\n") == 1


def test_a_newer_mlx_lm_is_warned_of_and_refused_only_where_its_functions_differ(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    pair: Pair,
) -> None:
    """Once in a process, in calls and commands."""
    monkeypatch.setattr(mlx_lm, "__version__", "0.34.1.dev3")
    for _ in range(2):
        with patched():
            assert stock(pair, max_tokens=4)
    assert [r.message[:30] for r in caplog.records] == ["mlx-lm 0.34.1.dev3 is newer th"]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["generate", "--help"])
    original = steps.speculative_generate_step

    def changed(prompt: Any, model: Any, beams: int = 1) -> Any:
        return original(prompt, model)

    monkeypatch.setattr(steps, "speculative_generate_step", changed)
    capsys.readouterr()
    with pytest.raises(MlxLmVersionError, match=r"0\.34\.1.*takes beams.*pip install"):
        install()
    assert main(["generate", "--help"]) == 2
    assert "takes beams" in capsys.readouterr().err


def test_processors_see_as_much_of_a_prompt_as_the_installed_mlx_lm_shows(pair: Pair) -> None:
    """All of it from 0.32 on, its last token before; a penalty makes the difference."""
    model, tokenizer = pair
    processors = make_logits_processors(repetition_penalty=1.5, repetition_context_size=99)
    how = {"max_tokens": 40, "logits_processors": processors}
    expected = mlx_lm.generate(model, tokenizer, PROMPT, **how)
    assert str(sd.generate(model, tokenizer, PROMPT, **how)) == expected
    assert expected != mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=40)


def test_steps_and_names_that_are_not_known_are_refused_at_once() -> None:
    """When it is installed; also a step with a parameter that we would not carry out."""

    def generate_step(prompt: Any, model: Any, stream: Any = None, *, beams: int = 1) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "generate_step", generate_step)
        for module, words in ((steps.__name__, "takes beams"), ("other", "by one of other")):
            generate_step.__module__ = module
            with pytest.raises(MlxLmVersionError, match=words):
                install()
    for name in ("drafter", "rule", "num_draft_tokens"):
        with pytest.raises(sd.errors.UnknownNameError, match=f"{name}.*'nothing'"):
            install(**{name: "nothing"})


@in_one_test("given", [sd.NGramDrafter(), "prompt-lookup:min_ngram=2", None])
def test_draft_model_takes_a_drafter_a_name_or_a_model(given: Any, pair: Pair) -> None:
    """In stock calls, with num_draft_tokens as the draft length."""
    drafter = given or tiny.build("qwen2", seed=7, vocab_size=pair[0].args.vocab_size)
    expected = stock(pair)
    with patched(None) as speculation:
        assert stock(pair, draft_model=drafter, num_draft_tokens=3) == expected
    assert speculation.stats is not None
    assert len(speculation.stats.drafted_at) == 3


def test_mlxs_own_seed_is_one_text_with_any_draft_of_a_model(pair: Pair) -> None:
    """`mx.random.seed` is how mlx-lm's calls are given a seed."""
    small = tiny.build("qwen2", seed=7, vocab_size=pair[0].args.vocab_size)

    def text(drafter: Any, length: int = 0, **options: Any) -> str:
        mx.random.seed(7)
        with patched(drafter, num_draft_tokens=length) as speculation:
            said = stock(pair, sampler=make_sampler(1.0), **options)
        assert speculation.stats is not None
        assert (speculation.stats.drafted > 0) == (length > 0 or len(options) > 0)
        return said

    expected = text(None)
    assert text(small, 2) == text(small, 5) == expected
    assert text(None, draft_model=small, num_draft_tokens=3) == expected


@in_one_test("is_model", [False, True])
def test_turns_on_one_cache_equal_a_fresh_run_of_the_conversation(
    is_model: bool, pair: Pair
) -> None:
    """The drafter sees the earlier turns too: it copies from them."""
    model, tokenizer = pair
    caches = make_prompt_cache(model)
    said: list[int] = []
    drafting: Any = sd.ModelDrafter(model) if is_model else "prompt-lookup"
    with patched(drafting, num_draft_tokens=4) as speculation:
        for turn in (tokenizer.encode(text) for text in (PROMPT, "again", "and again")):
            fresh = steps.generate_step.__wrapped__(mx.array(said + turn), model, max_tokens=30)
            expected = [token for token, _ in fresh]
            options = {"max_tokens": 30, "prompt_cache": caches}
            stream = mlx_lm.stream_generate(model, tokenizer, turn, **options)
            answer = [response.token for response in stream]
            assert answer == expected[: len(answer)]
            assert len(answer) == 30 or answer[-1] in tokenizer.eos_token_ids
            said += turn + answer
            assert speculation.stats is not None
            assert speculation.stats.acceptance_rate == 1 or not is_model
    assert {cache.offset for cache in caches} == {len(said)}


def test_a_host_that_reads_the_prompt_itself_names_it(pair: Pair) -> None:
    """Then stock calls draft from all of it; the text is the same, and what nobody named is told.
    Earlier turns need no name.
    """
    model, tokenizer = pair
    prompt = tokenizer.encode(PROMPT)
    expected, said = stock(pair, prompt), {}
    with patched("prompt-lookup:min_ngram=1", num_draft_tokens=4) as speculation:
        assert stock(pair, prompt, prompt_cache=make_prompt_cache(model)) == expected
        whole: Any = speculation.stats
        for is_named in (False, True):
            caches = make_prompt_cache(model)
            model(mx.array([prompt[:-1]]), cache=caches)
            named = {"history": prompt[:-1]} if is_named else {}
            assert stock(pair, prompt[-1:], prompt_cache=caches, **named) == expected
            stats: Any = speculation.stats
            said[is_named] = stats
            assert stats.num_unnamed == (0 if is_named else len(prompt) - 1)
            stock(pair, [3], prompt_cache=caches, max_tokens=2)
            assert speculation.stats.num_unnamed == stats.num_unnamed  # type: ignore[union-attr]
    assert said[True].rounds == whole.rounds
    assert said[False].accepted < whole.accepted


def test_an_accepted_draft_is_marked_whether_or_not_a_draft_model_was_named(pair: Pair) -> None:
    """As many as were accepted; of two streams in turn, each its own."""
    expected = list(mlx_lm.stream_generate(*pair, PROMPT, max_tokens=40))
    assert not any(response.from_draft for response in expected)
    with patched("prompt-lookup:min_ngram=1", num_draft_tokens=4) as speculation:
        got = list(mlx_lm.stream_generate(*pair, PROMPT, max_tokens=40))
        assert [r.token for r in got] == [r.token for r in expected]
        stats: Any = speculation.stats
        marked = [response.from_draft for response in got]
        assert sum(marked) == stats.accepted - stats.cut > 0
        streams = [mlx_lm.stream_generate(*pair, PROMPT, max_tokens=40) for _ in range(2)]
        for one, other, is_marked in zip(*streams, marked, strict=True):
            assert one.from_draft == other.from_draft == is_marked
        with patched(None):
            plain = list(mlx_lm.stream_generate(*pair, PROMPT, max_tokens=40))
            assert not any(response.from_draft for response in plain)


PROMPTS = [PROMPT, "the rain in the hat, the rain", "a", "and the other cat and the cat"]


@pytest.mark.filterwarnings("ignore:specdec_mlx. this model")  # on mlx 0.31: one by one, and so
def test_a_stock_batch_writes_the_same_texts_in_fewer_passes(pair: Pair) -> None:
    """Wherever its name was taken from; with options that a batch of ours does not know, and for
    no drafter, it is mlx-lm's own.
    """
    model, tokenizer = pair
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    caches = make_prompt_cache(model)
    list(steps.generate_step(mx.array(prompts[0]), model, max_tokens=0, prompt_cache=caches))
    given: list[dict[str, Any]] = [
        {"max_tokens": 30},
        {"max_tokens": [5, 30, 12, 1], "prefill_batch_size": 2, "completion_batch_size": 2},
        {"max_tokens": 30, "prompt_caches": [caches] * 4, "return_prompt_caches": True},
        {"max_tokens": 30, "sampler": make_sampler(0.0), "prefill_step_size": 4},
    ]
    for options in given:
        expected = mlx_lm.batch_generate(model, tokenizer, prompts, **options)
        with patched(num_draft_tokens=4) as speculation:
            got = mlx_lm.batch_generate(model, tokenizer, prompts, **options)
        assert got.texts == expected.texts
        assert speculation.stats is not None
        assert sum(stats.accepted for stats in got.speculation) > 0
        assert (got.caches is None) == (expected.caches is None)
    for drafter, options in ((None, {}), ("auto", {"max_kv_size": 64})):
        with patched(drafter) as speculation:
            got = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=9, **options)
        assert speculation.stats is None
        expected = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=9, **options)
        assert got.texts == expected.texts
    with patched(), pytest.raises(TypeError, match="missing"):
        mlx_lm.batch_generate(model)


UNSEEN = """
import sys, specdec_mlx as sd, mlx_lm
from mlx_lm.generate import generate_step as a_name_of_its_own
model, tokenizer = mlx_lm.load(sys.argv[1])
sd.install()
if sys.argv[2] == "seen":
    mlx_lm.generate(model, tokenizer, "the cat", max_tokens=3)
else:
    import mlx.core as mx
    list(a_name_of_its_own(mx.array([1, 2]), model, max_tokens=3))
if sys.argv[2] == "twice":
    sd.uninstall()
    sd.install()
"""


@pytest.mark.full
@in_one_test("how", ["seen", "unseen", "twice"])
def test_a_host_that_cannot_be_reached_is_told_once(how: str, folder: Path) -> None:
    """At the end of the process, or of the installation."""
    command = [sys.executable, "-c", UNSEEN, str(folder), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no generation was seen") == (how != "seen")


@in_one_test(
    "arguments",
    [
        {"temp": 0.0},
        {"temp": 0.5, "min_p": 0.1, "min_tokens_to_keep": 3},
        {"temp": 0.8, "xtc_probability": 0.4, "xtc_threshold": 0.2, "xtc_special_tokens": [1, 2]},
        {
            "temp": 0.8,
            "top_p": 0.9,
            "min_p": 0.05,
            "top_k": 20,
            "xtc_probability": 0.1,
            "xtc_threshold": 0.1,
        },
    ],
)
def test_the_law_of_mlx_lms_samplers_is_read_back(arguments: dict[str, Any]) -> None:
    """From the closure alone, whatever it was made with."""
    law = read_sampler(make_sampler(**arguments))
    assert law == sd.Sampling(**arguments)
    assert read_sampler(law) is law


def test_other_samplers_have_no_known_law() -> None:
    """Strangers, wrappers, and closures that look alike are taken as they are."""
    changed = make_sampler(temp=1.0, top_p=0.5)
    methods = changed.__closure__[changed.__code__.co_freevars.index("sampling_methods")]
    methods.cell_contents.append(lambda x: x)
    sampling_methods: list[Any] = []

    def alike(logprobs: mx.array, temp: float = 1.0) -> mx.array:
        return mx.argmin(logprobs + temp, axis=len(sampling_methods) - 1)

    alike.__module__ = changed.__module__
    for sampler in (lambda x: changed(x), mx.argmax, alike, len, changed):
        assert read_sampler(sampler) is None
    assert read_sampler(None) == sd.Sampling()


# What mlx-lm's own tests check


def with_plugin(pair: Pair, prompt: Any = PROMPT, **options: Any) -> str:
    """The text with it, which was drafted but for windows that keep their first tokens."""
    with patched(pair[0], num_draft_tokens=3) as speculation:
        text = stock(pair, prompt, **options)
        assert speculation.stats.accepted > 0 or "max_kv_size" in options
    return text


def test_a_processor_has_seen_all_of_the_text(pair: Pair) -> None:
    """The prompt at first; one more token a call; the last one in the end."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    prompt = pair[1].encode(PROMPT)
    options: dict[str, Any] = {"max_tokens": 9, "logits_processors": [processor]}
    with patched(pair[0], num_draft_tokens=3):
        got = [r.token for r in mlx_lm.stream_generate(*pair, prompt, **options)]
    shown = prompt if SHOWS_PROMPT else prompt[-1:]
    assert seen == [shown + got[:n] for n in range(10)]


def test_input_embeddings_stand_for_the_prompt(pair: Pair) -> None:
    """In chunks, with progress for each; without a prompt there is nothing to draft."""
    ids = mx.array(pair[1].encode(PROMPT))
    progress: list[tuple[int, int]] = []
    options: dict[str, Any] = {
        "input_embeddings": pair[0].model.embed_tokens(ids),
        "prefill_step_size": 5,
        "prompt_progress_callback": lambda done, total: progress.append((done, total)),
    }
    assert with_plugin(pair, ids, **options) == stock(pair)
    assert progress[-1] == (len(ids), len(ids))
    assert len(progress) >= len(ids) / 5
    with patched(pair[0]):
        assert stock(pair, mx.array([], mx.uint32), **options) == stock(pair)
        with pytest.raises(ValueError, match="does not support input embeddings"):
            nothing = mx.zeros((2, 64))
            next(steps.generate_step(mx.array([1]), tiny.build("mamba"), input_embeddings=nothing))


@in_one_test("window", [None, 500])
def test_a_prompt_cache_is_reused(window: int | None, pair: Pair, tmp_path: Path) -> None:
    """Turn by turn, and trimmed back to try another answer, and through a file."""
    first, second = pair[1].encode(PROMPT), pair[1].encode(" and again the hat")
    caches: list[Any] = make_prompt_cache(pair[0])
    if window is not None:
        caches = [RotatingKVCache(window) for _ in caches]
    file = str(tmp_path / "cache.safetensors")
    with patched(pair[0], num_draft_tokens=3):
        mlx_lm.generate(*pair, first, max_tokens=1, prompt_cache=caches)
    assert {c.offset for c in caches} == {len(first) + 1}
    assert trim_prompt_cache(caches, 1) == 1
    save_prompt_cache(file, caches)
    for again in (load_prompt_cache(file), caches):
        assert with_plugin(pair, second, prompt_cache=again) == stock(pair, first + second)
        assert {c.offset for c in again} == {len(first + second) + 40}
