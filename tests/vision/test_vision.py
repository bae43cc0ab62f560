"""Vision models write mlx-vlm's own text, whatever is drafted and whoever read the prompt.

mlx-vlm is no part of the `dev` extra, since it brings opencv, datasets and mlx-audio:
`pip install mlx-vlm` for these tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
from scripted import OracleDrafter, ScriptedDrafter, ScriptedSession
from specdec_mlx.caches import leaves
from specdec_mlx.contracts import Draft
from specdec_mlx.errors import PromptError
from specdec_mlx.vision.model import private_arrays_of
from specdec_mlx.vision.prompts import NOT_TAKEN

pytestmark = pytest.mark.full
mlx_vlm = pytest.importorskip("mlx_vlm")

import tiny_vision  # noqa: E402  needs mlx-vlm
from tiny_vision import CONFIGS, IDS, MARK, START, VOCAB, Processor  # noqa: E402

vision = sd.vision
NAMES = [*CONFIGS]
NUM_TOKENS = 24
PROMPT = f"What is the {START}{MARK} that is in the other one?"
TWO = f"Is {START}{MARK} or {START}{MARK} the other one?"
NEXT = [40, 41, 42, 40, 41, 42, 40]  # tokens of a second turn


@cache
def load(name: str) -> tuple[Any, Any]:
    """A tiny model as `vision.load` gives it, without end tokens, and its processor."""
    return vision.VisionModel(tiny_vision.build(name)), Processor(name)


def images(prompt: str = PROMPT, seed: int = 0) -> list[Any]:
    """One for each mark."""
    return [tiny_vision.image(seed + i) for i in range(prompt.count(MARK))]


def expected(
    name: str,
    prompt: str = PROMPT,
    more: Sequence[int] = (),
    num_tokens: int = NUM_TOKENS,
    seed: int = 0,
    **how: Any,
) -> list[int]:
    """What mlx-vlm writes after a prompt and further tokens, from the beginning."""
    inputs = encoded(name, prompt, more, seed)
    model, processor = tiny_vision.build(name), Processor(name)
    # without a text's end, so that all texts are long
    processor.tokenizer.stopping_criteria = tiny_vision.Stops()
    steps = mlx_vlm.stream_generate(model, processor, "", **inputs, max_tokens=num_tokens, **how)
    return list(steps)[-1].token_ids


def encoded(name: str, prompt: str, more: Sequence[int], seed: int = 0) -> dict[str, mx.array]:
    """mlx-vlm's inputs, with tokens after those of the prompt."""
    inputs = Processor(name)(prompt, images(prompt, seed))
    ids = mx.concatenate([inputs["input_ids"], mx.array([list(more)], mx.int32)], axis=1)
    return inputs | {"input_ids": ids, "mask": mx.ones_like(ids)}


def written(name: str, prompt: Any = PROMPT, num_tokens: int = NUM_TOKENS, **how: Any) -> Any:
    """Tokens of ours, and the account; end tokens are tokens like others."""
    model, processor = load(name)
    pictures = how.pop("images", images(prompt) if isinstance(prompt, str) else [])
    drafter = how.pop("drafter", None)
    tokens, options = vision.read_prompt(
        model, processor, prompt, pictures, how.pop("prompt_cache", None)
    )
    options |= {"tokenizer": None, "num_draft_tokens": 4}
    out = list(sd.speculate(model, tokens, drafter, max_tokens=num_tokens, **options | how))
    return [token.token for token in out], out[-1].stats


def read_by_mlx_vlm(name: str, cache: list[Any], num_tokens: int) -> None:
    """Have mlx-vlm read the prompt and write a few tokens, on these caches."""
    processor, given = Processor(name), encoded(name, PROMPT, ())
    processor.tokenizer.stopping_criteria = tiny_vision.Stops()
    how: dict[str, Any] = {"max_tokens": num_tokens, "prompt_cache": cache}
    list(mlx_vlm.stream_generate(tiny_vision.build(name), processor, "", **given, **how))


