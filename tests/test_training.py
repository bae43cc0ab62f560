"""Training: what is learnt, how it goes on after a kill, and that what is saved loads."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import command_line
import specdec_mlx as sd
from selection import cases
from specdec_mlx.bench.heads import compare, format_rows
from specdec_mlx.drafters.heads.early_exit import ExitDrafter
from specdec_mlx.drafters.heads.mtp import MTPHead
from specdec_mlx.drafters.heads.target_ends import target_ends
from specdec_mlx.errors import HeadError, TrainingError
from specdec_mlx.models import load_model
from specdec_mlx.training import fitting, losses
from specdec_mlx.training.continuations import continuations, write
from specdec_mlx.training.features import FeatureStore, live_batch
from specdec_mlx.training.fitting import Schedule, batch_indices
from specdec_mlx.training.measuring import measure
from specdec_mlx.training.one_pass import DraftTrainee
from specdec_mlx.training.online import Bounds, learning_on
from specdec_mlx.training.recursive import (
    Eagle3Trainee,
    MTPTrainee,
    RecursiveTrainee,
    draft_mask,
    frequent_tokens,
    stored_ids,
)
from specdec_mlx.training.run import KINDS, Data, Plan, train
from specdec_mlx.training.texts import read_documents, windows_of
from specdec_mlx.training.trainees import Size
from specdec_mlx.types import FeatureRows, Features
from tiny_model_folder import write_model_folder

WORDS = "the tin hat on another ant then in the end an other hen ran on and on "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target as a folder, and a text beside it."""
    root = tmp_path_factory.mktemp("training")
    (root / "text.txt").write_text(WORDS * 40)
    return write_model_folder(root / "target", "qwen2")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[nn.Module, Any]:
    """That target and its tokenizer."""
    return load_model(folder)


def plan_for(folder: Path, kind: str, **schedule: Any) -> Plan:
    """A few updates on the text beside a folder."""
    return Plan(
        str(folder),
        kind,
        Data((str(folder.parent / "text.txt"),), window=32, continuations=3, opening=8),
        Size(mlp=16, heads=2, draft_vocab=64, width=16 if kind in ("eagle3", "draft") else None),
        Schedule(**{"steps": 6, "batch": 2, "checkpoint": 2, "evaluate": 4, **schedule}),
    )


