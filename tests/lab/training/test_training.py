"""Training: what is learnt, how it goes on after a kill, and that what is saved loads."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import command_line
import specdec_mlx as sd
import tiny
from selection import cases, in_one_test
from specdec_mlx.cli.commands import main
from specdec_mlx.contracts import Features
from specdec_mlx.errors import HeadError, TrainingError
from specdec_mlx.lab.training import fitting, texts
from specdec_mlx.lab.training.features import Batch, Clock, FeatureStore, live_batch
from specdec_mlx.lab.training.fitting import LOSSES, Updates, loss_and_gradients
from specdec_mlx.lab.training.online import Bounds, learning_on
from specdec_mlx.lab.training.run import Data, Plan, train
from specdec_mlx.lab.training.texts import answers, learnt, padded, read_documents, read_prompts
from specdec_mlx.lab.training.trainees import KINDS, Recipe, Size, Trainee, mtp
from specdec_mlx.models.loading import load_model
from tiny_model_folder import write_model_folder

WORDS = "the tin hat on another ant then in the end an other hen ran on and on "
KL = LOSSES["forward-kl"]

Loaded = tuple[nn.Module, Any]
Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target as a folder, and texts beside it."""
    root = tmp_path_factory.mktemp("training")
    (root / "text.txt").write_text(WORDS * 40)
    (root / "prompts.txt").write_text("\n".join(f"{WORDS[i:]}" for i in range(0, 60, 5)))
    (root / "others.txt").write_text("\n".join(f"{WORDS[i:]}" for i in range(3, 60, 20)))
    return write_model_folder(root / "target", "qwen2")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    """That target and its tokenizer."""
    return load_model(folder)


def plan_for(folder: Path, kind: str, prompts: bool = False, **schedule: Any) -> Plan:
    """A few updates on the text beside a folder, or on what the target answers."""
    files = {name: (str(folder.parent / f"{name}.txt"),) for name in ("text", "prompts", "others")}
    data = Data(texts=files["text"], window=32)
    if prompts:
        data = Data(prompts=files["prompts"], held_out=files["others"], window=160)
    width = 16 if kind in ("eagle3", "draft") else None
    size = Size(mlp=16, heads=2, draft_vocab=64, width=width)
    return Plan(str(folder), kind, data, size, Updates(**{"steps": 6, "batch": 2, **schedule}))