class Listener:
    """A drafter that keeps the prompt it is shown."""

    prompt: Sequence[int] = ()

    def begin(self, prompt: Sequence[int], context: Any) -> ScriptedSession:
        self.prompt = list(prompt)
        return ScriptedSession(lambda start, limit: [])


def oracle(text: Sequence[int], wrong: float = 0.0) -> OracleDrafter:
    return OracleDrafter(text, VOCAB, wrong=wrong)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_and_its_place_decide_the_text(name):
    """Else a text would say nothing of how an image was read."""
    text = expected(name)
    assert text != expected(name, seed=7)
    assert text != expected(name, prompt=f"{START}{MARK}" + PROMPT.replace(START + MARK, ""))


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.1])
@pytest.mark.parametrize("prompt", [PROMPT, "no image in this one, the one without"])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_after_an_image_is_mlx_vlms_own(name, prompt, wrong):
    text = expected(name, prompt) if MARK in prompt else without_image(name, prompt)
    tokens, stats = written(name, prompt, drafter=oracle(text, wrong))
    assert tokens == text
    assert stats.drafted > 10
    if not wrong:
        assert stats.accepted == stats.drafted
    elif wrong > 1:
        assert not stats.accepted


def without_image(name: str, prompt: str) -> list[int]:
    ids = Processor(name).tokenizer.encode(prompt, add_special_tokens=False)
    processor = Processor(name)
    processor.tokenizer.stopping_criteria = tiny_vision.Stops()
    given = {"input_ids": mx.array([ids]), "max_tokens": NUM_TOKENS}
    return list(mlx_vlm.stream_generate(tiny_vision.build(name), processor, "", **given))[
        -1
    ].token_ids


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_a_text_on_lists_of_caches_is_mlx_vlms_own(wrong):
    """A recurrence and keys in each layer, in mlx-vlm's own list of the two."""
    prompt = "no image in this one, the one without"
    text = without_image("falcon_h1", prompt)
    tokens, stats = written("falcon_h1", prompt, drafter=oracle(text, wrong))
    assert tokens == text
    assert stats.accepted > 5
    caches = list(leaves(load("falcon_h1")[0].make_cache()))
    assert [type(cache).__name__ for cache in caches[:2]] == ["ArraysCache", "KVCache"]


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_read_in_small_parts_gives_the_same_text(name):
    text = expected(name, TWO, prefill_step_size=8)
    assert written(name, TWO, drafter=oracle(text), prefill_step_size=8)[0] == text