# Losses


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("forward-kl", 0.5 * math.log(2) + 0.5 * math.log(2 / 3)),
        ("reverse-kl", 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2)),
        ("tv", 0.25),
        ("forward-kl+tv", 0.5 * math.log(2) + 0.5 * math.log(2 / 3) + 0.25),
    ],
)
def test_losses_are_what_the_formulas_give_by_hand(name: str, expected: float) -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4)."""
    p, q = mx.log(mx.array([0.5, 0.5])), mx.log(mx.array([0.25, 0.75]))
    assert losses.divergence(name)(p, q).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", losses.LOSSES)
def test_losses_and_their_gradients_are_finite_where_a_distribution_is_zero(name: str) -> None:
    """A target with filters, or a draft that is sure, has log-probabilities of -inf."""
    p = nn.log_softmax(mx.array([[0.0, 1.0, -mx.inf], [0.0, 0.0, 0.0]]))
    logits = mx.array([[1.0, 0.0, 2.0], [200.0, 0.0, 0.0]])

    def loss(x: mx.array) -> mx.array:
        return losses.divergence(name)(p, nn.log_softmax(x)).sum()

    value, gradient = mx.value_and_grad(loss)(logits)
    if name != "reverse-kl":  # which is infinite here: q has mass where p has none
        assert math.isfinite(value.item())
    assert mx.isfinite(gradient[1]).all().item()


def test_a_loss_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'js': expected forward-kl, reverse-kl, tv"):
        losses.parse_loss("forward-kl+js")


# Recursion


def test_a_row_sees_true_entries_up_to_its_drafts_begin_and_then_its_own_draft() -> None:
    """Third step, four positions: entries of the first, second and third step side by side."""
    first = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    second = [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    third = np.eye(4, dtype=int)
    expected = np.concatenate([first, second, third], axis=1)
    assert np.array(draft_mask(4, 2)).astype(int).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_training_sees_at_each_step_what_drafting_would_make(
    kind: str, loaded: tuple[nn.Module, Any]
) -> None:
    """Logits of each step, at all positions at once, are those of drafts drawn one by one."""
    target = loaded[0]
    tokens = np.random.default_rng(0).integers(0, 200, (1, 7)).astype(np.int32)
    batch = live_batch(target, (1,), mx.array(tokens))
    ends = target_ends(target)
    trainee: RecursiveTrainee = MTPTrainee(ends, Size(mlp=16, heads=2), 3)
    if kind == "eagle3":
        trainee = Eagle3Trainee(ends, Size(width=16, heads=2), 3, tokens)
    predictions = list(trainee.predictions(batch))
    text = batch.tokens[0]
    rows = trainee.head.rows(batch.features)[0]
    for begin in range(4):
        caches = trainee.head.make_cache()
        states = trainee.head.step(rows[: begin + 1], text[1 : begin + 2], caches)[-1:]
        for step, (logits, first) in enumerate(predictions):
            assert first == 1 + step
            seen = logits[0, begin]
            assert mx.allclose(seen, trainee.logits(states)[0], atol=1e-4).item()
            if step + 1 < len(predictions):
                place = begin + step + 2
                states = trainee.head.step(states, text[place : place + 1], caches)


# Alignment


class PairTarget(nn.Module):  # type: ignore[misc]
    """A target whose next token depends on the last two: its state holds both, one after the other.

    A head that is given the state at a position and the token behind it knows all that decides the
    token after that; with the state of another position it does not.
    """

    SIZE = 12

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(self.SIZE, 2 * self.SIZE)
        self.embed_tokens.weight = mx.eye(self.SIZE, 2 * self.SIZE)
        self.layers = [Remember(self.SIZE)]
        self.lm_head = nn.Linear(2 * self.SIZE, self.SIZE, bias=False)
        key = mx.random.key(3)
        self.lm_head.weight = 4 * mx.random.normal((self.SIZE, 2 * self.SIZE), key=key)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        cache = cache or [KVCache()]
        logits: mx.array = self.lm_head(self.layers[0](self.embed_tokens(tokens), cache[0]))
        return logits


class Remember(nn.Module):  # type: ignore[misc]
    """Adds the token before, in the second half of the state."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __call__(self, x: mx.array, cache: Any) -> mx.array:
        kept, _ = cache.update_and_fetch(x[:, None], x[:, None])
        padded = mx.pad(kept[:, 0], [(0, 0), (1, 0), (0, 0)])[:, -1 - x.shape[1] : -1]
        return x + mx.roll(padded, self.size, -1)


class Letters:
    """The tokenizer of `PairTarget`: a letter is a token."""

    eos_token_id = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize("shift", [0, 1, -1])
