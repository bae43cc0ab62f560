"""What is measured of one architecture: our text against plain decoding's, and mlx-lm's own.

The tests assert on a `Case`, and the page about architectures is written from it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import CacheList, make_prompt_cache

import tiny
from scripted import TREE, OracleDrafter, always_wrong, scripted_model
from specdec_mlx import Drafter, PromptLookupDrafter, speculate
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import FeatureRows, Features
from specdec_mlx.errors import UnreadableError
from specdec_mlx.exactness.probe import places_of, tree_report
from specdec_mlx.exactness.recurrent_states import recurrent_states_of, ways_back
from specdec_mlx.loop import Token
from specdec_mlx.models.anatomy import StateReader
from specdec_mlx.target import Verifier
from specdec_mlx.trees.shape import path_to
from specdec_mlx.trees.tree_pass import takes_trees

BLOCK = [(7 * i * i + 3 * i + 1) % 97 + 3 for i in range(8)]
PROMPT = BLOCK + BLOCK[:6]
"""14 tokens, with a repetition for look-ups to find: two short of the window."""

SECOND_PROMPT = [5, 44, 17, 90, 23]
NUM_TOKENS = 60
NUM_SECOND = 20

TREE_TOLERANCE = 1e-4
TREES_AFTER = (14, 28, 40)
"""Tokens before a tree: it crosses the end of a window, position 32, and neither."""

KEPT = 6  # the node of `TREE` whose path is kept: it is no child of the first

DRAFT_LENGTHS = (4, 7)
WIDER_THAN_WINDOW = 20
NEAR_TIE = 1e-4  # below this gap between the two best tokens, rounding may decide which is chosen
TOLERANCE = 1e-3  # of a log-probability

BIT_EQUAL = "bit-equal"
HALVES = {"bfloat16": mx.bfloat16, "float16": mx.float16}
NUM_IN_HALVES = 32
HALVES_HEADING = "\n## In 16 bits\n"

ROUGH: dict[str, tuple[float, str]] = {
    "deepseek_v41": (3e-2, "rounds keys to fp8 and queries to fp4, which magnifies 1e-7 to 1e-2"),
}
"""Architectures that need another tolerance, and why."""

INEXACT: dict[str, str] = {
    "phi3small": "a pass of several tokens sees its own future in the block-sparse layers",
    "plamo3": "past the window a pass of several tokens sees one key more than a single token",
}
"""Architectures for which several positions at once are not what single positions are."""


@dataclass(frozen=True)
class Text:
    """Tokens [n] that were written, and the log-probabilities [n, V] of each position."""

    tokens: list[int]
    logprobs: mx.array

    def __len__(self) -> int:
        return len(self.tokens)

    def deviation(self, other: Text) -> float:
        """Largest difference of a log-probability; infinite where the texts differ."""
        if self.tokens != other.tokens:
            return math.inf
        return largest_difference(self.logprobs, other.logprobs)

    @property
    def smallest_gap(self) -> float:
        """Least distance of the best token's log-probability from the second best one's."""
        best = mx.topk(self.logprobs.astype(mx.float32), 2, axis=-1)
        return float(mx.abs(best[:, 0] - best[:, 1]).min())


def largest_difference(a: mx.array, b: mx.array) -> float:
    """Of two arrays, of which equal infinities do not differ."""
    return float(mx.where(a == b, 0.0, mx.abs(a - b)).max())


def text_of(pairs: Iterable[tuple[Any, mx.array]]) -> Text:
    """Collect (token, logprobs [V]) pairs."""
    tokens, rows = zip(*pairs, strict=True)
    return Text([int(token) for token in tokens], mx.stack(list(rows)))


def noisy_copy(name: str, spread: float, **sizes: Any) -> nn.Module:
    """A tiny model whose weights are off by a share of their spread: it often agrees with it."""
    model = tiny.build(name, **sizes)
    keys = iter(mx.random.split(mx.random.key(1), 1000))

    def noisy(w: mx.array) -> mx.array:
        return w + spread * mx.std(w) * mx.random.normal(w.shape, key=next(keys))

    model.update(tree_map(noisy, model.parameters()))
    return model


def plain_text(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> Text:
    """What mlx-lm's plain loop writes, on fresh caches."""
    caches = make_prompt_cache(model)
    return text_of(
        generate_step(mx.array(list(prompt)), model, max_tokens=num_tokens, prompt_cache=caches)
    )


