"""Which model, adapter and drafter a request gets, by the names that it gives."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from engines import ASKED, PROMPT, ask, running, settled, submit, with_flags
from selection import FULL, in_one_test
from serving import until
from specdec_mlx import lab
from specdec_mlx.draft_length.store import tuning_path
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.memory.store import PROCESS
from specdec_mlx.mlx_lm_plugin.flags import KEY, USER
from specdec_mlx.server import app, loading, models
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import GIVEN, parse_settings
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import RequestError, ServerEndingError, TextRequest, Transcript
from tiny_model_folder import write_model_folder

HELPERS = ["gpt-4o-mini", "sonnet", "anthropic/claude-haiku", "accounts/a/models/b"]


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    """A LoRA adapter that changes what the model says."""
    place = folder.with_name("adapter")
    place.mkdir()
    options = {"rank": 2, "scale": 200.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": options}
    (place / "adapter_config.json").write_text(json.dumps(config))
    model = mlx_lm.load(str(folder))[0]
    linear_to_lora_layers(model, 1, options)
    weights = [(n, x) for n, x in tree_flatten(model.parameters()) if "lora_" in n]
    values = {name: mx.arange(x.size).reshape(x.shape) % 5 - 2.0 for name, x in weights}
    mx.save_safetensors(str(place / "adapters.safetensors"), values)
    return place


def plain(folder: Path, adapter: Path | None = None) -> str:
    """mlx-lm's own text."""
    path = None if adapter is None else str(adapter)
    model, tokenizer = mlx_lm.load(str(folder), adapter_path=path)[:2]
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True)
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=24))