def test_a_head_learns_a_simple_target_unless_its_features_are_shifted(
    shift: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly all drafts are accepted while generating; with states of another position few are."""
    letters = np.random.default_rng(0).integers(0, PairTarget.SIZE, 4000)
    (tmp_path / "a.txt").write_text("".join(chr(ord("a") + i) for i in letters))
    target = PairTarget()
    plan = Plan(
        "pairs",
        "mtp",
        Data((str(tmp_path / "a.txt"),), window=32),
        Size(mlp=24, heads=1),
        Schedule(steps=250, learning_rate=1e-2, evaluate=1000),
        num_steps=1,
    )
    honest = MTPHead.rows

    def shifted(head: MTPHead, features: FeatureRows) -> mx.array:
        return mx.roll(honest(head, features), shift, -2)

    with monkeypatch.context() as patch:
        patch.setattr(MTPHead, "rows", shifted)
        train(plan, target, Letters(), tmp_path / "out")
    head = sd.load_head(tmp_path / "out", target)
    tokens = list(
        sd.speculate(
            target,
            [1, 2, 3],
            head,
            sampler=sd.Sampling(temp=1.0),
            draft_length=1,
            max_tokens=300,
            seed=0,
        )
    )
    origins = [token.origin for token in tokens]
    accepted = origins.count("draft") / (origins.count("draft") + origins.count("correction"))
    assert accepted > 0.95 if shift == 0 else accepted < 0.8, accepted


# Resuming


@pytest.mark.parametrize("kind", cases(KINDS, "mtp"))
def test_a_training_that_is_killed_goes_on_to_the_same_weights(
    kind: str,
    folder: Path,
    loaded: tuple[nn.Module, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed behind a checkpoint, with an update lost: bit for bit what runs through gives."""
    plan = plan_for(folder, kind)
    train(plan, *loaded, tmp_path / "through")
    honest = fitting.keep
    kept = []

    def killed(*args: Any) -> None:
        honest(*args)
        kept.append(args)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(fitting, "keep", killed)
        train(plan, *loaded, tmp_path / "killed")
    train(plan, *loaded, tmp_path / "killed")
    through, killed_once = (
        mx.load(str(tmp_path / name / "model.safetensors")) for name in ("through", "killed")
    )
    assert through.keys() == killed_once.keys()
    assert all(mx.array_equal(x, killed_once[name]).item() for name, x in through.items())
    curves = [
        json.loads((tmp_path / name / "training.json").read_text())["curve"]
        for name in ("through", "killed")
    ]
    assert (
        [point["step"] for point in curves[0]] == [point["step"] for point in curves[1]] == [4, 6]
    )


def test_a_training_does_not_go_on_with_other_settings(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """The setting is named, with both values."""
    plan = plan_for(folder, "exit", steps=1)
    train(plan, *loaded, tmp_path)
    with pytest.raises(TrainingError, match="kind was 'exit' and is 'medusa'"):
        train(replace(plan, kind="medusa"), *loaded, tmp_path)


def test_features_and_continuations_are_not_made_twice(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings share a folder of work: the second runs no pass of the target for it."""
    train(plan_for(folder, "medusa"), *loaded, tmp_path / "a", work=tmp_path / "w", keep_work=True)
    for name in ("training.features.read", "training.continuations.write"):
        monkeypatch.setattr(f"specdec_mlx.{name}", refuse)
    train(plan_for(folder, "medusa"), *loaded, tmp_path / "b", work=tmp_path / "w")
    assert not (tmp_path / "w").exists()


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("made twice")


def test_every_window_is_seen_once_before_any_comes_again() -> None:
    seen = [i for step in range(6) for i in batch_indices(step, 3, 9, seed=1)]
    assert sorted(seen[:9]) == sorted(seen[9:]) == list(range(9))
    assert seen[:9] != seen[9:]


# Data


def test_files_of_all_formats_become_documents(tmp_path: Path, loaded: tuple[Any, Any]) -> None:
    """Plain text, and mlx-lm's lines for fine-tuning."""
    tokenizer = loaded[1]
    lines = [
        {"text": "the tin"},
        {"prompt": "on ", "completion": "the"},
        {"messages": [{"role": "user", "content": "tin"}]},
    ]
    (tmp_path / "a.txt").write_text("the hat")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    read = list(read_documents([tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer))
    texts = [tokenizer.decode(ids) for ids in read]
    assert [text.replace("<s>", "") for text in texts[:3]] == ["the hat", "the tin", "on the"]
    assert "<|user|>tin" in texts[3]


def test_windows_follow_each_other() -> None:
    assert windows_of(np.arange(7), 3, 2).tolist() == [[0, 1, 2], [2, 3, 4], [4, 5, 6]]


def test_continuations_are_the_targets_own_text(
    loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """Greedy rows are its greedy text; each group of rows is drawn alike when made alone."""
    target = loaded[0]
    openings = np.array([[5, 6, 7]] * 34, np.int32)
    rows = continuations(target, openings, 12, [0.0, 1.0], tmp_path)
    greedy = sd.speculate(target, [5, 6, 7], max_tokens=9)
    assert rows[0, 3:].tolist() == [token.token for token in greedy]
    again = write(target, openings[32:], 12, [0.0, 1.0], seed=32)
    assert rows[32:].tolist() == again.tolist()
    assert rows[1].tolist() != rows[3].tolist()


def test_the_frequent_tokens_make_the_draft_vocabulary() -> None:
    """In their own order; what never occurs fills up from below."""
    assert frequent_tokens(np.array([9, 9, 4, 4, 7]), 2).tolist() == [4, 9]
    assert frequent_tokens(np.array([3, 3]), 3).tolist() == [0, 1, 3]


def test_ids_of_layers_are_stored_so_that_they_are_read_as_they_were() -> None:
    from specdec_mlx.drafters.heads.eagle import output_layers

    for layers in [(1, 2, 3), (2, 5, 7), (3, 4, 5)]:
        assert output_layers(stored_ids(layers)) == layers


# Measuring


def test_a_draft_model_that_is_the_target_is_always_accepted(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """Greedy 1, and sum(min(p, q)) = 1 but for 16 bits of the features; another model is not."""
    target, tokenizer = loaded
    ids = np.random.default_rng(0).integers(0, 200, (3, 16)).astype(np.int32)
    store = FeatureStore(tmp_path, ids, Features())
    store.fill(target)
    ends = target_ends(target)
    found = measure(DraftTrainee.of(str(folder), ends), store)
    assert found.greedy[0] == 1
    assert found.sampled[0] == pytest.approx(1, abs=0.01)
    assert found.num_positions == 3 * 8
    assert measure(DraftTrainee.new(ends, Size(), tokenizer), store).sampled[0] < 0.9


# Saving


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "medusa", "exit"])
def test_saved_heads_load_and_are_lossless(
    kind: str, folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """Also as `--draft-model`: they are told from models by their files, and give plain text."""
    target, tokenizer = loaded
    train(plan_for(folder, kind), *loaded, tmp_path)
    drafter = sd.load_head(tmp_path, target)
    prompt = tokenizer.encode(WORDS)
    plain = sd.generate(target, tokenizer, prompt, drafter=None, max_tokens=40)
    account = sd.generate(target, tokenizer, prompt, draft_model=drafter, max_tokens=40)
    assert account == plain
    assert str(tmp_path) in drafter.describe()
    assert sd.generate(target, tokenizer, prompt, draft_model=tmp_path, max_tokens=40) == plain
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("kind", cases(["mtp", "eagle3", "medusa", "exit"], "mtp", "exit"))
def test_a_training_can_begin_with_a_head(
    kind: str, folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """At a rate of 0 it stays what it was; another kind is refused, and another size."""
    plan = plan_for(folder, kind)
    train(plan, *loaded, tmp_path / "first")
    further = replace(
        plan, init=str(tmp_path / "first"), schedule=replace(plan.schedule, learning_rate=0.0)
    )
    train(further, *loaded, tmp_path / "then")
    first, then = (
        mx.load(str(tmp_path / name / "model.safetensors")) for name in ("first", "then")
    )
    assert all(mx.array_equal(x, then[name]).item() for name, x in first.items())
    others = [
        replace(further, kind="exit" if kind == "medusa" else "medusa"),
        replace(further, size=replace(plan.size, mlp=24, guesses=5)),
    ]
    for i, other in enumerate(others):
        with pytest.raises(TrainingError, match="no head of this kind and size"):
            train(other, *loaded, tmp_path / f"other-{i}")


@pytest.mark.parametrize("missing", ["mlp.up_proj.weight", "norm.weight"])
def test_an_exit_that_is_not_whole_is_refused(
    missing: str, folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    train(plan_for(folder, "exit"), *loaded, tmp_path)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    del tensors[missing]
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    with pytest.raises(HeadError, match=rf"(?s)no complete exit.*{re.escape(missing)}"):
        sd.load_head(tmp_path, loaded[0])


def test_an_exit_reads_a_text_at_once_and_token_by_token_alike(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a cache behind those of the target's layers, and looks at the last tokens."""
    target, _ = loaded
    monkeypatch.setattr("specdec_mlx.training.one_pass.EXIT_WINDOW", 6)
    train(plan_for(folder, "exit", learning_rate=0.1), *loaded, tmp_path)
    drafter = sd.load_head(tmp_path, target)
    assert isinstance(drafter, ExitDrafter)
    text = mx.arange(12)[None]
    cache = make_prompt_cache(drafter.model)
    assert len(cache) == len(drafter.model.layers) + 1
    steps = [drafter.model(text[:, :5], cache=cache)]
    steps += [drafter.model(text[:, i : i + 1], cache=cache) for i in range(5, 12)]
    whole = drafter.model(text)
    assert mx.allclose(mx.concatenate(steps, axis=1), whole, atol=1e-4).item()
    for given, alike in (5, False), (6, True):
        cache = make_prompt_cache(drafter.model)
        drafter.model(text[:, :-given], cache=cache)
        cache[-1].trim(12)
        last = drafter.model(text[:, -given:], cache=cache)[:, -1]
        assert mx.allclose(last, whole[:, -1], atol=1e-4).item() == alike


def test_a_saved_draft_model_is_a_model_of_its_own(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """mlx-lm loads it with the target's tokenizer; what it learnt on its own text counts too."""
    target, tokenizer = loaded
    train(plan_for(folder, "draft", on_policy=0.5), *loaded, tmp_path)
    draft, theirs = load_model(tmp_path)
    assert theirs.get_vocab() == tokenizer.get_vocab()
    prompt = tokenizer.encode(WORDS)
    plain = sd.generate(target, tokenizer, prompt, drafter=None, max_tokens=30)
    assert sd.generate(target, tokenizer, prompt, draft_model=draft, max_tokens=30) == plain


def test_the_table_of_heads_has_what_each_length_brings(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """Tokens a pass as in a run of its own; a length that drafts nothing has one token a pass."""
    target, tokenizer = loaded
    train(plan_for(folder, "medusa"), *loaded, tmp_path)
    head = sd.load_head(tmp_path, target)
    prompt = tokenizer.encode(WORDS)
    rows = list(
        compare(
            target,
            {"medusa": head},
            [prompt],
            lengths=[0, 2, "auto"],
            temps=[0, 1.0],
            max_tokens=30,
        )
    )
    assert [row.temp for row in rows] == [0, 1.0]
    *_, last = sd.speculate(target, prompt, head, draft_length=2, max_tokens=30)
    assert rows[0].tokens_per_pass["2"] == pytest.approx(last.stats.tokens_per_pass)
    assert rows[0].tokens_per_pass["0"] == 1
    assert all(row.speed is not None and row.speed > 0 for row in rows)
    assert "| medusa" in format_rows(rows)


# Learning on


@pytest.mark.parametrize("kind", ["mtp", "eagle3", "medusa"])
def test_a_head_learns_from_each_text_and_stays_lossless(
    kind: str, folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """The loss on the text falls, the text is the plain one each time, and what is saved loads."""
    target, tokenizer = loaded
    train(plan_for(folder, kind), *loaded, tmp_path)
    before = mx.load(str(tmp_path / "model.safetensors"))
    mx.eval(before)  # which is read when it is used
    drafter = learning_on(tmp_path, target, Bounds(learning_rate=3e-3, window=32))
    prompt = tokenizer.encode(WORDS)
    plain = sd.generate(target, tokenizer, prompt, drafter=None, max_tokens=40)
    for _ in range(4):
        assert sd.generate(target, tokenizer, prompt, drafter=drafter, max_tokens=40) == plain
    losses = [drafter.trainer.learn() for _ in range(6)]
    assert losses[-1] < losses[0]
    drafter.save()
    after = mx.load(str(tmp_path / "model.safetensors"))
    assert any(not mx.array_equal(x, after[name]).item() for name, x in before.items())
    assert sd.load_head(tmp_path, target)


def test_a_text_is_learnt_from_when_it_has_ended(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was handed out of it, before the next begins, whose first token waits for nothing."""
    target, tokenizer = loaded
    train(plan_for(folder, "medusa"), *loaded, tmp_path)
    drafter = learning_on(tmp_path, target)
    learnt: list[list[int]] = []
    monkeypatch.setattr(drafter.trainer, "add", lambda tokens, _: learnt.append(list(tokens)))
    prompt = list(tokenizer.encode(WORDS))
    for expected in ([], [prompt]):
        tokens = sd.speculate(target, prompt, drafter, max_tokens=30)
        first = next(tokens).token
        assert [text[: len(prompt)] for text in learnt] == expected
        tokens.close()
        assert learnt[-1] == [*prompt, first]


def test_learning_on_is_bounded(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many windows are kept, so many passes of the target run; a short text teaches nothing."""
    target, _ = loaded
    train(plan_for(folder, "medusa"), *loaded, tmp_path)
    bounds = Bounds(updates=3, window=16, windows=2)
    trainer = learning_on(tmp_path, target, bounds).trainer
    trainer.add([1, 2, 3])
    assert trainer.learn() is None
    trainer.add(list(range(100)))
    assert [window.tolist() for window in trainer.windows] == [
        list(range(68, 84)),
        list(range(84, 100)),
    ]
    passes = []

    def counted(*args: Any) -> Any:
        passes.append(args)
        return live_batch(*args)

    monkeypatch.setattr("specdec_mlx.training.online.live_batch", counted)
    trainer.learn()
    assert len(passes) == 3


def test_only_what_was_trained_here_learns_on(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"no plan\.json"):
        learning_on(folder, loaded[0])
    train(plan_for(folder, "exit"), *loaded, tmp_path)
    with pytest.raises(TrainingError, match="only mtp, eagle3, medusa, draft learn on"):
        learning_on(tmp_path, loaded[0])


# The command


@command_line.both_ways
def test_the_command_trains_and_prints_the_acceptance(folder: Path, tmp_path: Path) -> None:
    done = command_line.run(
        "train",
        "--model",
        folder,
        "--kind",
        "medusa",
        "--texts",
        folder.parent / "text.txt",
        "--out",
        tmp_path / "head",
        "--window",
        "32",
        "--steps",
        "3",
        "--batch",
        "2",
        "--continuations",
        "2",
        "--temps",
        "1,0",
        "--loss",
        "forward-kl+tv",
    )
    assert done.returncode == 0, done.stderr
    assert "accepted by position, greedy 0." in done.stdout
    report = json.loads((tmp_path / "head" / "training.json").read_text())
    assert len(report["acceptance"]["greedy"]) == 3
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_online_learns_in_a_command_and_saves_at_its_end(
    folder: Path, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    """As a process, which has an end; without --draft-model there is nothing to learn."""
    train(plan_for(folder, "medusa"), *loaded, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    flags = ["generate", "--model", folder, "--prompt", WORDS, "--max-tokens", "20"]
    with command_line.in_this_way("as a process"):
        done = command_line.run(*flags, "--draft-model", tmp_path, "--online")
        assert done.returncode == 0, done.stderr
        refused = command_line.run(*flags, "--online")
    assert (tmp_path / "model.safetensors").read_bytes() != before
    assert refused.returncode == 2
    assert "expected --draft-model" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--texts", "missing.txt"], "There is no file missing.txt"),
        (["--window", "4000"], "too few for 2 windows of 4000"),
        (["--on-policy", "0.5"], "writes nothing alone"),
        (["--on-policy", "2"], "expected a share from 0 to 1"),
        (["--temps", "-1"], "expected temperatures of at least 0"),
        (["--loss", "js"], "expected forward-kl, reverse-kl, tv"),
        (["--kind", "exit", "--layers", "9"], "Early exit after 9 layers: expected 1 to"),
        (["--kind", "eagle3", "--layers", "0,1,2"], "Layer 0 cannot be the first"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_line(
    flags: list[str], expected: str, folder: Path, tmp_path: Path
) -> None:
    options = {
        "--model": str(folder),
        "--kind": "mtp",
        "--texts": str(folder.parent / "text.txt"),
        "--out": str(tmp_path / "head"),
        "--window": "32",
        "--steps": "1",
    }
    options |= dict(zip(flags[::2], flags[1::2], strict=True))
    done = command_line.run("train", *(part for pair in options.items() for part in pair))
    assert done.returncode == 2
    assert expected in done.stderr


@pytest.mark.parametrize("line", ["{", "[1]", '{"txt": "a"}'])
def test_a_line_that_is_no_document_is_named(
    line: str, loaded: tuple[nn.Module, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(TrainingError, match=r"a\.jsonl, line 2"):
        list(read_documents([tmp_path / "a.jsonl"], loaded[1]))