@pytest.fixture(scope="module")
def trained(folder: Path, loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What a few updates on the text make of each kind, made once."""

    @cache
    def folder_of(kind: str) -> Path:
        out = tmp_path_factory.mktemp(kind)
        train(plan_for(folder, kind), *loaded, out)
        return out

    return folder_of


def weights_in(folder: Path) -> dict[str, mx.array]:
    found = mx.load(str(folder / "model.safetensors"))
    mx.eval(found)  # read before the file changes
    return found


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """Bit for bit."""
    alike = (mx.array_equal(x, other[name]).item() for name, x in one.items())
    return one.keys() == other.keys() and all(alike)


def report_in(folder: Path) -> Any:
    return json.loads((folder / "training.json").read_text())


def ids_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 200, shape).astype(np.int32)


def store_of(target: nn.Module, folder: Path, documents: list[Any], wanted: Features) -> Any:
    """Windows of documents, with what the target shows of them."""
    rows = np.stack([padded(document, max(map(len, documents))) for document in documents])
    return FeatureStore(target, folder, rows, wanted)


# Losses


FORWARD = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
BY_HAND = [("forward-kl", FORWARD), ("tv", 0.25), ("forward-kl+tv", FORWARD + 0.25)]


@in_one_test(("name", "expected"), BY_HAND)
def test_losses_are_what_the_formulas_give_by_hand_and_finite_with_their_gradients(name, expected):
    """For p = (1/2, 1/2), q = (1/4, 3/4); and with log-probabilities of -inf in p or q."""
    p, q = mx.log(mx.array([0.5, 0.5])), mx.log(mx.array([0.25, 0.75]))
    assert LOSSES[name](p, q).item() == pytest.approx(expected, abs=1e-6)
    p = nn.log_softmax(mx.array([[0.0, 1.0, -mx.inf], [0.0, 0.0, 0.0]]))
    logits = mx.array([[1.0, 0.0, 2.0], [200.0, 0.0, 0.0]])
    both = mx.value_and_grad(lambda x: LOSSES[name](p, nn.log_softmax(x)).sum())(logits)
    assert all(mx.isfinite(x).all().item() for x in (both[0], both[1][1]))


@in_one_test("kind", ["mtp", "eagle3"])
def test_training_sees_at_each_step_what_drafting_would_make(kind, loaded: Loaded):
    """Logits of each step, at all positions at once, are those of drafts drawn one by one."""
    target, tokens = loaded[0], ids_of(1, 7)
    batch = live_batch(target, (1,), mx.array(tokens))
    size = Size(mlp=16, heads=2, width=16 if kind == "eagle3" else None)
    trainee = KINDS[kind](Recipe(target, size, 3, tokens[0]))
    head, predictions = trainee.module, list(trainee.predictions(batch))
    text, rows = batch.tokens[0], head.rows(batch.features)[0]
    for begin in range(4):
        caches = head.make_cache()
        states = head.step(rows[: begin + 1], text[1 : begin + 2], caches)[-1:]
        for step, (predicted, first) in enumerate(predictions):
            assert first == 1 + step
            seen = trainee.logits(predicted)[0, begin]
            assert mx.allclose(seen, trainee.logits(states)[0], atol=1e-4).item()
            if step + 1 < len(predictions):
                place = begin + step + 2
                states = head.step(states, text[place : place + 1], caches)


# Resuming


@pytest.mark.parametrize("kind", cases(KINDS, "mtp"))
def test_a_training_that_is_killed_goes_on(kind, folder, tmp_path, monkeypatch, capsys):
    """After a checkpoint, with an update lost: bit for bit to what runs through gives."""
    monkeypatch.setattr(fitting, "SECONDS", -1.0)
    flags = ["--model", folder, "--kind", kind, "--texts", folder.parent / "text.txt"]
    flags += ["--steps", 6, "--batch", 2, "--window", 32, "--mlp", 16, "--heads", 2]
    flags += ["--width", 16] if kind in ("eagle3", "draft") else ["--loss", "forward-kl+tv"]
    honest, kept = fitting.keep, []

    def trained_to(name: str) -> int:
        return main([str(x) for x in ("train", *flags, "--out", tmp_path / name)])

    def killed(*args: Any) -> None:
        honest(*args)
        kept.append(args)
        if len(kept) == 2:
            raise KeyboardInterrupt

    assert trained_to("through") == 0
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "keep", killed)
        assert trained_to("killed") == 130
    said = capsys.readouterr()
    assert f"{tmp_path / 'through'}: on held-out text 0." in said.out
    assert re.search(r"windows takes about 0\.\d GB of memory", said.out)
    assert "On text that it is trained on: 0." in said.out
    assert f"kept in {tmp_path / 'killed'}: type the same command again, and" in said.err
    assert trained_to("killed") == 0
    assert same(weights_in(tmp_path / "through"), weights_in(tmp_path / "killed"))
    for name in ("through", "killed"):
        steps = [point["step"] for point in report_in(tmp_path / name)["curve"]]
        assert steps == [1, 2, 3, 4, 5, 6]
    assert not list(tmp_path.glob("*/checkpoint*"))


@pytest.mark.full
def test_nothing_is_made_twice(folder, loaded: Loaded, tmp_path, monkeypatch):
    """Features and answers of a shared folder, and a training that has ended."""
    plan, refuse = plan_for(folder, "medusa", prompts=True, steps=1), None
    found = train(plan, *loaded, tmp_path / "a", work=tmp_path / "w", keep_work=True)
    for name in ("features.read", "texts.batch_stream_generate"):
        monkeypatch.setattr(f"specdec_mlx.lab.training.{name}", refuse)
    train(plan, *loaded, tmp_path / "b", work=tmp_path / "w")
    assert not (tmp_path / "w").exists()
    monkeypatch.setattr("specdec_mlx.lab.training.run.fit", refuse)
    assert str(train(plan, *loaded, tmp_path / "a")) == str(found)
    with pytest.raises(TrainingError, match="kind was 'medusa' and is 'exit'"):
        train(replace(plan, kind="exit"), *loaded, tmp_path / "a")


# Data


def files_of(folder: Path, text: str, *lines: Any) -> list[str]:
    """A text file, and one of JSON lines."""
    (folder / "a.txt").write_text(text)
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return [str(folder / "a.txt"), str(folder / "b.jsonl")]


ASKED = {"role": "user", "content": "the tin"}
CHAT = [ASKED, {"role": "assistant", "content": "hat"}]


def test_files_of_all_formats_become_documents(tmp_path, loaded: Loaded):
    """Plain text, and mlx-lm's lines for fine-tuning; what a user said is read and not learnt."""
    tokenizer = loaded[1]
    lines = [{"text": "the tin"}, {"prompt": "on ", "completion": "the"}, {"messages": CHAT}]
    documents = list(read_documents(files_of(tmp_path, "the hat", *lines), tokenizer))
    read, taught = (
        [tokenizer.decode([token for token, yes in pairs if yes >= least]) for pairs in documents]
        for least in (0, 1)
    )
    assert [text.replace("<s>", "") for text in read[:3]] == ["the hat", "the tin", "on the"]
    assert [text.replace("<s>", "") for text in taught[:3]] == ["the hat", "the tin", "the"]
    assert "<|user|>the tin" in read[3]
    assert ("hat" in taught[3], "tin" in taught[3]) == (True, False)


def test_prompts_of_all_formats_end_where_the_answer_begins(tmp_path, loaded: Loaded):
    """A question a line, first turns, prompts, conversations with and without their answer."""
    lines = [{"turns": ["the tin", "on"], "id": "x"}, {"prompt": "the tin"}]
    lines += [{"messages": [ASKED]}, {"messages": CHAT}]
    prompts = read_prompts(files_of(tmp_path, "the tin\n\n", *lines), loaded[1])
    assert prompts == 5 * [loaded[1].apply_chat_template([ASKED], add_generation_prompt=True)]


@in_one_test(
    ("read", "good", "lines"),
    [
        (read_documents, '{"text": "a"}', ["[1]", '{"txt": "a"}', '{"messages": [{"role": "x"}]}']),
        (read_prompts, '{"prompt": "a"}', ["{", "[1]", '{"text": "a"}', '{"messages": []}']),
    ],
)
def test_a_line_that_cannot_be_used_is_named(read, good, lines, loaded: Loaded, tmp_path):
    for line in lines:
        (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
        with pytest.raises(TrainingError, match=r"a\.jsonl, line 2"):
            list(read([str(tmp_path / "a.jsonl")], loaded[1]))


def test_answers_are_the_targets_own_text_and_go_on_where_they_stopped(
    loaded: Loaded, tmp_path, monkeypatch
):
    """Greedy, to an end-of-text token or the window; after a kill only the others are written, and
    what has begun when the time is over is finished: no short answers for being short.
    """
    target, tokenizer = loaded
    ends = set(tokenizer.eos_token_ids)
    monkeypatch.setattr(texts, "ROWS", 4)
    prompts = [list(tokenizer.encode(WORDS[i:40])) for i in range(6)]
    todo = [(0, i, 0.0) for i in range(6)]

    def answered(name: str, is_time: Callable[[], bool] = lambda: False) -> Any:
        return answers(target, tokenizer, prompts, 60, todo, tmp_path / name, is_time)

    found = answered("a")
    assert list(found) == todo
    for (_, i, _), answer in found.items():
        room = 60 - len(prompts[i])
        greedy = [token.token for token in sd.speculate(target, prompts[i], max_tokens=room)]
        stop = next((n for n, token in enumerate(greedy, 1) if token in ends), room)
        assert answer == greedy[:stop]
    monkeypatch.setattr(texts, "ROWS", 2)
    cut = answered("b", iter([False] * 3 + [True] * 1000).__next__)
    assert 2 <= len(cut) < 6
    assert cut.items() <= found.items()
    lines = (tmp_path / "a").read_text().splitlines(keepends=True)
    (tmp_path / "a").write_text("".join(lines[:3]) + lines[3][:7])  # killed within a line
    asked: list[int] = []
    honest = texts.batch_stream_generate

    def noted(*args: Any, **options: Any) -> Any:
        asked.extend(args[3])
        return honest(*args, **options)

    monkeypatch.setattr(texts, "batch_stream_generate", noted)
    assert found == answered("a") == texts.stored(tmp_path / "a")
    assert len(asked) == 3


# Measuring


@pytest.mark.parametrize("kind", cases(["mtp", "medusa", "exit", "draft"], "medusa"))
def test_what_is_printed_is_what_drafting_keeps(kind, folder, loaded: Loaded, tmp_path):
    """Greedy drafting of the held-out answers: as many drafts, as many tokens kept of them."""
    target, tokenizer = loaded
    plan = plan_for(folder, kind, prompts=True, steps=30)
    printed = train(plan, *loaded, tmp_path)
    drafter: Any = load_model(tmp_path)[0] if kind == "draft" else tmp_path
    drafted, kept = 0, 0
    for prompt in read_prompts(plan.data.held_out, tokenizer):
        options: Any = {"num_draft_tokens": 3, "max_tokens": 160 - len(prompt)}
        text = sd.generate(target, tokenizer, prompt, drafter=drafter, **options)
        drafted += text.stats.drafted
        kept += text.stats.accepted
    assert printed.num_drafts > 20
    curve = report_in(tmp_path)["curve"]
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert kept / drafted == pytest.approx(printed.accepted_share, abs=0.03)


@pytest.mark.parametrize("kind", cases(KINDS, "mtp", "eagle3"))
def test_a_few_rows_at_a_time_give_the_loss_and_the_gradients_of_all(
    kind, folder, loaded: Loaded, tmp_path
):
    """Those of the formula, written down for all logits at once; prompts are not learnt."""
    target, tokenizer = loaded
    mx.random.seed(1)
    recipe = Recipe(target, plan_for(folder, kind).size, 3, np.arange(40), tokenizer)
    trainee, ids = KINDS[kind](recipe), ids_of(2, 15).tolist()
    documents = [learnt(ids[0], 4), learnt(ids[1][:11], 6)]
    learns = mx.array([[3 <= i < 14 for i in range(15)], [5 <= i < 10 for i in range(15)]])
    batch = store_of(target, tmp_path, documents, trainee.features).batch([0, 1])

    def formula(most: int | None = None) -> mx.array:
        """Mean over the positions that count of KL(p || q), in the weights of the steps."""
        logits = recipe.anatomy.logits(batch.features.head_input)
        if trainee.vocabulary is not None:
            logits = logits[..., trainee.vocabulary.ids]
        p = nn.log_softmax(logits)
        total, weights = mx.array(0.0), 0.0
        for step, (states, first) in enumerate(itertools.islice(trainee.predictions(batch), most)):
            place = slice(first, first + states.shape[1])
            q = nn.log_softmax(trainee.logits(states))
            kl = mx.sum(mx.exp(p[:, place]) * (p[:, place] - q), -1)
            counted = learns[:, place]
            total = total + 0.8**step * mx.sum(kl * counted) / counted.sum()
            weights += 0.8**step
        return total / weights

    for rows, most in ((3, None), (1000, None), (3, 1)):
        expected = nn.value_and_grad(trainee.module, formula)(most)
        trainee.rows_at_once = rows
        value, gradients = loss_and_gradients(trainee, batch, KL, most)
        assert value.item() == pytest.approx(expected[0].item(), abs=1e-5)
        theirs = dict(tree_flatten(expected[1]))
        for name, gradient in tree_flatten(gradients):
            assert mx.allclose(gradient, theirs[name], atol=1e-5, rtol=1e-4).item(), name


@pytest.mark.parametrize(("kind", "at_first"), [("mtp", 1), ("medusa", None)])
def test_a_head_that_reads_its_own_states_first_learns_the_first_token(
    kind, at_first, folder, loaded: Loaded, tmp_path, monkeypatch
):
    """Alone, in most updates: that is cheaper. Independent heads always learn all together."""
    update = Mock(return_value=0.0)
    monkeypatch.setattr(fitting, "update", update)
    train(plan_for(folder, kind, steps=10), *loaded, tmp_path)
    assert [call.args[4] for call in update.call_args_list] == [at_first] * 8 + [None] * 2


# Memory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainee, FeatureStore]:
    """A head for a target of many tokens, and windows for it."""
    target = tiny.build("llama", vocab_size=5000, num_hidden_layers=1, layer_types=None)
    documents = [learnt(row) for row in (25 * ids_of(4, 100)).tolist()]
    store = store_of(target, tmp_path_factory.mktemp("wide"), documents, Features())
    trainee = mtp(Recipe(target, Size(mlp=32, heads=2)))
    trainee.rows_at_once = 20
    return trainee, store


@pytest.mark.full
def test_the_memory_of_an_update_is_known_before(wide):
    """Within 30%; 400 rows take less than half of their logits more than four."""
    trainee, store = wide
    first, further = fitting.memory_of_updates(trainee, store, KL)

    def peak(batch: Batch) -> int:
        """Bytes in use while an update is made, by all of it."""
        optimizer = optim.AdamW(1e-3)
        optimizer.init(trainee.module.trainable_parameters())
        mx.eval(trainee.module.parameters(), optimizer.state)
        mx.reset_peak_memory()
        fitting.update(trainee, optimizer, batch, KL)
        return mx.get_peak_memory()

    batch = store.batch(list(range(4)))
    assert peak(batch) == pytest.approx(first + 3 * further, rel=0.3)
    assert peak(store.batch([0, 1])) == pytest.approx(first + further, rel=0.3)
    few = replace(batch, answered=batch.answered & (np.arange(100) == 99))
    assert peak(batch) - peak(few) < 0.5 * 400 * 5000 * 4


def test_an_update_that_does_not_fit_is_lowered_or_refused(wide, monkeypatch):
    """For a given time there are fewer windows in it; else what to lower is said."""
    fit = fitting.within_memory
    monkeypatch.setattr(fitting, "memory_of_updates", lambda *_: (10 * 2**30, 2**30))
    machine = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 2**30 // 4096}
    monkeypatch.setattr(fitting.os, "sysconf", machine.__getitem__)
    assert [
        fit(wide[0], wide[1], Updates(batch=b, minutes=m)).batch for b, m in ((3, None), (9, 1))
    ] == [
        3,
        3,
    ]
    with pytest.raises(TrainingError, match=r"takes about 19\.3 GB .*Lower --batch to 3"):
        fit(wide[0], wide[1], Updates(batch=9))
    machine["SC_PHYS_PAGES"] //= 2
    with pytest.raises(TrainingError, match="Lower --window or --draft-vocab"):
        fit(wide[0], wide[1], Updates(batch=9, minutes=1))


# Time


@pytest.mark.full
def test_minutes_are_for_all_of_it(folder, loaded: Loaded, tmp_path, monkeypatch):
    """By a clock that strikes whenever it is looked at: answers first, then updates."""
    now = iter(np.arange(0, 1000, 0.5).tolist())
    monkeypatch.setattr(Clock, "seconds", lambda self: next(now))
    (tmp_path / "many.txt").write_text("\n".join(f"{WORDS} {i}" for i in range(300)))
    plan = plan_for(folder, "medusa", prompts=True, minutes=3)
    data = replace(plan.data, prompts=(str(tmp_path / "many.txt"),))
    train(replace(plan, data=data), *loaded, tmp_path / "out", work=tmp_path / "w", keep_work=True)
    assert 180 <= next(now) < 190
    assert 30 < len(texts.stored(tmp_path / "w" / "answers.jsonl")) < 300
    curve = report_in(tmp_path / "out")["curve"]
    assert 7 <= len(curve) <= 9
    assert curve[-1]["tokens"] > curve[0]["tokens"] > 0


# Saving


@pytest.mark.parametrize("kind", cases(KINDS, "mtp", "exit"))
def test_what_is_saved_loads_and_is_lossless(kind, trained: Trained, loaded: Loaded):
    """Also as `--draft-model`: heads are told from models by their files; plain text each time."""
    (target, tokenizer), out = loaded, trained(kind)
    options: Any = {"prompt": tokenizer.encode(WORDS), "max_tokens": 40}
    plain = sd.generate(target, tokenizer, drafter=None, **options)
    drafter: Any = None
    if kind == "draft":
        drafter, theirs = load_model(out)
        assert theirs.get_vocab() == tokenizer.get_vocab()
    else:
        drafter = sd.load_head(out, target)
        assert str(out) in drafter.describe()
        suffixes = sorted(path.suffix for path in out.iterdir())
        assert suffixes == 3 * [".json"] + [".safetensors"]
        assert sd.generate(target, tokenizer, drafter=out, **options) == plain
    assert sd.generate(target, tokenizer, drafter=drafter, **options) == plain


def test_a_prediction_layer_may_choose_among_fewer_tokens(trained: Trained, loaded: Loaded):
    """It proposes those alone, when it is loaded too, and learns on with them."""
    target, out = loaded[0], trained("mtp")
    ids = weights_in(out)["d2t"] + mx.arange(64)
    head = sd.load_head(out, target).head
    assert "64 of 268 tokens" in head.notes()
    logits = head.logits(mx.random.normal((3, head.width)))
    assert sorted(mx.argsort(-logits[0])[:64].tolist()) == sorted(ids.tolist())
    assert mx.isinf(logits).sum().item() == 3 * (268 - 64)
    assert learning_on(out, target).trainer.trainee.vocabulary.ids.tolist() == ids.tolist()


@pytest.mark.parametrize("kind", cases(["mtp", "eagle3", "medusa", "exit"], "exit"))
def test_a_training_can_begin_with_a_head(kind, trained: Trained, folder, loaded: Loaded, tmp_path):
    """At a rate of 0 it stays what it was; another kind is refused, and another size."""
    plan = plan_for(folder, kind, learning_rate=0.0)
    further = replace(plan, init=str(trained(kind)))
    train(further, *loaded, tmp_path / "then")
    assert same(weights_in(trained(kind)), weights_in(tmp_path / "then"))
    other_kind = replace(further, kind="exit" if kind == "medusa" else "medusa")
    for other in (other_kind, replace(further, size=replace(plan.size, mlp=24, guesses=5))):
        with pytest.raises(TrainingError, match="no head of this kind and size"):
            train(other, *loaded, tmp_path / other.kind)


def test_an_exit_reads_a_text_at_once_and_token_by_token_alike(
    folder, loaded: Loaded, tmp_path, monkeypatch
):
    """With a cache after those of the target's layers; one that is not whole does not load."""
    monkeypatch.setattr("specdec_mlx.lab.training.trainees.EXIT_WINDOW", 6)
    train(plan_for(folder, "exit", learning_rate=0.1), *loaded, tmp_path)
    model = sd.load_head(tmp_path, loaded[0]).model
    text, cache = mx.arange(12)[None], make_prompt_cache(model)
    whole = model(text)
    parts = [slice(0, 5), *(slice(i, i + 1) for i in range(5, 12))]
    steps = mx.concatenate([model(text[:, part], cache=cache) for part in parts], axis=1)
    assert mx.allclose(steps, whole, atol=1e-4).item()
    for given, alike in (5, False), (6, True):
        cache = make_prompt_cache(model)
        model(text[:, :-given], cache=cache)
        cache[-1].trim(12)
        last = model(text[:, -given:], cache=cache)[:, -1]
        assert mx.allclose(last, whole[:, -1], atol=1e-4).item() == alike
    tensors = weights_in(tmp_path)
    del tensors["norm.weight"]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(HeadError, match=r"make no head that runs.*norm\.weight"):
        sd.load_head(tmp_path, loaded[0])


# Learning on; see also test_online


@pytest.mark.parametrize("kind", cases(["mtp", "eagle3", "medusa"], "medusa"))
def test_a_head_learns_from_each_text_and_stays_lossless(
    kind, trained: Trained, loaded: Loaded, tmp_path, monkeypatch
):
    """When it has ended; the text is the plain one each time, and what is saved loads."""
    target, tokenizer = loaded
    out = shutil.copytree(trained(kind), tmp_path / "out")
    drafter = learning_on(out, target, Bounds(learning_rate=3e-3, window=32))
    prompt, add, learnt = list(tokenizer.encode(WORDS)), drafter.trainer.add, list[list[int]]()
    noted = lambda tokens, num: (learnt.append(list(tokens)), add(tokens, num))  # noqa: E731
    monkeypatch.setattr(drafter.trainer, "add", noted)
    plain = [token.token for token in sd.speculate(target, prompt, max_tokens=30)]
    for length in (1, 30, 30):
        before = len(learnt)
        tokens = sd.speculate(target, prompt, drafter, max_tokens=30)
        text = [next(tokens).token]
        assert len(learnt) == before, "the first token of the next text waits for nothing"
        text += [token.token for token in itertools.islice(tokens, length - 1)]
        tokens.close()
        assert text == plain[:length]
        assert learnt[before:] == [prompt + text]
    losses = [drafter.trainer.learn() for _ in range(6)]
    assert losses[-1] < losses[0]
    drafter.save()
    assert not same(weights_in(trained(kind)), weights_in(out))
    assert sd.load_head(out, target)


# The command


@in_one_test(
    ("flags", "expected"),
    [
        (["--texts", "missing.txt"], "there is no file"),
        (["--window", "4000"], "too short for a window of 4000"),
        (["--temps", "-1"], "--temps: '-1': expected a number >= 0."),
        (["--temps", "1e40"], "expected a finite number >= 0: 0 for greedy"),
        (["--loss", "js"], "'js' is none of forward-kl"),
        (["--minutes", "0"], "expected an int >= 1"),
        (["--prompts", __file__], "not allowed with argument"),
        (["--kind", "exit", "--layers", "9"], "9 layers: expected a number from 1 to"),
        (["--kind", "eagle3", "--layers", "0,1,2"], "Layer 0 cannot be the first"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(flags, expected, folder, tmp_path):
    text, out = str(folder.parent / "text.txt"), str(tmp_path / flags[1])
    options = {"--model": str(folder), "--kind": "mtp", "--texts": text, "--out": out}
    options |= {"--window": "32", "--steps": "1", **dict(zip(flags[::2], flags[1::2], strict=True))}
    done = command_line.run("train", *(part for pair in options.items() for part in pair))
    assert done.returncode == 2
    assert expected in done.stderr
