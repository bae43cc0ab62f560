"""Draft models with fewer bits, fewer layers and fewer tokens to choose from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import specdec_mlx as sd
import tiny
import tiny_text
from command_line import both_ways, run
from exact import (
    COIN_RULES,
    NUM_STATES,
    ByCoupling,
    ByMatch,
    ByRule,
    Drawn,
    Rounds,
    Source,
    rolled,
    up_to,
)
from lossless import PROMPT, ROUGH, Case, largest_difference, plain_text, spoken
from scripted import Recorder
from selection import in_one_test
from specdec_mlx.drafters.draft_models import Lighter, read_vocabulary
from specdec_mlx.drafters.lighter import (
    OUTSIDE,
    SubVocabulary,
    first_layers,
    quantized,
)
from specdec_mlx.types import key_of
from tiny_model_folder import write_model_folder

RUNS = ("llama", "gemma3_text", "mamba2", "qwen3_next", "falcon_h1", "deepseek_v3", "gpt2")
"""Architectures of every kind; beside them, below, those that are refused."""
TOKENS = mx.array([PROMPT])


def logits_of(model: nn.Module) -> mx.array:
    logits: mx.array = model(TOKENS, cache=make_prompt_cache(model))
    return logits.astype(mx.float32)


def arrays_of(model: nn.Module) -> dict[str, int]:
    """Which arrays a model holds, by name."""
    return {name: id(array) for name, array in tree_flatten(model.parameters())}


LIGHTER: dict[str, Callable[[nn.Module], nn.Module]] = {
    "quantized": lambda model: quantized(model, 4),
    "one layer": lambda model: first_layers(model, 1),
    "few tokens": lambda model: SubVocabulary(model, range(20, 60)),
    "all of it": lambda model: SubVocabulary(first_layers(quantized(model, 8), 2), range(9)),
}


@in_one_test("way", LIGHTER)
def test_the_model_that_was_given_is_left_alone(way: str) -> None:
    """The same arrays, under the same names, and the same logits."""
    model = tiny.build("llama")
    arrays, logits = arrays_of(model), logits_of(model)
    lighter = LIGHTER[way](model)
    assert not mx.allclose(logits_of(lighter), logits, atol=1e-3)
    assert arrays_of(model) == arrays
    assert mx.array_equal(logits_of(model), logits)


@in_one_test("way", LIGHTER)
def test_a_lighter_draft_model_has_a_key_of_its_own(way: str) -> None:
    """The same in every process, and for the same content."""
    model, again = tiny.build("llama"), tiny.build("llama")
    keys = [key_of(sd.ModelDrafter(m)) for m in (model, LIGHTER[way](model), LIGHTER[way](again))]
    assert keys[0] != keys[1] == keys[2]


def test_two_vocabularies_of_one_size_have_two_keys() -> None:
    """Also where they differ in one token only."""
    model = tiny.build("llama")
    one, other = (set(range(40)) - {left_out} for left_out in (5, 6))
    keys = {key_of(sd.ModelDrafter(SubVocabulary(model, ids))) for ids in (one, other)}
    assert len(keys) == 2


@pytest.mark.parametrize("way", LIGHTER)
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_greedy_text_is_the_targets_own(name: str, way: str) -> None:
    """And what is proposed is what the lighter model would write."""
    case = Case(name, num_tokens=30)
    model = LIGHTER[way](case.model)
    recorder = Recorder(sd.ModelDrafter(model))
    items = list(case.speculate(recorder, 4))
    assert spoken(items).deviation(case.plain) <= case.tolerance
    for text, proposed in recorder.proposals[2::6]:
        assert proposed == plain_text(model, text, len(proposed)).tokens


# Fewer bits -------------------------------------------------------------------------------------


def test_a_layer_takes_the_largest_group_that_fits() -> None:
    """64 and 32; what is 96 wide takes 32."""
    model = quantized(tiny.build("llama"), 4)
    found = {
        path.rpartition(".")[2]: (module.bits, module.group_size)
        for path, module in model.named_modules()
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)
    }
    assert found["q_proj"] == found["embed_tokens"] == found["lm_head"] == (4, 64)
    assert found["down_proj"] == (4, 32)


def test_what_a_model_says_of_its_own_layers_counts() -> None:
    """mlx-lm's `quant_predicate`: False leaves a layer alone, a dictionary is taken as it is."""
    model = tiny.build("llama")

    def own(path: str, module: nn.Module) -> bool | dict[str, int]:
        return {"group_size": 32, "bits": 8} if "lm_head" in path else "q_proj" not in path

    model.quant_predicate = own
    new = quantized(model, 4)
    assert (new.lm_head.bits, new.lm_head.group_size) == (8, 32)
    assert isinstance(new.layers[0].self_attn.q_proj, nn.Linear)
    assert new.layers[0].self_attn.k_proj.bits == 4


