"""Reading the target: rows of kept positions, with bit-equal logits, and nothing left over."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from threading import Barrier
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

import specdec_mlx as sd
import tiny
from lossless import PROMPT, plain_text
from scripted import OracleDrafter
from selection import in_one_test
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Draft, DraftContext, FeatureRows, Features
from specdec_mlx.errors import UnreadableError
from specdec_mlx.models import anatomy as watching
from specdec_mlx.models.anatomy import StateReader
from specdec_mlx.target import Verifier

IDS = mx.array(PROMPT)
NUM_TOKENS = 40
ALL = Features(layers=(0, 1), head_input=True, top=3)

MODELS = ["llama", "llama4", "deepseek_v3", "mamba2", "qwen3_next", "gemma3n"]
"""The last has several streams side by side."""

built = cache(tiny.build)


@cache
def text_of(name: str) -> tuple[int, ...]:
    return tuple(plain_text(built(name), PROMPT, NUM_TOKENS).tokens)


def fed(model: nn.Module, ids: mx.array = IDS) -> mx.array:
    """Logits [n, V] of one pass."""
    return model(ids[None], cache=make_prompt_cache(model))[0]


def read(model: nn.Module, ids: mx.array = IDS, wanted: Features = ALL) -> FeatureRows:
    """What one pass shows."""
    reading = StateReader(model, wanted)
    reading.read(lambda: fed(model, ids))
    assert reading.features is not None
    return reading.features


def arrays(rows: FeatureRows) -> list[mx.array]:
    there = [*rows.layers.values(), rows.head_input, rows.top_tokens]
    return [array for array in there if array is not None]


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def near(a: mx.array, b: mx.array, tolerance: float = 1e-3) -> bool:
    return bool(mx.allclose(a, b, rtol=tolerance, atol=tolerance).item())


def test_rows_are_the_layers_outputs_the_heads_input_and_the_likeliest_tokens() -> None:
    """Against a pass that is spelled out, layer by layer, with mlx-lm's own modules."""
    model, rows = built("llama"), read(built("llama"))
    h = model.model.embed_tokens(IDS[None])
    mask = create_attention_mask(h, None)
    for i, layer in enumerate(model.layers):
        h = layer(h, mask)
        assert i not in rows.layers or mx.array_equal(rows.layers[i], h[0])
    assert rows.layers.keys() == {0, 1}
    assert mx.array_equal(rows.head_input, model.model.norm(h)[0])
    assert rows.top_tokens.tolist() == mx.argsort(-fed(model), axis=-1)[:, :3].tolist()
    logits = mx.array([[0.1, 3.0, 2.0], [5.0, -1.0, 6.0]])
    assert watching.top_tokens(logits, 9).tolist() == [[1, 2, 0], [2, 0, 1]], (
        "no more than there are"
    )


def quantized(model: nn.Module) -> nn.Module:
    nn.quantize(model, group_size=32, bits=4)
    return model


def adapted() -> nn.Module:
    """With adapters in the layers and around the head."""
    model = tiny.build("llama")
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
    model.lm_head = LoRALinear.from_base(model.lm_head, r=4)
    model.lm_head.lora_b = mx.random.normal(model.lm_head.lora_b.shape)
    return model


VARIANTS = {
    "plain": lambda: tiny.build("llama"),
    "tied": lambda: tiny.build("llama", tie_word_embeddings=True),
    "quantized, tied": lambda: quantized(tiny.build("gemma3_text")),
    "adapters": adapted,
    "bfloat16": lambda: tiny.build("llama", mx.bfloat16),
}


@in_one_test("variant", [*VARIANTS, "quantized after it was read"])
def test_logits_are_bit_equal_and_the_heads_input_makes_them(variant: str) -> None:
    """For quantized models, adapters, also around the head, and tied embeddings."""
    model = VARIANTS.get(variant, VARIANTS["plain"])()
    if variant not in VARIANTS:
        read(model)  # nothing is remembered of the modules that it had
        quantized(model)
    reading, before = StateReader(model, ALL), classes(model)
    logits = reading.read(lambda: fed(model))
    assert mx.array_equal(logits, fed(model))
    head = getattr(model, "lm_head", None) or model.model.embed_tokens.as_linear
    assert reading.features is not None
    assert mx.array_equal(head(reading.features.head_input[None])[0], logits)
    assert classes(model) == before


@dataclass(eq=False)
class Reader:
    """Drafts what another drafter does, and keeps what it is shown; its own only session."""

    drafter: OracleDrafter
    features: Features = ALL
    shown: list[FeatureRows] = field(default_factory=list, repr=False)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Reader:
        self.session, self.length, self.shown = self.drafter.begin(prompt, context), len(prompt), []
        return self

    def propose(self, limit: int) -> Draft:
        return self.session.propose(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)
        assert sum(len(part.top_tokens) for part in self.shown) == self.length - 1
        self.session.observe(tokens)

    def see(self, features: FeatureRows) -> None:
        mx.eval(arrays(features))
        self.shown.append(features)


def reader(name: str, features: Features = ALL) -> Reader:
    vocab_size = fed(built(name)).shape[-1]
    return Reader(OracleDrafter(text_of(name), vocab_size, wrong=0.4), features)


def speculate(name: str, drafter: sd.Drafter, **options: Any) -> Generator[sd.generation.Token]:
    options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": 4, "prefill_step_size": 5, **options}
    return sd.speculate(built(name), PROMPT, drafter, **options)