def test_an_adapter_belongs_to_the_given_model_however_it_is_named(
    folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no name, mlx-lm's name, its folder in any spelling, and a name that nobody has."""
    adapted = plain(folder, adapter)
    assert adapted != plain(folder)
    monkeypatch.chdir(folder.parent)
    settings = {"adapter_path": str(adapter), "any_model_name": True, "flags": with_flags()}
    with running(folder.name, **settings) as engine:  # type: ignore[arg-type]
        listed = engine.models.listed()[0]["id"]
        assert listed == folder.name
        for name in ("", "default_model", listed, folder.name, f"./{folder.name}/", *HELPERS):
            assert ask(engine, model=name).text == adapted, name
    with running(folder, flags=with_flags()) as engine:
        assert ask(engine, adapter=str(adapter)).text == adapted
        assert ask(engine).text == plain(folder)
        with pytest.raises(RequestError, match="adapter_config"):
            ask(engine, adapter=str(folder))
        assert ask(engine).text == plain(folder)


@FULL
def test_a_name_that_nobody_has_is_the_given_model_or_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is there, and a model in the cache, are what they are."""
    other = write_model_folder(tmp_path, "llama", seed=4)
    with running(folder, flags=with_flags(), any_model_name=True) as engine:
        assert {ask(engine, model=name).text for name in HELPERS} == {plain(folder)}
        assert ask(engine, model=str(other)).text == plain(other)
        monkeypatch.setattr(models, "is_in_cache", lambda name: name == HELPERS[0])
        with pytest.raises(ModelFolderError):
            ask(engine, model=HELPERS[0])
        assert ask(engine, model=HELPERS[1]).text == plain(folder)
    with running(folder, flags=with_flags()) as engine:
        for name in HELPERS:
            with pytest.raises(ModelFolderError):
                ask(engine, model=name)
        assert ask(engine).text == plain(folder)
        for name in ("~nobody", "a" * 5000, "\0", "a//b", "..."):
            with pytest.raises((RequestError, ModelFolderError)):
                ask(engine, model=name)
            with pytest.raises((RequestError, ModelFolderError)):
                ask(engine, draft_model=name)
        assert ask(engine).text == plain(folder)
    with running(None, flags=with_flags()) as engine:
        with pytest.raises(RequestError, match="Name a model"):
            ask(engine)
        assert ask(engine, model=str(folder)).text == plain(folder)


def test_a_server_may_be_kept_to_the_models_that_it_was_started_with(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    other = write_model_folder(tmp_path, "llama", seed=4)
    with running(folder, flags=with_flags(), request_models=GIVEN, any_model_name=True) as engine:
        assert ask(engine, model=str(folder)).text == plain(folder)
        assert ask(engine, model="sonnet").text == plain(folder)
        for wrong in (
            {"model": str(other)},
            {"adapter": str(adapter)},
            {"draft_model": str(other)},
        ):
            with pytest.raises((RequestError, ModelFolderError), match="loads no"):
                ask(engine, **dict[str, Any](wrong))
        assert [model["id"] for model in engine.models.listed()] == [folder.name]


AGENTS = ["claude-sonnet-5", "claude-haiku-4-5-20251001", "claude-opus-5[1m]", "sonnet", "gpt-5"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "192.168.0.7"])
@pytest.mark.parametrize("request_models", ["any", "targets", "given"])
def test_agents_names_are_the_given_models_where_the_flag_says_so(
    host: str, request_models: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On loopback without it; else the error, of which the status is 404, names it."""

    def missing(name: str, *args: Any, **options: Any) -> None:
        raise OSError(f"{name} is not in the cache")

    monkeypatch.setattr(loading.mlx_lm, "load", missing)
    monkeypatch.setattr(loading, "load_tokenizer", missing)
    flags = ["--host", host, "--model", "org/given", "--request-models", request_models]
    is_local = host == "127.0.0.1"
    for more, is_given in (
        ([], is_local),
        (["--any-model-name"], True),
        (["--no-any-model-name"], False),
    ):
        names = Models(parse_settings([*flags, *more]))
        for name in AGENTS:
            if is_given:
                assert names.names_of(TextRequest(model=name)) == ("org/given", None)
                continue
            for ask_for in names.load, names.tokenizer_for:
                with pytest.raises(ModelFolderError, match="started with --any-model-name") as told:
                    ask_for(TextRequest(model=name))
                assert app.status_of(told.value) == 404
        with pytest.raises(ModelFolderError) as told:
            names.load(TextRequest())
        assert "--any-model-name" not in str(told.value)


def test_every_name_that_a_request_may_use_has_an_entry(folder: Path, tmp_path: Path) -> None:
    """With the length of its texts where it is loaded; no other name has one."""
    other = write_model_folder(tmp_path / "other", max_position_embeddings=77)
    with running(folder, flags=with_flags(), any_model_name=True) as engine:
        length = engine.models.listed()[0]["context_length"]
        for name in ("local", "default_model", "a/b", "gpt-5", folder.name, str(folder)):
            entry = engine.models.find_entry(name)
            assert (entry["id"], entry["context_length"]) == (name, length)
        assert "context_length" not in engine.models.find_entry(str(other))
        ask(engine, model=str(other))
        lengths = {entry["id"]: entry.get("context_length") for entry in engine.models.listed()}
        assert (lengths[folder.name], lengths["other"]) == (None, 77)
        for name in ("other", str(other)):
            assert engine.models.find_entry(name)["context_length"] == 77
            assert ask(engine, model=name).ended
        for name in (str(tmp_path), "/nowhere", "a" * 5000):
            with pytest.raises((RequestError, ModelFolderError)) as told:
                engine.models.find_entry(name)
            assert "--any-model-name" not in str(told.value)
    with running(folder, flags=with_flags()) as engine:
        for name in ("local", "a/b"):
            with pytest.raises(ModelFolderError, match="--any-model-name"):
                engine.models.find_entry(name)


def test_models_are_unloaded_and_loaded_again(folder: Path, tmp_path: Path) -> None:
    """With their draft models and caches; after the texts that are written, and before others."""
    draft = write_model_folder(tmp_path / "draft", "llama", seed=3)
    choice = DrafterChoice(model=DraftModel(str(draft)))
    expected = plain(folder)
    with running(folder, flags=with_flags(choice=choice, num_draft_tokens=2)) as engine:
        model = weakref.ref(choice.model.pair[0])
        for _ in range(2):
            first, second = submit(engine, max_tokens=60), submit(engine, max_tokens=60)
            first.until_text()
            unloaded = engine.unload()
            third = submit(engine)
            assert first.wait().ended
            assert second.wait().ended
            unloaded.result(60)
            assert third.wait().text == expected
            engine.unload().result(60)
            assert engine.models.loaded is None
            assert not engine.prefixes.entries
            assert model() is None
            assert ask(engine).text == expected
    with pytest.raises(ServerEndingError):
        engine.unload()


def test_a_model_is_unloaded_after_a_time_without_requests(folder: Path) -> None:
    """Never by default."""
    with running(folder, flags=with_flags(), keep_alive=0.1) as engine:
        for _ in range(2):
            text = ask(engine).text
            until(lambda: engine.models.loaded is None)
        assert text == plain(folder)
    with running(folder, flags=with_flags()) as engine:
        assert engine._idle_for() is None


@pytest.mark.parametrize("any_model_name", [True, False])
def test_no_error_tells_what_is_on_the_disk(
    any_model_name: bool, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing there, a file, a folder, a broken model, a place that may not be looked at: one text.

    The log has the reason. By a draft model's name and an adapter's it is the same.
    """
    broken = write_model_folder(tmp_path / "broken", "llama", seed=4)
    for file in broken.glob("*.safetensors"):
        file.write_bytes(b"none")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    names = [str(tmp_path / name) for name in ("nothing", "file", "empty", "broken")]
    names += ["/root/.ssh", "~", "~root", "~nobody-here", "./nothing", "../nothing"]
    with running(folder, flags=with_flags(), any_model_name=any_model_name) as engine:
        for field in "model", "draft_model", "adapter":
            told = set()
            for name in names:
                with pytest.raises((RequestError, ModelFolderError)) as refused:
                    ask(engine, **{field: name})
                told.add((type(refused.value), str(refused.value)))
                if field == "model" and not name.endswith("broken"):  # whose tokenizer is there
                    with pytest.raises(ModelFolderError) as refused:
                        engine.num_tokens(TextRequest(model=name, prompt="a"))
                    told.add((type(refused.value), str(refused.value)))
            assert len(told) == 1, told
            assert not any(name in str(told) for name in (str(tmp_path), str(Path.home())))
        assert "has no config.json" in caplog.text
        assert ask(engine, model=folder.name).text == plain(folder)


def test_the_list_says_how_long_a_text_may_be(folder: Path) -> None:
    with running(folder, flags=with_flags()) as engine:
        (listed, *_) = engine.models.listed()
        assert listed["context_length"] == engine.models.load(TextRequest()).longest_text
        assert isinstance(listed["created"], int)


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A change of a file in a model's folder."""

    def changed(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return changed


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "another config": rewrite("config.json", lambda raw: b"[]"),
    "an unknown type": rewrite("config.json", lambda raw: raw.replace(b"qwen2", b"qwen99")),
    "other shapes": rewrite(
        "config.json", lambda raw: raw.replace(b'"hidden_size": 64', b'"hidden_size": 8')
    ),
    "a damaged config": rewrite("config.json", lambda raw: raw[:-1]),
    "damaged weights": rewrite("model.safetensors", lambda raw: b"x" * len(raw)),
    "cut weights": rewrite("model.safetensors", lambda raw: raw[:-8]),
    "a damaged tokenizer": rewrite("tokenizer.json", lambda raw: b"{}"),
}


def test_a_name_of_no_model_leaves_the_loaded_one_where_it_is(folder: Path, tmp_path: Path) -> None:
    """Whatever part of the other one is missing or damaged, and the one of a draft model too."""
    wrong: list[dict[str, Any]] = [{"model": "/etc"}, {"model": str(tmp_path)}]
    wrong += [{"adapter": str(folder)}, {"draft_model": "/etc"}]
    for name, damage in DAMAGES.items():
        other = write_model_folder(tmp_path / name)
        damage(other)
        wrong.append({"model": str(other)})
    draft = write_model_folder(tmp_path / "draft", "llama", seed=3)
    with running(folder, flags=with_flags(num_draft_tokens=3)) as engine:
        expected = ask(engine, draft_model=str(draft)).text
        loaded = engine.models.loaded
        assert loaded is not None
        drafter = loaded.requested_draft_model[1]
        for request in wrong:
            with pytest.raises((RequestError, ModelFolderError)):
                ask(engine, **request)
            assert engine.models.loaded is loaded, request
            assert loaded.requested_draft_model[1] is drafter, request
        assert ask(engine).text == expected


def drafted(text: Transcript) -> int:
    assert text.ended is not None
    assert text.ended.stats is not None
    return int(text.ended.stats.drafted)


def test_a_request_may_name_its_draft_model_or_head(folder: Path, tmp_path: Path) -> None:
    """The text is plain decoding's; another one, and none, come after it."""
    draft = write_model_folder(tmp_path / "draft", "llama", seed=3)
    expected = plain(folder)
    with running(folder, flags=with_flags(num_draft_tokens=3)) as engine:
        for name in (str(draft), "default_model", str(folder), None):
            text = ask(engine, draft_model=name)
            assert text.text == expected
            assert text.ended
            is_own = name in (str(draft), str(folder))
            assert text.ended.drafter == ("model" if is_own else "auto")
            assert not is_own or drafted(text) > 0
        with pytest.raises(RequestError, match="not both"):
            ask(engine, draft_model=str(draft), drafters=["ngram"])
        with pytest.raises(ModelFolderError):
            ask(engine, draft_model=str(tmp_path / "nobody"))
        assert ask(engine).text == expected


@pytest.fixture(scope="module")
def with_head() -> Iterator[Engine]:
    choice = DrafterChoice(model=DraftModel(str(lab.head_path("mtp"))))
    with running(lab.target_path(), flags=with_flags(choice=choice, num_draft_tokens=3)) as engine:
        yield engine


SENTENCE = "The following statements are executed in the order in which they are "


@FULL
@in_one_test("kind", [{}, {"draft_model": "exit"}])
def test_heads_draft_and_the_text_is_plain_decodings_in_later_turns_too(
    kind: dict[str, Any], with_head: Engine
) -> None:
    """The server's own and one that a request names, which copies from the target's caches."""
    if "draft_model" in kind:
        kind = {"draft_model": str(lab.head_path(kind["draft_model"]))}
    pair = lab.load_pair()
    text = SENTENCE
    for _ in range(2):
        expected = mlx_lm.generate(pair.target, pair.tokenizer, text, max_tokens=24)
        found = ask(with_head, prompt=text, **kind)
        assert found.text == expected
        assert drafted(found) > 0
        text += expected + " "
    assert found.ended
    assert found.ended.num_cached > len(pair.tokenizer.encode(SENTENCE))
    both = [submit(with_head, prompt=text + end, max_tokens=24, **kind) for end in ("In ", "A ")]
    for end, client in zip(("In ", "A "), both, strict=True):
        expected = mlx_lm.generate(pair.target, pair.tokenizer, text + end, max_tokens=24)
        assert client.wait().text == expected


def test_a_draft_model_reads_a_conversation_once(folder: Path, tmp_path: Path) -> None:
    """Its caches are kept beside the target's."""
    draft = write_model_folder(tmp_path / "draft", "llama", seed=3)
    choice = DrafterChoice(model=DraftModel(str(draft)))
    with running(folder, flags=with_flags(choice=choice, num_draft_tokens=2)) as engine:
        first = ask(engine, prompt=PROMPT)
        places = [entry.place for entry in settled(engine).prefixes.entries]
        assert sum(place[0] == "drafter" for place in places if isinstance(place, tuple)) == 1
        again = ask(engine, prompt=PROMPT + first.text + " and")
        assert len(settled(engine).prefixes.entries) == 2
        assert again.ended
        assert again.ended.num_cached >= first.ended.num_prompt + 22  # type: ignore[union-attr]
        model, tokenizer = mlx_lm.load(str(folder))[:2]
        prompt = PROMPT + first.text + " and"
        assert again.text == mlx_lm.generate(model, tokenizer, prompt, max_tokens=24)


@in_one_test("whose", [USER, KEY, "all"])
def test_a_memory_is_for_all_or_for_one(whose: str, folder: Path) -> None:
    """What was written for one is drafted for the same one, and for another if it is for all."""
    flags = with_flags(memory=PROCESS, memory_for=whose, num_draft_tokens=8)
    prompt = list(range(10, 40))  # nothing in it repeats
    with running(folder, flags=flags) as engine:

        def accepted(name: str) -> int:
            settled(engine).prefixes.trim_to(0)
            text = ask(engine, prompt=prompt, user=name, key=name, seed=5, max_tokens=40)
            assert text.ended
            return text.ended.accepted

        first = accepted("one")
        other = accepted("other")
        assert (other > first + 5) == (whose == "all")
        assert accepted("one") > first + 5


def test_what_was_learned_of_a_model_is_kept(folder: Path, tmp_path: Path) -> None:
    """When another one takes its place, and at the end."""
    other = write_model_folder(tmp_path, "llama", seed=4)
    paths = [tuning_path(str(folder)), tuning_path(str(other))]
    for path in paths:
        path.unlink(missing_ok=True)
    with running(folder) as engine:
        ask(engine)
        assert not paths[0].exists()
        ask(engine, model=str(other))
        assert [path.exists() for path in paths] == [True, False]
    assert paths[1].exists()


@FULL
def test_the_old_models_weights_are_freed_before_the_new_ones_load(tmp_path: Path) -> None:
    """Also if it had caches, a draft model of its own, and texts in a batch."""
    size = {"hidden_size": 512, "intermediate_size": 4096}
    one, two = (write_model_folder(tmp_path / n, "llama", **size) for n in ("one", "two"))
    with running(one, flags=with_flags()) as engine:
        clients = [submit(engine, prompt=PROMPT + str(i), draft_model=str(two)) for i in range(3)]
        for client in clients:
            client.wait()
        loaded = mx.get_active_memory()
        for folder in (two, one, two):
            ask(engine, model=str(folder))
            assert mx.get_active_memory() < 1.1 * loaded


MAKERS = {"temperature": 1.3, "top_p": 0.8, "top_k": 9, "min_p": 0.02}


def test_what_a_request_leaves_out_is_as_the_makers_of_its_model_recommend(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each value by itself, after the request and the flags; each model has its own, and a seed is
    one text with any drafter. A wrong value is ignored, and temperature 0 is greedy.
    """
    caplog.set_level("INFO")
    first, second = (write_model_folder(tmp_path / name) for name in ("first", "second"))
    config = {**MAKERS, "top_k": -9}
    (first / "generation_config.json").write_text(json.dumps(MAKERS), encoding="utf-8")
    (second / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    makers = {"temp": 1.3, "top_p": 0.8, "top_k": 9, "min_p": 0.02}
    without = {name: value for name, value in makers.items() if name != "top_k"}
    plain_folder = write_model_folder(tmp_path / "plain")
    wanted = [makers, {**makers, "temp": 2.0}, {**makers, "top_k": 3}, without, {"temp": 0}]
    with running(plain_folder, flags=with_flags()) as engine:
        texts = [ask(engine, seed=5, sampling=sampling).text for sampling in wanted]
        greedy = ask(engine).text
    assert texts[-1] == greedy
    assert len(set(texts)) == len(texts)
    with running(first, flags=with_flags()) as engine:
        asked = [{}, {"temp": 2.0}, {"top_k": 3}]
        assert [ask(engine, seed=5, sampling=one).text for one in asked] == texts[:3]
        assert ask(engine, seed=5, drafters=["none"]).text == texts[0]
        assert ask(engine, seed=5, sampling={"temp": 0.0}).text == greedy
        assert ask(engine, seed=5, model=str(second)).text == texts[3]
        assert ask(engine, seed=5, model=str(plain_folder)).text == greedy
        assert ask(engine, seed=5).text == texts[0]
    settings = parse_settings(["--model", str(first), "--top-k", "3", "--no-tuning"])
    assert settings.sampling == {"top_k": 3}
    with running(first, flags=with_flags(), top_k=3) as engine:
        pass
    said = [record.getMessage() for record in caplog.records]
    sentence = "Sampling where a request gives none: temperature 1.3, top-p 0.8, "
    file = "(the model's generation_config.json)."
    assert f"{sentence}top-k 9, min-p 0.02 {file}" in said
    assert f"{sentence}min-p 0.02 {file}" == said[-1]
    assert any("top_k -9 is ignored" in line for line in said)