WRONG_BITS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "a number of bits that MLX lacks": (
        lambda: tiny.build("llama"),
        7,
        "of 7 bits: expected one of 2, 3, 4, 5, 6, 8",
    ),
    "a model that is quantized already": (
        lambda: quantized(tiny.build("llama"), 4),
        3,
        r"quantized already \(.*: 4 bits\). Leave the bits out",
    ),
    "widths that no group fits": (
        lambda: tiny.build("llama", hidden_size=40, num_attention_heads=4, head_dim=8),
        4,
        "is 40 wide. Widths must be multiples of 32",
    ),
}


@in_one_test("what", WRONG_BITS)
def test_what_cannot_be_quantized_is_said_in_words(what: str) -> None:
    make, bits, words = WRONG_BITS[what]
    with pytest.raises(sd.errors.DraftModelError, match=words):
        quantized(make(), bits)


# Fewer layers -----------------------------------------------------------------------------------

CANNOT_BE_CUT: dict[str, str] = {
    "afm7": "has no single list of layers",  # two lists, one of which has no caches
    "phi3small": "does not run on its first 1 layers alone: a text in two parts",
}
"""Architectures whose layers are not to be had alone, and what is said. A pass of the second over
several tokens sees its own future, cut or not."""


@in_one_test("name", [*RUNS, *CANNOT_BE_CUT])
def test_all_layers_are_the_model_itself(name: str) -> None:
    """For every kind of architecture; where there is no list of layers, it is refused by name."""
    model = tiny.build(name)
    if name in CANNOT_BE_CUT:
        with pytest.raises(sd.errors.DraftModelError, match=f"{name} {CANNOT_BE_CUT[name]}"):
            first_layers(model, 1)
        return
    whole = first_layers(model, len(model.layers))
    assert mx.allclose(logits_of(whole), logits_of(model), atol=1e-5)
    assert len(make_prompt_cache(whole)) == len(make_prompt_cache(model))


@in_one_test("name", ["llama", "gemma3_text"])
@in_one_test("num_layers", [1, 2])
def test_the_first_layers_are_an_early_exit(name: str, num_layers: int) -> None:
    """As if the others added nothing to the residual stream."""
    model = tiny.build(name)
    cut = logits_of(first_layers(model, num_layers))
    for layer in model.layers[num_layers:]:
        for path, module in layer.named_modules():
            if path.endswith(("o_proj", "down_proj")):
                module.weight = mx.zeros_like(module.weight)
    assert mx.allclose(cut, logits_of(model), atol=1e-5)


NEEDS_ITS_LAST = (*CANNOT_BE_CUT, "kimi_k3")
"""Architectures that are refused without their last layer."""


@in_one_test("name", [*RUNS, *NEEDS_ITS_LAST])
def test_the_caches_of_the_first_layers_are_enough(name: str) -> None:
    """A text in passes of any size has the logits of the text as a whole; for every kind,
    without its last layer."""
    model = tiny.build(name)
    num_layers = max(1, len(model.layers) - 1)
    if name in NEEDS_ITS_LAST:
        with pytest.raises(sd.errors.DraftModelError, match=r"Leave|leave"):
            first_layers(model, num_layers)
        return
    short = first_layers(model, num_layers)
    ids, caches = mx.array([PROMPT]), make_prompt_cache(short)
    parts = [short(part, cache=caches) for part in mx.split(ids, [5, 6, 10], axis=1)]
    whole = short(ids, cache=make_prompt_cache(short))
    assert largest_difference(mx.concatenate(parts, axis=1), whole) < ROUGH.get(name, (1e-3,))[0]
    assert not caches[-1].empty()


@in_one_test("num_layers", [0, -1, 4])
def test_layers_that_there_are_not_are_refused(num_layers: int) -> None:
    with pytest.raises(sd.errors.DraftModelError, match="expected a number from 1 to 3"):
        first_layers(tiny.build("llama"), num_layers)


# Fewer tokens -----------------------------------------------------------------------------------

NO_HEAD_FOUND = ("talkie",)
"""Architectures whose head is something of their own: here an array, and no layer."""

SOME_TOKENS = [3, 1, 77, 50, 51, 4, 3]