def expected(name: str, length: int = len(PROMPT) + NUM_TOKENS) -> FeatureRows:
    """Rows of a text that is read in one pass: prompt + what was generated but the last token."""
    return read(built(name), mx.array([*PROMPT, *text_of(name)][: length - 1]))


def same_rows(got: FeatureRows, wanted: FeatureRows) -> bool:
    both = list(zip(arrays(got), arrays(wanted), strict=True))
    return all(a.shape == b.shape and near(a, b) for a, b in both)


def one_by_one(logprobs: mx.array) -> mx.array:
    """A sampler that may remember what it saw: its rows are drawn one at a time."""
    return mx.argmax(logprobs, axis=-1)


@in_one_test(("name", "sampler"), zip(MODELS, cycle([None, one_by_one]), strict=False))
def test_a_drafter_is_shown_each_kept_position_as_one_pass_over_the_text_has_it(name, sampler):
    """The prompt's chunk by chunk, those of rejected drafts never, replayed ones once."""
    drafter = reader(name)
    items = list(speculate(name, drafter, sampler=sampler))
    assert [item.token for item in items] == list(text_of(name))
    assert 0 < items[-1].stats.acceptance_rate < 1
    sizes = [len(part.head_input) for part in drafter.shown]
    assert sizes[:3] == [5, 5, 3], "the prompt, but for its last token, in chunks"
    shown = FeatureRows.joined(drafter.shown)
    assert same_rows(shown, expected(name))
    turned = shown.rows([*range(1, len(shown.head_input)), 0])
    assert not same_rows(turned, expected(name)), "off by one position the comparison fails"


def test_rows_of_a_round_in_several_passes_are_all_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending tokens that one pass has no room for are fed before it, and read as well."""
    model, wanted = built("mamba2"), list(text_of("mamba2"))
    verifier = Verifier(model, Rollback(make_prompt_cache(model)), probe=False)
    monkeypatch.setattr(verifier, "measure_width", lambda: 3)
    verifier.tap(ALL)
    under_way = verifier.launch(PROMPT, Draft(wanted[:2]), 0)
    assert under_way.read().tokens == wanted[:3]
    assert under_way.num_fed == len(PROMPT) + 2
    assert under_way.features is not None
    assert same_rows(under_way.features, expected("mamba2", len(PROMPT) + 3))


def test_each_part_of_a_drafter_is_shown_what_it_wants() -> None:
    """Two that read, behind one that does not: each sees every kept position, whoever drafted."""
    first = reader("llama", Features(layers=(1,), top=1))
    second = reader("llama", Features(head_input=True, top=3))
    drafter = sd.drafters.FirstOf(sd.PromptLookupDrafter(min_ngram=1), first, second)
    items = list(speculate("llama", drafter))
    assert [item.token for item in items] == list(text_of("llama"))
    for one in (first, second):
        assert same_rows(FeatureRows.joined(one.shown), expected("llama").only(one.features))


def test_nothing_is_watched_for_a_drafter_that_does_not_ask(monkeypatch):
    monkeypatch.setattr(StateReader, "read", None)
    assert list(sd.speculate(built("llama"), PROMPT, sd.PromptLookupDrafter(), max_tokens=9))


def test_between_passes_and_after_an_exception_in_one_the_model_is_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While tokens are handed out and after `close` no module has another class. An exception
    reaches the caller, and the next pass is read again."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    model = built("llama")
    reading, before = StateReader(model, ALL), classes(model)
    items = speculate("llama", reader("llama"))
    for _ in range(5):
        next(items)
        assert classes(model) == before
    items.close()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(model.layers[1].mlp), "__call__", interrupted)
        reading.read(lambda: fed(model))
    assert classes(model) == before
    assert not watching._num_passes
    assert not watching._watchers.get()
    assert reading.features is None
    assert mx.array_equal(reading.read(lambda: fed(model)), fed(model))


def test_a_pass_in_another_thread_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two passes at the same time, on one model; the class comes back with the last of them."""
    model = tiny.build("llama")
    before, meeting, mlp = classes(model), Barrier(2), type(model.layers[0].mlp)
    call = mlp.__call__

    def meet(self: nn.Module, x: mx.array) -> mx.array:
        meeting.wait(timeout=20)
        return call(self, x)  # type: ignore[no-any-return]

    texts = [IDS, IDS + 1]
    alone = [arrays(read(model, ids)) for ids in texts]
    mx.eval(alone)
    monkeypatch.setattr(mlp, "__call__", meet)

    def run(ids: mx.array) -> list[mx.array]:
        with mx.stream(mx.new_stream(mx.cpu)):
            mx.eval(found := arrays(read(model, ids)))
        return found

    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, texts))
    for rows, own in zip(together, alone, strict=True):
        assert all(map(mx.array_equal, rows, own))
    assert classes(model) == before
    assert not watching._num_passes


REFUSED = [
    ("llama", Features(layers=(3,)), "Layer 3 .* it has layers 0 to 2"),
    ("llama", Features(layers=(-1,)), "Layer -1 .* it has layers 0 to 2"),
    ("talkie", Features(head_input=True), "no module makes its logits"),
    ("iquestloopcoder", Features(layers=(0,)), "called 0 times a pass"),
]


@in_one_test(("name", "wanted", "message"), REFUSED)
def test_what_a_target_does_not_show_is_refused_by_name(name, wanted, message):
    """Before anything is computed, and the model is left as it was."""
    before = classes(built(name))
    with pytest.raises(UnreadableError, match=message):
        list(sd.speculate(built(name), PROMPT, Reader(OracleDrafter([], 100), wanted)))
    assert classes(built(name)) == before
