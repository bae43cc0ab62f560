"""Drafters that learn on while they draft: lossless, bounded, saved whole, refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import command_line
import distribution
import specdec_mlx as sd
from selection import FULL, in_one_test
from serving import chat, serving, text_of
from specdec_mlx.contracts import Features
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.errors import TokenizerMismatchError, TrainingError
from specdec_mlx.lab.proof.chi_square import RARE_ALARM
from specdec_mlx.lab.training import online
from specdec_mlx.lab.training.fitting import Updates
from specdec_mlx.lab.training.learner import Learner
from specdec_mlx.lab.training.online import Bounds, OnlineDrafter, OnlineTrainer, learning_on
from specdec_mlx.lab.training.run import PLAN, Data, Plan, train
from specdec_mlx.lab.training.trainees import Size, Trainee
from specdec_mlx.memory.drafter_states import StatesOnCache
from specdec_mlx.mlx_lm_plugin.flags import Flags
from specdec_mlx.models.loading import load_model
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import TextRequest
from tiny_model_folder import write_model_folder

TEXT = "the tin hat on another ant then in the end an other hen ran on and on "
FAST = Bounds(learning_rate=1e-2, window=32)  # weights that move far at every update


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target as a folder, and a draft model that was trained for it beside it."""
    root = tmp_path_factory.mktemp("online")
    (root / "text.txt").write_text(TEXT * 30)
    target = write_model_folder(root / "target", "qwen2")
    plan = Plan(
        str(target),
        "draft",
        Data((str(root / "text.txt"),), window=32),
        Size(mlp=16, heads=2, width=16),
        Updates(steps=30, batch=2, learning_rate=1e-2),
    )
    train(plan, *load_model(target), root / "draft")
    return target


@pytest.fixture(scope="module")
def loaded(folder: Path) -> tuple[nn.Module, Any]:
    """That target and its tokenizer."""
    return load_model(folder)


@pytest.fixture
def draft(folder: Path, tmp_path: Path) -> Path:
    """A copy of the draft model's folder, which a test may change."""
    return Path(shutil.copytree(folder.parent / "draft", tmp_path / "draft"))


@pytest.fixture
def learning(draft: Path, loaded: tuple[nn.Module, Any]) -> OnlineDrafter:
    """That draft model, learning on."""
    return learner_of(draft, loaded[0])


def learner_of(draft: Path, target: nn.Module, bounds: Bounds = FAST) -> OnlineDrafter:
    drafter = learning_on(draft, target, bounds)
    assert isinstance(drafter, OnlineDrafter)
    return drafter


def weights_of(model: nn.Module) -> dict[str, mx.array]:
    """Weights by name, as they are now."""
    return dict(tree_flatten(model.parameters()))