@in_one_test("name", [*RUNS, *NO_HEAD_FOUND])
def test_logits_of_the_tokens_chosen_are_the_models_own(name: str) -> None:
    """For every kind of architecture, tied or not; those of all others are out of reach."""
    model = tiny.build(name)
    if name in NO_HEAD_FOUND:
        with pytest.raises(sd.errors.DraftModelError, match="is not found"):
            SubVocabulary(model, SOME_TOKENS)
        return
    expected = logits_of(model)
    got = logits_of(SubVocabulary(model, SOME_TOKENS))
    assert got.shape == expected.shape
    inside = mx.array(SOME_TOKENS)
    assert mx.allclose(got[..., inside], expected[..., inside], atol=1e-4)
    outside = mx.array([i for i in range(got.shape[-1]) if i not in SOME_TOKENS])
    assert (got[..., outside] == OUTSIDE).all()


@in_one_test("tied", [False, True])
@in_one_test("bits", [None, 4])
def test_the_head_has_as_many_rows_as_there_are_tokens(tied: bool, bits: int | None) -> None:
    """The embeddings that are read stay whole."""
    model = tiny.build("llama", tie_word_embeddings=tied)
    model = model if bits is None else quantized(model, bits)
    narrow = SubVocabulary(model, SOME_TOKENS)
    num_rows = {
        path: module.weight.shape[0]
        for path, module in narrow.named_modules()
        if path.endswith(("lm_head", "embed_tokens.embedding", "embed_tokens.head"))
    }
    assert 6 in num_rows.values()
    assert num_rows.get("model.model.embed_tokens.embedding", 128) == 128
    inside = mx.array(SOME_TOKENS)
    same = mx.allclose(logits_of(narrow)[..., inside], logits_of(model)[..., inside], atol=1e-4)
    assert same


def test_ids_that_there_are_not_are_refused() -> None:
    model = tiny.build("llama")
    for ids, words in (([], "no token"), ([5, 128], "ids 5 to 128"), ([-1, 5], "ids -1 to 5")):
        with pytest.raises(sd.errors.DraftModelError, match=f"{words}: expected ids from 0 to 127"):
            SubVocabulary(model, ids)


def test_a_head_that_is_something_else_is_refused() -> None:
    """Not narrowed to what only looks like it."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.build("llama")

        @property
        def layers(self) -> Any:
            return self.inner.layers

        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            return self.inner(ids, cache=cache)[..., ::-1]

    with pytest.raises(sd.errors.DraftModelError, match="no layer or embedding of 128 rows"):
        SubVocabulary(Twice(), SOME_TOKENS)


FIXED = mx.array([100, 102, 103, 127])


def set_there(logits: mx.array) -> mx.array:
    logits[..., FIXED] = -mx.inf
    return logits


TOUCHES: dict[str, Callable[[mx.array], mx.array]] = {
    "set": set_there,
    "added to": lambda logits: logits.at[..., FIXED].add(2.0),
    "scaled": lambda logits: logits.at[..., FIXED].multiply(0.5),
    "read": lambda logits: logits - logits[..., 100:101],
    "one of all": lambda logits: logits.at[..., 3].add(1.0),
}
"""Ways to treat the logits of some ids otherwise than those of all others."""


@in_one_test("way", TOUCHES)
def test_a_model_that_knows_ids_of_its_logits_is_refused_before_they_are_cut(way: str) -> None:
    """It never runs on fewer logits than it was made for: ids past their end are foreign memory."""
    widths: list[int] = []

    class Knows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny.build("llama")

        @property
        def layers(self) -> Any:
            return self.inner.layers

        def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
            logits = self.inner(ids, cache=cache)
            widths.append(logits.shape[-1])
            if widths[-1] <= 127:
                raise IndexError("would have written beyond the logits")
            return TOUCHES[way](logits)

    with pytest.raises(sd.errors.DraftModelError, match="is not found"):
        SubVocabulary(Knows(), SOME_TOKENS)
    assert set(widths) == {128}


WRITES_AT_FIXED_IDS = """
import mlx.core as mx
import numpy as np
import specdec_mlx as sd
import tiny
from specdec_mlx.drafters.lighter import SubVocabulary

guards = [mx.ones((size,)) for size in (1 << k for k in range(6, 20)) for _ in range(40)]
mx.eval(guards)
model = tiny.build("phi3small")
try:
    print(type(SubVocabulary(model, range(40))).__name__)
except sd.errors.DraftModelError as error:
    print("all of them by the same rule" in str(error))
print(sum(int((np.array(guard) != 1).sum()) for guard in guards))
"""


def test_no_foreign_memory_is_written() -> None:
    """mlx-lm's phi3small sets logits of ids from 100256 on; in a process of its own."""
    folder = str(Path(__file__).parent)
    ended = subprocess.run(
        [sys.executable, "-c", WRITES_AT_FIXED_IDS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, folder])},
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["True", "0"]), ended.stderr