def spoken(items: Iterable[Token]) -> Text:
    """Collect what `speculate` yields."""
    return text_of((item.token, item.logprobs) for item in items)


class Row(NamedTuple):
    """A line of the page. All fields are text."""

    architecture: str
    caches: str
    way_back: str
    ours: str
    stock: str
    reads: str
    tapped: str
    trees: str

    def __str__(self) -> str:
        return "| " + " | ".join(self) + " |"


class HalfRow(NamedTuple):
    """A line of the page's table about 16 bits."""

    architecture: str
    bfloat16: str
    float16: str

    def __str__(self) -> str:
        return "| " + " | ".join(self) + " |"


class Case:
    """One architecture's tiny model, and what was run with it, each thing once."""

    def __init__(
        self,
        name: str,
        dtype: mx.Dtype = mx.float32,
        num_tokens: int = NUM_TOKENS,
        briefly: bool = False,
    ) -> None:
        self.name = name
        self.model = tiny.build(name, dtype) if name not in tiny.CANNOT_RUN else nn.Module()
        self.num_tokens = num_tokens
        self.briefly = briefly
        self.tolerance = ROUGH[name][0] if name in ROUGH else TOLERANCE

    @cached_property
    def plain(self) -> Text:
        return plain_text(self.model, PROMPT, self.num_tokens)

    @property
    def vocab_size(self) -> int:
        return self.plain.logprobs.shape[1]

    def oracle(self, text: Sequence[int] | None = None) -> OracleDrafter:
        """A drafter that knows the text, and errs in 30% of the positions."""
        return OracleDrafter(text or self.plain.tokens, self.vocab_size, wrong=0.3)

    def speculate(self, drafter: Drafter, length: int, **options: Any) -> Generator[Token]:
        options = {"prompt_tokens": PROMPT, "max_tokens": self.num_tokens, **options}
        return speculate(self.model, drafter=drafter, num_draft_tokens=length, **options)

    @cached_property
    def runs(self) -> dict[tuple[str, int], list[Token]]:
        """Every draft length, every drafter, and one draft wider than the window."""
        if self.briefly:
            return {("oracle", 4): list(self.speculate(self.oracle(), 4))}
        drafters: dict[str, Drafter] = {
            "oracle": self.oracle(),
            "always wrong": always_wrong(self.plain.tokens, self.vocab_size),
            "prompt lookup": PromptLookupDrafter(min_ngram=1),
        }
        pairs = [("oracle", length) for length in (*DRAFT_LENGTHS, WIDER_THAN_WINDOW)]
        pairs += [("always wrong", 4), ("prompt lookup", 7)]
        return {(name, k): list(self.speculate(drafters[name], k)) for name, k in pairs}

    @cached_property
    def deviations(self) -> dict[tuple[str, int], float]:
        """How far each run was from plain decoding."""
        return {key: spoken(items).deviation(self.plain) for key, items in self.runs.items()}

    def has_failed(self, deviation: float) -> bool:
        return not deviation <= self.tolerance

    def continued(self, length: int, caches: list[Any]) -> float:
        """How far a second turn, after so many tokens, is from one that reads all afresh."""
        said = PROMPT + self.plain.tokens[:length] + SECOND_PROMPT
        afresh = plain_text(self.model, said, NUM_SECOND)
        how = {"prompt_tokens": SECOND_PROMPT, "max_tokens": NUM_SECOND, "prompt_cache": caches}
        return spoken(self.speculate(self.oracle(afresh.tokens), 4, **how)).deviation(afresh)

    def inside_a_block(self) -> int:
        """A length that ends with the first of several accepted tokens, late in the text."""
        origins = [item.origin for item in self.runs["oracle", 7]]
        return next(
            n
            for n in range(40, self.num_tokens - 1)
            if origins[n - 1] == origins[n] == "draft" != origins[n - 2]
        )

    @cached_property
    def width_deviation(self) -> float:
        """How far one pass over several positions is from single positions, without rollback."""
        ids = mx.array(PROMPT + self.plain.tokens)
        return largest_difference(self.in_passes(ids, 1), self.in_passes(ids, 5))

    def in_passes(self, ids: mx.array, width: int) -> mx.array:
        """Logits [S, V] of passes as they verify drafts, over so many of the ids [S]."""
        caches = Rollback(make_prompt_cache(self.model), states=recurrent_states_of(self.model))
        parts = mx.split(ids, range(width, ids.shape[0], width))
        return mx.concatenate([caches.forward(self.model, part) for part in parts])

    @cached_property
    def rounding(self) -> tuple[float, str]:
        """Largest difference of a logit between passes over 5 and 14 positions and single ones,
        and what the page says: it by the spread of logits, and choices that fall otherwise."""
        ids = mx.array(PROMPT + self.plain.tokens)
        single = self.in_passes(ids, 1).astype(mx.float32)
        wide = [self.in_passes(ids, width).astype(mx.float32) for width in (5, 14)]
        worst = max(largest_difference(logits, single) for logits in wide)
        if worst == 0:
            return worst, BIT_EQUAL
        spread = float(mx.std(mx.where(mx.isfinite(single), single, 0)))
        choices = mx.argmax(mx.stack(wide), axis=-1) != mx.argmax(single, axis=-1)
        return worst, f"{worst / spread:.1g} ({int(choices.sum())})"

    @cached_property
    def stock(self) -> str:
        """What mlx-lm's own speculation makes of the same drafts."""
        draft_model, prompt = scripted_model(PROMPT, self.oracle()), mx.array(PROMPT)
        options = {"num_draft_tokens": 4, "max_tokens": self.num_tokens}
        try:
            items = list(speculative_generate_step(prompt, self.model, draft_model, **options))
        except ValueError as error:
            if "trimmable" not in str(error):
                raise
            return "refuses"
        text = text_of((token, logprobs) for token, logprobs, _ in items)
        return "**wrong, in silence**" if self.has_failed(text.deviation(self.plain)) else "right"

    @property
    def row(self) -> Row:
        if self.name in tiny.CANNOT_RUN:
            reason = tiny.CANNOT_RUN[self.name].partition(". ")[0]
            ours = f"cannot run here: `{reason}`"
            return Row(self.name, "", "", ours, *["cannot run here"] * 4)
        caches = make_prompt_cache(self.model)
        return Row(
            self.name,
            ", ".join(sorted({_kind(cache) for cache in caches})),
            ", ".join(sorted(set(ways_back(self.model)))),
            self.ours,
            self.stock,
            self.reads,
            self.tapped,
            self.trees,
        )

    @property
    def ours(self) -> str:
        if any(map(self.has_failed, self.deviations.values())):
            return "**wrong**"
        reason = INEXACT.get(self.name)
        return "right" if reason is None else f"right, one token at a time: {reason}"

    @cached_property
    def unreadable(self) -> dict[str, str]:
        """What of the model cannot be read, and why."""
        wishes = {"head input": Features(head_input=True), "layers": self.all_layers}
        reasons = {}
        for name, wanted in wishes.items():
            try:
                StateReader(self.model, wanted)
            except UnreadableError as error:
                reasons[name] = str(error).partition(": ")[2].partition(". ")[0]
        return reasons

    @property
    def all_layers(self) -> Features:
        return Features(layers=tuple(range(len(self.model.layers))))

    @property
    def readable(self) -> Features:
        """All that the model shows."""
        layers = () if "layers" in self.unreadable else self.all_layers.layers
        return Features(layers, head_input="head input" not in self.unreadable, top=2)

    @property
    def reads(self) -> str:
        """Rows are those of positions if they are the same in one pass as in several."""
        if self.name not in INEXACT and self.rows_deviation > self.tolerance:
            return "**wrong rows**"
        reasons = [f"not the {what}: {why}" for what, why in self.unreadable.items()]
        return "; ".join(reasons) or "yes"

    @property
    def rows_deviation(self) -> float:
        """Largest difference of a state, by the largest of its kind, in one pass and in three."""
        whole, parts = (self.read_in(ends)[1] for ends in ([], [8, 13]))
        pairs = [(whole.layers[i], parts.layers[i]) for i in whole.layers]
        if whole.head_input is not None and parts.head_input is not None:
            pairs.append((whole.head_input, parts.head_input))
        return max(largest_difference(a, b) / float(mx.abs(a).max()) for a, b in pairs)

    @property
    def tapped(self) -> str:
        """True if logits of three passes are equal to the last bit with everything tapped."""
        parts = mx.split(mx.array([PROMPT]), [8, 13], axis=1)
        caches = make_prompt_cache(self.model)
        logits = mx.concatenate([self.logits(part, caches) for part in parts])
        return "bit-equal" if mx.array_equal(self.read_in([8, 13])[0], logits) else "**differ**"

    @property
    def trees(self) -> str:
        """A tree in one pass, across the end of a window and past it."""
        target = Verifier(self.model, Rollback(make_prompt_cache(self.model)))
        if not takes_trees(target.rollback):
            return "chains"
        deviations = [tree_deviation(self.model, length) for length in TREES_AFTER]
        for place in places_of(self.model):
            report = tree_report(self.model, place.context, shift=place.shift)
            deviations.append(report.max_difference)
        return "exact" if max(deviations) < TREE_TOLERANCE else "chains, trees are not exact"

    def logits(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=caches)[0]
        return logits

    def read_in(self, ends: Sequence[int]) -> tuple[mx.array, FeatureRows]:
        """Logits and all rows of the prompt, in passes that end at these positions and the last."""
        taps, caches = StateReader(self.model, self.readable), make_prompt_cache(self.model)
        logits, rows = [], []
        for part in mx.split(mx.array([PROMPT]), list(ends), axis=1):
            logits.append(taps.read(partial(self.logits, part, caches)))
            assert taps.features is not None
            rows.append(taps.features)
        return mx.concatenate(logits), FeatureRows.joined(rows)