def same(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    """Bit for bit."""
    return all(mx.array_equal(x, other[name]).item() for name, x in one.items())


@FULL
@in_one_test("options", [{}, {"greedy": True}, {"branches": 2}, {"draft_temp": 0.5}])
def test_until_it_has_learnt_it_drafts_as_the_same_folder_does(options, loaded, draft):
    """In the type of the file, with every option: the same drafts, so the same text and account."""
    target, tokenizer = loaded
    plain, learning = sd.ModelDrafter(*load_model(draft), **options), learner_of(draft, target)
    own = learning.drafting_as(replace(plain, model=learning.model))
    runs = []
    for drafter in (plain, own):
        how: Any = {"num_draft_tokens": 3, "temp": 1.0, "seed": 3, "max_tokens": 20}
        text = sd.generate(target, tokenizer, TEXT, drafter=drafter, **how)
        runs.append((text.tokens, text.stats.drafted, text.stats.accept_histogram))
    assert runs[0] == runs[1]
    assert {x.dtype for x in weights_of(own.model).values()} == {mx.float16}


@in_one_test("temp", [0.0, 1.0])
def test_texts_stay_the_targets_while_the_draft_model_learns(temp, loaded, draft):
    """Greedy, and drawn under the rule that has one text for a seed."""
    learning = learner_of(draft, loaded[0])
    for seed in range(2):
        options: Any = {"max_tokens": 30, "temp": temp, "seed": seed}
        options["rule"] = "coupled" if temp else "auto"
        before, prompt = weights_of(learning.model), TEXT[seed:]
        text = sd.generate(
            loaded[0], loaded[1], prompt, drafter=learning, num_draft_tokens=3, **options
        )
        plain = sd.generate(loaded[0], loaded[1], prompt, drafter=None, **options)
        assert text.tokens == plain.tokens
        assert text.stats.drafted > 0
        assert not same(before, weights_of(learning.model))


@FULL
def test_drawn_texts_keep_the_targets_distribution_while_it_learns(tmp_path, monkeypatch):
    """The first three tokens of texts under rejection, weights moving after each: chi-square, false
    alarms 1e-6.
    """
    monkeypatch.setattr(online, "SHORTEST", 4)
    target, draft, num_texts = (*map(distribution.tiny_llama, (10, 6)), 300)
    module, own = distribution.tiny_llama.__wrapped__(6), {"draft_logits": lambda logits: logits}
    predictions = lambda batch: iter([(module(batch.tokens), 0)])  # noqa: E731
    trainee = Trainee(module, anatomy_for_head(target), Features(), {}, predictions, **own)
    trainer = OnlineTrainer(trainee, target, Bounds(learning_rate=1e-2, updates=1, window=16))
    learning = OnlineDrafter(sd.ModelDrafter(draft), trainer, tmp_path, "float32")
    sampling = distribution.SETTINGS["temperature 1"]
    count = distribution.generate(target, learning, sampling, num_texts, "rejection")
    assert distribution.p_value(count.texts, distribution.joint_law(sampling)) > RARE_ALARM
    assert min(count.accepted, count.rejected) > num_texts / 8
    assert trainer.num_updates == num_texts


def test_what_it_learns_is_what_drafts_and_what_is_saved(loaded, draft, learning):
    """The loss falls; the folder loads as an ordinary draft model with the weights that draft."""
    target, tokenizer = loaded
    first, key = weights_of(learning.model), learning.key
    for _ in range(3):
        sd.generate(target, tokenizer, TEXT, drafter=learning, max_tokens=30)
    losses = [learning.trainer.learn() for _ in range(6)]
    assert losses[-1] < losses[0]
    learning.learn()
    learning.save()
    saved = weights_of(load_model(draft)[0])
    assert same(saved, weights_of(learning.model))
    assert not same(saved, first)
    assert json.loads((draft / "config.json").read_text())["torch_dtype"] == "float16"
    assert learning.key == learner_of(draft, target).key == key
    greedy = learning.drafting_as(replace(learning.drafter, greedy=True))
    other = learner_of(Path(shutil.copytree(draft, draft.parent / "other")), target)
    assert len({key, greedy.key, other.key}) == 3


def test_memory_and_updates_are_bounded(loaded, draft, monkeypatch):
    """The last windows are kept, with half a window before what was written; short texts are not,
    and do not have older ones learnt from again.
    """
    target = loaded[0]
    learning = learner_of(draft, target, Bounds(updates=3, window=16, windows=2))
    trainer = learning.trainer
    trainer.add([1, 2, 3])
    assert trainer.learn() is None
    trainer.add(range(100))
    assert [window.tolist() for window in trainer.windows] == [[*range(68, 84)], [*range(84, 100)]]
    for text, num_prompt, kept in ((range(100), 90, 82), (range(100, 110), 2, 100)):
        trainer.add(text, num_prompt=num_prompt)
        assert trainer.windows[-1].tolist() == [*range(kept, text[-1] + 1)][:16]
    passes, honest = [], online.live_batch
    monkeypatch.setattr(online, "live_batch", lambda *args: (passes.append(args), honest(*args))[1])
    learning.learn()
    assert len(passes) == trainer.num_updates == 3
    list(sd.speculate(target, [5, 6], learning, max_tokens=3))
    assert trainer.num_updates == 3


def test_weights_stay_while_another_text_is_under_way(loaded, learning):
    """What is kept of a text was computed with them; both texts are learnt from at the end."""
    target, tokenizer = loaded
    before = weights_of(learning.model)
    dropped = learning.begin([5, 6, 7], sd.drafters.DraftContext(vocab_size=268))
    prompt = tokenizer.encode(TEXT)
    slow = sd.speculate(target, prompt, learning, max_tokens=20)
    next(slow)
    quick = list(sd.speculate(target, prompt[3:], learning, max_tokens=20))
    assert len(quick) == 20
    assert same(before, weights_of(learning.model))
    assert len(learning.trainer.windows) > 0
    del dropped
    list(slow)
    assert not same(before, weights_of(learning.model))
    assert learning.trainer.num_updates == FAST.updates


def test_texts_of_a_batch_are_learnt_from_when_all_have_ended(loaded, learning):
    """Rows share the weights: they are what they are alone, and one lesson follows."""
    target, tokenizer = loaded
    prompts, numbers = [TEXT, TEXT[4:], TEXT[9:]], [6, 12, 18]
    how: Any = {"max_tokens": numbers, "num_draft_tokens": 2, "return_token_ids": True}
    batch = sd.batch_generate(target, tokenizer, prompts, drafter=learning, **how)
    for prompt, number, tokens in zip(prompts, numbers, batch.token_ids, strict=True):
        plain = sd.generate(target, tokenizer, prompt, drafter=None, max_tokens=number)
        assert tokens == plain.tokens
    assert sum(stats.drafted for stats in batch.speculation) > 0
    assert learning.trainer.num_updates == FAST.updates


def test_caches_between_turns_are_those_of_the_weights_of_each(loaded, learning):
    """A server keeps none, as it does for a draft model that stays as it is; those that a caller
    keeps end where the text does, which is plain decoding's.
    """
    target, tokenizer = loaded
    own = make_prompt_cache(target)
    for drafter, is_kept in ((learning, False), (learning.drafter, True)):
        said = sd.generate(
            *(target, tokenizer, TEXT), drafter=drafter, prompt_cache=own, max_tokens=12
        )
        tokens = [*tokenizer.encode(TEXT), *said.tokens]
        assert (StatesOnCache(own).fetch(learning.model, tokens)[0] is not None) == is_kept
        own = make_prompt_cache(target)
    caches = [*make_prompt_cache(target), *make_prompt_cache(learning.model)]
    plain = make_prompt_cache(target)
    for turn in (TEXT, "and then the hat ", "in the end "):
        text, expected = (
            sd.generate(target, tokenizer, turn, drafter=x, prompt_cache=cache, max_tokens=12)
            for x, cache in ((learning, caches), (None, plain))
        )
        assert text.tokens == expected.tokens
        assert {cache.offset for cache in caches} == {plain[0].offset}


def test_a_kill_while_saving_leaves_the_old_weights(loaded, draft, learning, monkeypatch):
    """Bit for bit; the next save is whole, and before any update nothing is written."""
    target, tokenizer = loaded

    def killed(path: str, *args: Any) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    before = {path.name: path.read_bytes() for path in draft.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(mx, "save_safetensors", killed)
        learning.save()
        sd.generate(target, tokenizer, TEXT, drafter=learning, max_tokens=20)
        with pytest.raises(KeyboardInterrupt):
            learning.save()
    assert {name: (draft / name).read_bytes() for name in before} == before
    learning.save()
    assert same(weights_of(load_model(draft)[0]), weights_of(learning.model))


def test_a_server_makes_what_learns_on_for_its_target(folder, loaded, draft):
    """One for all requests, with the options of the server's flags; for another model that it loads
    it goes on from what was learnt.
    """
    choice = DrafterChoice(["ngram", "model:greedy=true"], DraftModel(str(draft)))
    flags = Flags(choice, online=True)
    models = Models(ServerSettings(flags=flags))

    def made(target: nn.Module) -> Any:
        loaded = LoadedModel("target", None, target, None, {}, ())
        drafter: Any = models.drafters.choose(TextRequest(), loaded)[0]
        return drafter.drafters[1]

    first = made(loaded[0])
    assert made(loaded[0]).trainer is first.trainer
    assert isinstance(first, OnlineDrafter)
    sd.generate(loaded[0], loaded[1], TEXT, drafter=first, max_tokens=20)
    second = made(load_model(folder)[0])
    assert second.trainer is not first.trainer
    assert same(weights_of(second.model), weights_of(first.model))
    assert "greedy=True" in second.key


def test_what_cannot_learn_on_is_told_the_next_step(folder, loaded, draft, tmp_path, monkeypatch):
    """By its folder: a name of the Hub, its cache, another model's, a quantized one, an exit; over
    several ranks, where a pass of one alone would wait for the others forever.
    """
    init = "--kind draft --init"
    plan, config = (json.loads((draft / name).read_text()) for name in (PLAN, "config.json"))

    def refused(name: Path | str, expected: str) -> None:
        with pytest.raises(TrainingError, match=expected):
            learning_on(name, loaded[0])

    refused("mlx-community/Some-Model", f"no folder of yours.*{init} mlx-community/Some-Model")
    refused(folder, rf"no plan\.json.*{init} {folder}")
    with monkeypatch.context() as patch:
        patch.setattr(online, "group_of", lambda model: object())
        refused(draft, "over several ranks")
    with monkeypatch.context() as patch:
        patch.setattr(online, "HF_HUB_CACHE", str(tmp_path))
        refused(draft, "the Hub's cache is left as it is")
    (draft / PLAN).write_text(json.dumps(plan | {"kind": "exit"}))
    refused(draft, "only mtp, eagle3, medusa, draft learn on")
    (draft / "config.json").write_text(json.dumps(config | {"quantization": {"bits": 4}}))
    refused(draft, f"is quantized.*{init} ORIGINAL")


def test_a_target_with_another_tokenizer_is_refused(loaded, draft, tmp_path):
    """When a generation begins, in the server when it is asked; whatever options say of it."""
    swapped = write_model_folder(tmp_path / "swapped", "qwen2", swapped=True)
    target, tokenizer = load_model(swapped)
    learning = learner_of(draft, target)
    own = replace(learning.drafter, tokenizers="any")
    for drafter in (learning, learning.drafting_as(own)):
        with pytest.raises(TokenizerMismatchError, match="Use a draft model of the same family"):
            sd.generate(target, tokenizer, TEXT, drafter=drafter, max_tokens=2)
    flags = ("--draft-model", str(draft), "--online", "--no-tuning")
    with pytest.raises(TokenizerMismatchError), serving("--model", str(swapped), *flags):
        pass


def test_a_command_learns_and_saves_at_its_end(folder, draft):
    """As a process, which has an end; the text is the model's own."""
    before = (draft / "model.safetensors").read_bytes()
    flags = ["generate", "--model", folder, "--prompt", TEXT, "--max-tokens", "20"]
    with command_line.in_this_way("as a process"):
        done = command_line.run(
            *flags, "--draft-model", draft, "--online", "--num-draft-tokens", "3"
        )
    assert done.returncode == 0, done.stderr
    assert f"Drafting with {draft}: draft model; learns on" in done.stderr
    plain = command_line.run(*flags, "--drafter", "none")
    assert done.stdout.split("==========")[1] == plain.stdout.split("==========")[1]
    assert (draft / "model.safetensors").read_bytes() != before
    refused = command_line.run("benchmark", "--model", folder, "--draft-model", draft, "--online")
    assert refused.returncode == 2
    assert "random tokens" in refused.stderr


def test_a_server_learns_from_one_conversation_to_the_next(folder, draft, monkeypatch):
    """Its texts are plain decoding's, also on the caches of an earlier turn."""
    learner = Learner(DraftModel(draft))

    class TheSame:
        check = staticmethod(Learner.check)

        def __call__(self, model: DraftModel) -> Learner:
            return learner

    monkeypatch.setattr("specdec_mlx.mlx_lm_plugin.flags.learners", TheSame)
    before = weights_of(load_model(draft)[0])
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    flags = (
        "--model",
        str(folder),
        "--draft-model",
        str(draft),
        "--online",
        "--num-draft-tokens",
        "3",
    )
    with serving(*flags, "--temp", "0") as client:
        for _ in range(2):
            own = chat(client, messages, max_tokens=16)
            plain = chat(client, messages, max_tokens=16, extra_body={"drafter": "none"})
            assert text_of(own) == text_of(plain)
            assert own.usage.speculation["drafted"] > 0
            messages += [{"role": "assistant", "content": text_of(own)}, messages[0]]
    learner.save()
    assert not same(before, weights_of(load_model(draft)[0]))