@pytest.mark.parametrize("reader", ["ours", "mlx-vlm's"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_goes_on_from_an_images_caches(name, reader):
    """A text goes on at the image's own positions, whoever read it and what came between."""
    model, _ = load(name)
    cache, first = model.make_cache(), expected(name, num_tokens=6)
    if reader == "ours":
        assert written(name, num_tokens=6, prompt_cache=cache, drafter=oracle(first))[0] == first
        written(name, TWO)
        written(name, NEXT)
    else:
        read_by_mlx_vlm(name, cache, 6)
    text = expected(name, more=[*first, *NEXT])
    tokens, stats = written(name, NEXT, prompt_cache=cache, drafter=oracle(text, 0.3))
    assert tokens == text
    assert 0 < stats.accepted < stats.drafted
    assert written(name, NEXT, prompt_cache=cache)[0] == expected(
        name, more=[*first, *NEXT, *text, *NEXT]
    )


@pytest.mark.parametrize("reader", ["ours", "mlx-vlm's"])
def test_what_the_caches_hold_is_drafted_from(reader):
    """An image's own tokens and the first turn; of mlx-vlm's reading what `history` says."""
    model, _ = load("qwen3_5")
    cache, first = model.make_cache(), expected("qwen3_5", num_tokens=6)
    held = encoded("qwen3_5", PROMPT, ())["input_ids"][0].tolist() + first
    how: dict[str, Any] = {"prompt_cache": cache}
    if reader == "ours":
        written("qwen3_5", num_tokens=6, **how)
    else:
        read_by_mlx_vlm("qwen3_5", cache, 6)
        how |= {"history": held}
    seen = Listener()
    text = expected("qwen3_5", more=[*first, *NEXT])
    assert written("qwen3_5", NEXT, drafter=seen, **how)[0] == text
    assert seen.prompt == held + NEXT


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_whose_reading_failed_can_be_read_again(name):
    """Its caches are taken for new ones, whose images are still to be read."""
    model, _ = load(name)
    cache, text = model.make_cache(), expected(name)

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    how = {"prompt_cache": cache, "prefill_step_size": 8}
    with pytest.raises(KeyboardInterrupt):
        written(name, TWO, prompt_progress_callback=stop, **how)
    assert written(name, drafter=oracle(text, 0.3), **how)[0] == text


@pytest.mark.parametrize("name", NAMES)
def test_texts_on_one_model_take_turns(name):
    """Each has its own image's positions, and none leaves anything with the model."""
    model, processor = load(name)
    texts = {PROMPT: expected(name), TWO: expected(name, TWO)}
    running = {}
    for prompt, text in texts.items():
        tokens, options = vision.read_prompt(model, processor, prompt, images(prompt))
        options |= {"drafter": oracle(text, 0.3), "max_tokens": NUM_TOKENS}
        running[prompt] = sd.speculate(model, tokens, **options)
    together = list(zip(*running.values(), strict=True))
    for number, prompt in enumerate(texts):
        assert [tokens[number].token for tokens in together] == texts[prompt]


@pytest.mark.parametrize("kept", ["an image's", "of three tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_the_model_keeps_what_it_kept(name, kept):
    """What is measured of passes, and texts of ours, leave mlx-vlm's own state on the model.

    Nor does it reach them: positions of three tokens would not do for a longer prompt.
    """
    model = tiny_vision.build(name)
    keeps = name.startswith("qwen")
    text = expected(name)
    if keeps:
        given = Processor(name)(TWO, images(TWO))
        ids, pixels = given.pop("input_ids"), given.pop("pixel_values")
        if kept == "an image's":
            mx.eval(model(ids, pixels, mask=None, **given).logits)
        else:  # pixels have it forget earlier ones
            cache = load(name)[0].make_cache()
            mx.eval(model.language_model(ids[:, :3], cache=cache, pixel_values=pixels).logits)
    before = private_arrays_of(model.language_model)
    assert keeps == any(value is not None for value in before.values())
    load.cache_clear()  # so that passes are measured anew
    assert written(name, drafter=oracle(text, 0.3), num_draft_tokens="auto")[0] == text
    after = private_arrays_of(model.language_model)
    assert before.keys() == after.keys()
    assert all(after[key] is value for key, value in before.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:specdec_mlx. this model .* verifies no tree")
def test_a_tree_is_right_or_refused(name):
    """Where positions are counted by the row, as with several axes of them, chains are drafted."""
    text = expected(name)

    def tree(start: int, limit: int) -> Draft:
        ahead = text[start : start + limit]
        wrong = [(token + 1) % VOCAB for token in ahead[:1]]
        nodes = [*wrong, *ahead] if len(ahead) > 1 else []
        return Draft(nodes[:5], parents=[-1, -1, 1, 2, 3][: len(nodes[:5])])

    tokens, stats = written(name, drafter=ScriptedDrafter(tree), num_draft_tokens=5)
    assert tokens == text
    if name in ("llava", "gemma3"):
        assert stats.accepted > NUM_TOKENS // 2
    else:
        assert not stats.accepted  # of each tree its first chain, which is wrong


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_one_text_whatever_drafts(name):
    how = {"sampler": sd.Sampling(temp=0.8), "seed": 3}
    plain = written(name, **how)[0]
    assert plain != expected(name)
    assert written(name, **how, drafter=oracle(plain, 0.3))[0] == plain


def test_generate_and_stream_generate_take_the_usual_options(monkeypatch):
    """Text, end tokens, chat messages and the account, as of the library's own."""
    model, processor = load("qwen2_5_vl")
    text = vision.generate(model, processor, PROMPT, images(), max_tokens=12, drafter=None)
    whole = mlx_vlm.generate(model.model, processor, PROMPT, images(), max_tokens=12)
    assert text.tokens == whole.token_ids
    pieces = vision.stream_generate(model, processor, PROMPT, images(), max_tokens=12)
    responses = list(pieces)
    assert [r.token for r in responses] == whole.token_ids
    assert responses[0].prompt_tokens == whole.prompt_tokens
    assert responses[-1].finish_reason == "length"
    ended = OracleDrafter([*whole.token_ids[:3], IDS["<|end|>"]], VOCAB)
    assert vision.generate(model, processor, PROMPT, images(), max_tokens=12, drafter=ended) == text
    end = whole.token_ids[3]
    monkeypatch.setattr(model.model.config, "eos_token_id", [end])
    short = vision.generate(model, processor, PROMPT, images(), max_tokens=12).tokens
    assert short == whole.token_ids[: 1 + whole.token_ids.index(end)]
    assert short == mlx_vlm.generate(model.model, processor, PROMPT, images()).token_ids


def test_what_cannot_be_is_refused_with_what_can():
    model, processor = load("qwen2_5_vl")
    read = vision.read_prompt
    for name in NOT_TAKEN:
        with pytest.raises(ValueError, match=f"{name}=8: expected None"):
            vision.stream_generate(model, processor, PROMPT, images(), **{name: 8})
    with pytest.raises(ValueError, match=r"vision\.load"):
        read(model.model, processor, PROMPT, images())
    with pytest.raises(ValueError, match=r"mlx_vlm\.load"):
        vision.VisionModel(model.model.language_model)
    cache = model.make_cache()
    written("qwen2_5_vl", num_tokens=2, prompt_cache=cache)
    with pytest.raises(PromptError, match="whole conversation"):
        read(model, processor, PROMPT, images(), cache)
    read_elsewhere = model.make_cache()
    mx.eval(model.language_model(mx.array([[1, 2]]), cache=read_elsewhere).logits)
    with pytest.raises(ValueError, match="read_prompt was given"):
        next(sd.speculate(model, [3], prompt_cache=read_elsewhere))
    with pytest.raises(ValueError, match="never kv_bits"):
        written("qwen2_5_vl", kv_bits=8, kv_group_size=32, quantized_kv_start=4)


def test_a_prompt_that_is_read_in_one_pass_is_refused(monkeypatch):
    """As of prefix language models, whose first token sees the last."""
    model, processor = load("llava")
    assert vision.read_prompt(model, processor, PROMPT, images())
    monkeypatch.setattr(model.model, "no_chunked_prefill", True, raising=False)
    with pytest.raises(PromptError, match="in one pass"):
        vision.read_prompt(model, processor, PROMPT, images())


def test_load_reads_a_folder_and_messages_go_through_its_template(tmp_path: Path):
    """As `mlx_vlm.load` and `apply_chat_template` have it; another folder is said to be none."""
    with pytest.raises(ValueError, match=r"config\.json"):
        vision.load(tmp_path)
    model, processor = vision.load(tiny_vision.write_folder(tmp_path))
    messages = [{"role": "user", "content": "What is it that is in this one?"}]
    asked = mlx_vlm.apply_chat_template(processor, model.model.config, messages, num_images=1)
    assert asked.startswith(START)
    whole = mlx_vlm.generate(model.model, processor, asked, images(), max_tokens=12)
    for image in images():
        image.save(path := str(tmp_path / "image.png"))
    for given in (images(), path):
        text = vision.generate(model, processor, messages, given, max_tokens=12)
        assert text.tokens == whole.token_ids