class ByState(nn.Module):
    """A source of the enumeration as a model: the state is its input, logits are log p."""

    layers = ()

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_STATES, NUM_STATES)
        self.embed.weight = mx.eye(NUM_STATES)
        self.lm_head = nn.Linear(NUM_STATES, source.vocab_size, bias=False)
        self.lm_head.weight = mx.array(np.log(source.probs.T).astype(np.float32))

    def make_cache(self) -> list[Any]:
        return []

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.lm_head(self.embed(ids))
        return logits


def narrowed(source: Source, tokens: list[int], temp: float = 1.0) -> Source:
    """What a drafter draws from if its model chooses among `tokens` only."""
    model = SubVocabulary(ByState(source), tokens)
    logits = model(mx.arange(NUM_STATES)[None], cache=[])[0]
    probs = np.array(mx.exp(sd.Sampling(temp).log_distribution(logits)), np.float64)
    return Source(probs / probs.sum(axis=-1, keepdims=True))


TARGET = rolled([0.4, 0.3, 0.2, 0.1])
DRAFT = rolled([0.1, 0.4, 0.3, 0.2])
DECIDING = {name: ByRule(rule) for name, rule in COIN_RULES.items()}
DECIDING |= {"match": ByMatch(), "coupled": ByCoupling()}  # type: ignore[dict-item]


@pytest.mark.parametrize("tokens", [[0, 2, 3], [1, 2], [3]], ids=str)
@pytest.mark.parametrize("rule", DECIDING)
def test_texts_keep_the_targets_distribution(rule: str, tokens: list[int]) -> None:
    """Every outcome of two rounds of drafts on a sub-vocabulary, in float64."""
    draft = narrowed(DRAFT, tokens)
    assert (draft.probs > 0).sum(axis=-1).tolist() == [len(tokens)] * NUM_STATES
    for length in (1, 2, 3):
        rounds = Rounds(TARGET, Drawn(draft, up_to(length)), DECIDING[rule])
        assert rounds.total_variation(2, 4) < 1e-12


@in_one_test("rule", COIN_RULES)
def test_the_whole_vocabularys_distribution_is_not_what_they_were_drawn_from(rule: str) -> None:
    """Declared instead, it is found out: the test above can fail."""
    wrong = Drawn(narrowed(DRAFT, [0, 2, 3]), up_to(2), declared=DRAFT)
    assert Rounds(TARGET, wrong, DECIDING[rule]).total_variation(2, 4) > 1e-2


def test_drafts_are_drawn_from_the_sub_vocabulary() -> None:
    """All of q lies on it, and q is normalised."""
    model = tiny_text.model()
    chosen = list(range(40, 90))
    recorder = Recorder(sd.ModelDrafter(SubVocabulary(model, chosen)))
    options: dict[str, Any] = {"sampler": sd.Sampling(1.0), "seed": 2, "draft_length": 4}
    emitted = [t.token for t in sd.speculate(model, PROMPT, recorder, max_tokens=80, **options)]
    drafted = {token for _, proposed in recorder.proposals for token in proposed}
    assert drafted <= set(chosen)
    assert not set(emitted) <= set(chosen)


class Forbidding:
    """A logits processor that allows only some tokens."""

    pure = True

    def __init__(self, allowed: range) -> None:
        self.allowed = allowed

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        ids = mx.arange(logits.shape[-1])
        inside = (ids >= self.allowed.start) & (ids < self.allowed.stop)
        return mx.where(inside, logits, -mx.inf)


@in_one_test("temp", [0.0, 0.1, 1.5])
def test_a_processor_may_forbid_the_whole_sub_vocabulary(temp: float) -> None:
    """As a grammar may: something is drafted then, with a distribution of its own."""
    model = tiny_text.model()
    tokens = sd.speculate(
        model,
        PROMPT,
        sd.ModelDrafter(SubVocabulary(model, range(40, 90))),
        max_tokens=20,
        sampler=sd.Sampling(temp),
        draft_length=3,
        logits_processors=[Forbidding(range(100, 110))],
    )
    assert {token.token for token in tokens} <= set(range(100, 110))


# On the command line ----------------------------------------------------------------------------

TEXT = "the cat in the hat and the other cat in the hat"


@cache
def tokenizer() -> Any:
    return tiny_text.tokenizer()