def only_counting(rollback: Rollback, position: int) -> int:
    """A `rewind_to` that leaves the caches alone."""
    rollback.position = min(rollback.position, position)
    return rollback.position


def tree_deviation(
    model: nn.Module, length: int, kept: int = KEPT, make: Any = make_prompt_cache
) -> float:
    """Largest difference of a logit of a tree's nodes from those of their own paths run alone."""
    caches, fed = before_a_tree(model, length, make)
    mx.eval([cache.state for cache in caches])
    target = Verifier(model, Rollback(copy.deepcopy(caches), length))
    target.rollback.checkpoint()
    worst, after = against_paths(model, caches, fed, target.feed(fed, parents=TREE), kept)
    end = length + 1 + len(path_to(kept, TREE))
    assert target.rollback.keep(length + 1, path_to(kept, TREE)) == end
    for i in range(20):
        token = mx.array([5 * (i % 15) + 3])
        expected = model(token[None], cache=after)[0]
        worst = max(worst, largest_difference(expected, target.feed(token)))
    return worst


def before_a_tree(
    model: nn.Module, length: int, make: Any = make_prompt_cache
) -> tuple[list[Any], mx.array]:
    """Caches of a text, and the token and the tree that follow it."""
    text = mx.random.randint(3, 90, shape=(length,), key=mx.random.key(length))
    caches = make(model)
    model(text[None], cache=caches)
    return caches, mx.array([3, *((11 * i) % 83 + 3 for i in range(len(TREE)))])