def test_a_vocabulary_is_read_from_a_text_or_from_ids(tmp_path: Path) -> None:
    """Ranked by how often each token occurs, or in the order given."""
    text, ids = tmp_path / "text.txt", tmp_path / "ids.json"
    text.write_text(TEXT)
    ids.write_text(json.dumps([9, 4, 6]))
    encoded = tokenizer().encode(TEXT, add_special_tokens=False)
    found = read_vocabulary(text, tokenizer())
    assert sorted(found) == sorted(set(encoded))
    counts = [encoded.count(token) for token in found]
    assert counts == sorted(counts, reverse=True)
    assert read_vocabulary(ids, tokenizer()) == [9, 4, 6]


@in_one_test("content", ["[]", "{}", "[1, 2.5]", '["a"]', "[1", "5"])
def test_a_vocabulary_that_is_none_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ids.json"
    path.write_text(content)
    with pytest.raises(sd.errors.DraftModelError, match="Draft vocabulary"):
        read_vocabulary(path, tokenizer())
    path = tmp_path / "empty.txt"
    path.write_text("")
    with pytest.raises(sd.errors.DraftModelError, match="expected a text"):
        read_vocabulary(path, tokenizer())


def test_the_end_of_a_text_is_always_among_the_tokens(tmp_path: Path) -> None:
    """Else the last token of an answer could never be drafted."""
    path = tmp_path / "ids.json"
    path.write_text("[9, 4, 6]")
    lighter = Lighter(vocabulary=path, vocabulary_size=2).applied_to(tiny_text.model(), tokenizer())
    reached = (logits_of(lighter)[0, -1] != OUTSIDE).tolist()
    assert [i for i, is_reached in enumerate(reached) if is_reached] == sorted(  # type: ignore[arg-type]
        {4, 9, *tokenizer().eos_token_ids}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model_folder(root / "model")
    (root / "text.txt").write_text(TEXT)
    return root


def accepted(folders: Path, *flags: str) -> tuple[str, int]:
    """The text, and how many of its tokens were drafted, with the target as the draft model."""
    model = str(folders / "model")
    draft = ("--draft-model", model, *flags) if flags else ()
    done = run(
        *("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "60"),
        *("--draft-length", "4", *draft),
    )
    assert done.returncode == 0, done.stderr
    counted = done.stdout.partition("accepted ")[2].partition(" of")[0]
    return done.stdout.split("==========\n")[1], int(counted)


@both_ways
def test_each_flag_makes_another_draft_model_and_the_same_text(folders: Path) -> None:
    """The target itself, lighter: it is not always right any more."""
    vocabulary = ("--draft-vocabulary", str(folders / "text.txt"))
    expected, perfect = accepted(folders, "--drafter", "model")
    assert perfect == 47  # all but the first token's, and those after whole drafts
    counts = []
    for flags in (
        ("--draft-bits", "2"),
        ("--draft-layers", "1"),
        vocabulary,
        (*vocabulary, "--draft-vocabulary-size", "3"),
        ("--draft-bits", "2", "--draft-layers", "1", *vocabulary),
    ):
        text, count = accepted(folders, *flags)
        assert text == expected
        counts.append(count)
    assert max(counts) < perfect
    assert counts[3] < counts[2]


WRONG: dict[str, str] = {
    "generate --draft-bits 4": "--draft-bits: give --draft-model MODEL as well",
    "server --draft-layers 4": "--draft-layers: give --draft-model MODEL as well",
    "bench --draft-layers 4": "--draft-layers: give --draft-model MODEL as well",
    "check --draft-vocabulary x": "--draft-vocabulary: give --draft-model MODEL as well",
    "generate --draft-model MODEL --draft-bits 7": "expected one of 2, 3, 4, 5, 6, 8",
    "chat --draft-model MODEL --draft-layers 99": "expected a number from 1 to",
    "server --draft-model MODEL --draft-layers 99": "expected a number from 1 to",
    "bench --draft-model MODEL --draft-bits 9": "expected one of 2, 3, 4, 5, 6, 8",
    "check --draft-model MODEL --draft-bits 9": "expected one of 2, 3, 4, 5, 6, 8",
    "generate --draft-model MODEL --draft-vocabulary no.txt": "no.txt",
    "generate --draft-model MODEL --draft-vocabulary-size 9": "give --draft-vocabulary FILE",
    "generate --draft-model MODEL --draft-bits x": "expected an int >= 1",
}


@in_one_test("typed", WRONG)
def test_what_cannot_be_had_is_said_in_words(typed: str, folders: Path) -> None:
    """By every command that takes a draft model."""
    model = str(folders / "model")
    name, *flags = typed.replace("MODEL", model).split()
    done = run(name, "--model", model, *flags)
    assert done.returncode == 2
    assert WRONG[typed] in done.stderr