def against_paths(
    model: nn.Module, caches: list[Any], fed: mx.array, logits: mx.array, kept: int = KEPT
) -> tuple[float, list[Any]]:
    """Largest difference from each path run alone, and caches after that of the node `kept`."""
    worst, after = 0.0, caches
    for node in range(-1, len(TREE)):
        path = fed[mx.array([0, *(i + 1 for i in path_to(node, TREE))])]
        alone = copy.deepcopy(caches)
        own = model(path[None], cache=alone)[0, -1]
        worst = max(worst, largest_difference(own, logits[node + 1]))
        after = alone if node == kept else after
    return worst, after


def _kind(cache: Any) -> str:
    if not isinstance(cache, CacheList):
        return type(cache).__name__
    return f"CacheList({', '.join(_kind(child) for child in cache.caches)})"


def in_16_bits(name: str) -> HalfRow:
    """What passes over several positions are against single ones, in both types."""
    cases = [Case(name, dtype, NUM_IN_HALVES, briefly=True) for dtype in HALVES.values()]
    return HalfRow(name, *(case.rounding[1] for case in cases))


def page(text: str, rows: Sequence[Row], halves: Sequence[HalfRow]) -> str:
    """The page about architectures with these rows; its text stands in the page itself."""
    first, second = text.split(HALVES_HEADING)
    run = sum(not row.ours.startswith("cannot") for row in rows)
    differ = [half for half in halves if set(half[1:]) != {BIT_EQUAL}]
    count = f"{run - len(differ)} of {run} architectures are bit-equal in both types. The others:"
    parts = [_with_table(first, _counts(rows), rows), _with_table(second, count, differ)]
    return (HALVES_HEADING + "\n").join(parts)


def _with_table(text: str, counts: str, rows: Sequence[Row | HalfRow]) -> str:
    prose, table = text.split("| Architecture", 1)
    paragraphs = prose.strip().split("\n\n")[:-1]
    head = ("| Architecture" + table).split("\n")[:2]
    return "\n\n".join([*paragraphs, counts, "\n".join([*head, *map(str, rows)])]) + "\n"


def _counts(rows: Sequence[Row]) -> str:
    def count(field: str, start: str) -> int:
        return sum(getattr(row, field).startswith(start) for row in rows)

    return (
        f"Of {len(rows)} architectures ours is right on {count('ours', 'right')}, and on "
        f"{count('ours', 'right,')} of them it writes one token at a time.\n"
        f"The other {count('ours', 'cannot')} cannot run on a CPU.\n"
        f"mlx-lm's own is right on {count('stock', 'right')}, silently wrong on "
        f"{count('stock', '**wrong')} and refuses {count('stock', 'refuses')}.\n"
        f"{count('reads', 'yes')} can be read completely and {count('reads', 'not')} in part. "
        f"Logits are bit-equal while read on {count('tapped', 'bit-equal')}.\n"
        f"Trees are exact on {count('trees', 'exact')}."
    )


def rows_of(text: str) -> list[Row]:
    """The rows of a page."""
    _, table = text.split(HALVES_HEADING)[0].split("| Architecture")
    return [Row(*cells) for cells in _cells("| Architecture" + table)]


def halves_of(text: str) -> dict[str, HalfRow]:
    """The rows of a page about 16 bits, by architecture."""
    rows = [HalfRow(*cells) for cells in _cells(text.split(HALVES_HEADING)[1])]
    return {row.architecture: row for row in rows}


def _cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
