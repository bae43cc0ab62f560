"""Look-ups of other projects, each a short program after its public description.

    python -m benchmarks.replay --sessions sessions.jsonl --described   # beside our drafters
    python -m benchmarks.described_lookups sessions.jsonl               # what ours does not find

The second command asks what could be taken over. An oracle takes the better of two drafts in each
round, ours or theirs, and its passes are counted. Ours is `SuffixDrafter` with a memory.

llama.cpp describes its methods in docs/speculative.md and in pulls 5479, 18471 and 19164. MTPLX
describes its context copy and RAMP in its README and in docs/ramp. Constants that are not described
are marked as ours.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Drafter, LookUpSession, TextIndex
from specdec_mlx.drafters.ngram import NGramCounts
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.duck_typed import begin_session
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import greedy_context, record_of_sessions, right_path
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.memory.store import Memory

Gram = tuple[int, ...]


class Places:
    """The places after each n-gram of a text, oldest first.

    Attributes:
        size: tokens of an n-gram.
        tokens: the text.
    """

    def __init__(self, size: int, tokens: Iterable[int] = ()) -> None:
        """Index a text."""
        self.size, self.tokens = size, list[int]()
        self._after: dict[Gram, list[int]] = {}
        self.append(tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Write the text on. An n-gram enters when the token after it is known."""
        for token in tokens:
            end = len(self.tokens)
            if end >= self.size:
                self._after.setdefault(tuple(self.tokens[-self.size :]), []).append(end)
            self.tokens.append(token)

    def after(self, context: Sequence[int]) -> list[int]:
        """Places after the n-gram that ends `context`."""
        gram = tuple(context[-self.size :])
        return self._after.get(gram, []) if len(gram) == self.size else []


class Described(TextIndex):
    """A text, and what became of the last draft.

    Attributes:
        tokens: the text.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        """Begin with the prompt."""
        self.tokens = list(prompt)
        self._last: list[int] = []

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """At most `limit` tokens of the method's own draft."""
        if limit < 1:
            return NO_DRAFT
        copied = self.copy([*self.tokens, *more] if more else self.tokens)
        if not more:
            self._last = copied
        # `auto` compares drafts by the length of the match, which most methods do not tell.
        return Draft(copied[:limit], evidence=[self.match] * len(copied[:limit]))

    match = 1

    def copy(self, text: Sequence[int]) -> list[int]:
        """The tokens that the method would draft after `text`."""
        raise NotImplementedError

    def append(self, tokens: Sequence[int]) -> None:
        """Judge the last draft, and write the text on."""
        last, self._last = self._last, []
        if last:
            same = [a == b for a, b in zip(last, tokens, strict=False)]
            accepted = (*same, False).index(False)
            # A draft that was cut short by the draft length is right as far as it is known.
            if accepted < len(same) or accepted == len(last):
                self.judge(accepted, len(last))
        self.tokens += tokens
        self.learn(tokens)

    def judge(self, accepted: int, drafted: int) -> None:
        """Learn how much of the last draft was accepted; by default nothing."""

    def learn(self, tokens: Sequence[int]) -> None:
        """Index tokens that `self.tokens` ends with; by default nothing."""


class Simple(Described):
    """ngram-simple of llama.cpp: the 48 tokens after the last place of the last 12 tokens."""

    match, length = 12, 48

    def __init__(self, prompt: Sequence[int], size: int = 12) -> None:
        """Index the prompt."""
        super().__init__(prompt)
        self.match, self.places = size, Places(size, prompt)

    def learn(self, tokens: Sequence[int]) -> None:
        """Index the tokens."""
        self.places.append(tokens)

    def copy(self, text: Sequence[int]) -> list[int]:
        """The tokens after the last place."""
        ends = self.places.after(text)
        return self.tokens[ends[-1] :][: self.length] if ends else []


class MapKey(Simple):
    """ngram-map-k of llama.cpp: as ngram-simple, with the accepted number of each key.

    The description says that the number is stored. That a key drafts no more than was accepted of
    its last draft is our reading.
    """

    min_hits = 1

    def __init__(self, prompt: Sequence[int], size: int = 12) -> None:
        """Index the prompt."""
        super().__init__(prompt, size)
        self.accepted: dict[Gram, int] = {}
        self._key: Gram = ()

    def copy(self, text: Sequence[int]) -> list[int]:
        """The tokens after the last place, as many as were accepted before."""
        self._key = tuple(text[-self.match :])
        ends = self.places.after(text)
        copied = self.value(ends) if len(ends) >= self.min_hits else []
        return copied[: self.accepted.get(self._key, self.length)]

    def value(self, ends: Sequence[int]) -> list[int]:
        """The tokens to draft."""
        return self.tokens[ends[-1] :][: self.length]

    def judge(self, accepted: int, drafted: int) -> None:
        """Store the accepted number."""
        self.accepted[self._key] = accepted


class MapKeyFourValues(MapKey):
    """ngram-map-k4v of llama.cpp, with the sizes of its example: keys and values of 8 tokens.

    A value is drafted if it is significantly more frequent than the other three. That it must be
    twice as frequent as the others together is our reading.
    """

    length, min_hits, most = 8, 2, 4

    def __init__(self, prompt: Sequence[int]) -> None:
        """Index the prompt."""
        super().__init__(prompt, 8)

    def value(self, ends: Sequence[int]) -> list[int]:
        """The clearly most frequent value, or nothing."""
        whole = (tuple(self.tokens[end : end + self.length]) for end in ends)
        counts: Counter[Gram] = Counter()
        for value in whole:
            if len(value) == self.length and (value in counts or len(counts) < self.most):
                counts[value] += 1
        if not counts:
            return []
        best, times = counts.most_common(1)[0]
        others = counts.total() - times
        return list(best) if times >= self.min_hits and times >= 2 * others else []


class Mod(Described):
    """ngram-mod of llama.cpp: the token after each 24-gram, followed for 48 to 64 tokens.

    The pool is shared by all texts. The original keeps hashes, whose collisions are left out here.
    """

    match, shortest, longest = 24, 48, 64

    def __init__(self, prompt: Sequence[int], pool: dict[Gram, int]) -> None:
        """Put the prompt into the pool."""
        super().__init__(prompt)
        self.pool, self._num_known = pool, 0
        self.learn(prompt)

    def learn(self, tokens: Sequence[int]) -> None:
        """Store the token after each n-gram; the latest stays."""
        for end in range(max(self._num_known, self.match), len(self.tokens)):
            self.pool[tuple(self.tokens[end - self.match : end])] = self.tokens[end]
        self._num_known = len(self.tokens)

    def copy(self, text: Sequence[int]) -> list[int]:
        """Tokens from the pool, or nothing if they are few."""
        gram, copied = tuple(text[-self.match :]), list[int]()
        while len(copied) < self.longest and gram in self.pool:
            copied.append(self.pool[gram])
            gram = (*gram[1:], copied[-1])
        return copied if len(copied) >= self.shortest else []


class Cache(Described):
    """ngram-cache of llama.cpp: the likeliest token after 4 to 1 tokens, while it is likely enough.

    The text itself is asked first, and then the merged counts of earlier texts, with stricter
    filters. The filters for the number of sightings and their share, by the tokens of the context,
    and the limit of 16 tokens are our reading. There is no static cache of a large corpus.
    """

    match, longest = 1, 16
    # Least sightings and least share, after 1, 2, 3 and 4 tokens.
    lax = ((2, 0.66), (2, 0.5), (1, 0.5), (1, 0.5))
    strict = ((4, 0.75), (3, 0.66), (2, 0.66), (2, 0.66))

    def __init__(self, prompt: Sequence[int], earlier: NGramCounts) -> None:
        """Count the prompt."""
        super().__init__(prompt)
        self.earlier, self.counts = earlier, NGramCounts(2, 5, 2**30)
        self._context: Gram = ()
        self.learn(prompt)

    def learn(self, tokens: Sequence[int]) -> None:
        """Count the tokens after 1 to 4 others."""
        for token in tokens:
            self.counts.learn(self._context, token)
            self._context = self.counts.shift(self._context, token)

    def copy(self, text: Sequence[int]) -> list[int]:
        """Likely tokens."""
        context, copied = tuple(text[-4:]), list[int]()
        while len(copied) < self.longest and (token := self.likely(context)) is not None:
            copied.append(token)
            context = self.counts.shift(context, token)
        return copied

    def likely(self, context: Gram) -> int | None:
        """The most frequent token after the longest context that passes a filter."""
        for counts, filters in ((self.counts, self.lax), (self.earlier, self.strict)):
            for width in range(len(context), 0, -1):
                seen = counts.counts(context[-width:])
                if seen:
                    best = max(seen, key=seen.__getitem__)
                    least, share = filters[width - 1]
                    if seen[best] >= least and seen[best] >= share * sum(seen.values()):
                        return best
        return None

    def close(self, length: int) -> None:
        """Merge the counts into those of earlier texts."""
        for (*context, token), times in self.counts.ngrams():
            self.earlier.add(tuple(context), token, times)


class ContextCopy(Described):
    """MTPLX's context copy: blocks from the prompt alone, after matches of 6 to 10 tokens.

    A match of 6, 7, 8, 9 or 10 tokens copies 8, 12, 16, 24 or 24 tokens. After four blocks or more,
    a moving average of the accepted share below 0.35 suspends copying for 64 tokens, and twice as
    long each time that it stays low. The latest of the longest matches is our reading.
    """

    match, longest_match = 6, 10
    ladder = (8, 12, 16, 24, 24)

    def __init__(self, prompt: Sequence[int]) -> None:
        """Index the prompt."""
        super().__init__(prompt)
        self.prompt = Places(self.match, prompt)
        self._average, self._num_blocks = 1.0, 0
        self._resume, self._pause = 0, 64

    def copy(self, text: Sequence[int]) -> list[int]:
        """A block of the prompt."""
        if len(text) < self._resume:
            return []
        found = self.find(text)
        return [] if found is None else self.prompt.tokens[found[0] :][: self.block(found[1])]

    def find(self, text: Sequence[int]) -> tuple[int, int] | None:
        """The place to copy from, and the tokens by which its match is longer than 6."""
        ends = self.prompt.after(text)
        if not ends:
            return None
        longest = self.longest_match
        lengths = [(same_before(self.prompt.tokens, end, text, longest), end) for end in ends]
        length, end = max(lengths)
        return end, length - self.match

    def block(self, extension: int) -> int:
        """Tokens of a block."""
        return self.ladder[extension]

    def judge(self, accepted: int, drafted: int) -> None:
        """Suspend copying where too little is accepted."""
        share = accepted / drafted
        self._average = 0.7 * self._average + 0.3 * share
        self._num_blocks += 1
        if share >= 0.5:
            self._pause = 64
        if self._num_blocks >= 4 and self._average < 0.35:
            self._resume = len(self.tokens) + self._pause
            self._pause = min(2 * self._pause, 4096)


class Ramp(ContextCopy):
    """MTPLX's RAMP: blocks of 48 tokens, and re-anchoring where no 6 tokens match.

    Of the places after the last 3 tokens, the place with most equal tokens among the 24 before it
    is continued. The 64 latest places are compared, as its README says of the search.
    """

    anchor, span, most = 3, 24, 64

    def __init__(self, prompt: Sequence[int]) -> None:
        """Index the prompt by 6 and by 3 tokens."""
        super().__init__(prompt)
        self.anchors = Places(self.anchor, prompt)

    def find(self, text: Sequence[int]) -> tuple[int, int] | None:
        """An exact match, or the most similar place."""
        exact, ends = super().find(text), self.anchors.after(text)[-self.most :]
        if exact or not ends:
            return exact
        prompt = self.prompt.tokens

        def similarity(end: int) -> int:
            before = reversed(prompt[max(0, end - self.span) : end])
            return sum(a == b for a, b in zip(before, reversed(text[-self.span :]), strict=False))

        return max(ends, key=lambda end: (similarity(end), end)), 0

    def block(self, extension: int) -> int:
        """Always 48."""
        return 48


class RampThroughout(Ramp):
    """RAMP that never pauses, because no trained head drafts in its pauses here."""

    def judge(self, accepted: int, drafted: int) -> None:
        """Go on."""


def same_before(tokens: Sequence[int], end: int, text: Sequence[int], most: int) -> int:
    """Number of tokens before `end` that equal the last tokens of a text, up to `most`."""
    length = 0
    while length < min(most, end, len(text)) and tokens[end - length - 1] == text[-length - 1]:
        length += 1
    return length


@dataclass(frozen=True, eq=False)
class DescribedDrafter(Drafter):
    """A described method.

    Attributes:
        name: of the method.
        index: makes its index of a prompt.
    """

    name: str
    index: Callable[[Sequence[int]], Described] = field(repr=False)

    @property
    def key(self) -> str:
        """The name."""
        return self.name

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        """Index a prompt."""
        return LookUpSession(self.index(prompt))


def of_pool(prompt_to_index: Callable[..., Described], pool: object) -> Callable[..., Described]:
    """The index of a method that keeps something between texts."""
    return lambda prompt: prompt_to_index(prompt, pool)


METHODS: dict[str, Callable[[], DescribedDrafter]] = {
    "ngram-simple": lambda: DescribedDrafter("ngram-simple", Simple),
    "ngram-map-k": lambda: DescribedDrafter("ngram-map-k", MapKey),
    "ngram-map-k4v": lambda: DescribedDrafter("ngram-map-k4v", MapKeyFourValues),
    "ngram-mod": lambda: DescribedDrafter("ngram-mod", of_pool(Mod, {})),
    "ngram-cache": lambda: DescribedDrafter(
        "ngram-cache", of_pool(Cache, NGramCounts(2, 5, 2**30))
    ),
    "context copy": lambda: DescribedDrafter("context copy", ContextCopy),
    "RAMP": lambda: DescribedDrafter("RAMP", Ramp),
    "RAMP, no pause": lambda: DescribedDrafter("RAMP, no pause", RampThroughout),
}
"""Each makes a new drafter. The methods of llama.cpp, and then MTPLX's."""


def passes_of_the_better(record: Record, drafters: Sequence[Drafter], size: int) -> list[int]:
    """Passes that take the best of several drafts each, and how often each drafter was first.

    Args:
        record: texts, in order.
        drafters: the earlier drafter is the best of equal drafts.
        size: most tokens of a draft.
    """
    firsts = [0] * len(drafters)
    for text in record.texts:
        context, done = greedy_context(record.settings.vocab_size), 0
        sessions = [begin_session(one, list(text.prompt), context) for one in drafters]
        while done < len(text.generated):
            coming = text.generated[done:]
            # The last token is the target's own.
            most = min(size, len(coming) - 1)
            accepted = [
                len(right_path(session.propose(most), coming)) if most else 0
                for session in sessions
            ]
            best = max(accepted)
            firsts[accepted.index(best)] += 1
            for session in sessions:
                session.observe(coming[: best + 1])
            done += best + 1
        for session in sessions:
            session.close(len(text.prompt) + done)
    return firsts


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what each method finds beyond ours."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.described_lookups")
    parser.add_argument("sessions", help="JSON lines with messages, or turns and reference")
    parser.add_argument("--method", action="append", choices=METHODS, help="repeatable")
    parser.add_argument("--size", type=int, default=48, help="most tokens of a draft")
    args = parser.parse_args(arguments)
    record = record_of_sessions(args.sessions)
    (alone,) = passes_of_the_better(record, [SuffixDrafter(Memory())], args.size)
    rows = []
    for name in args.method or METHODS:
        drafters = [SuffixDrafter(Memory()), METHODS[name]()]
        ours, theirs = passes_of_the_better(record, drafters, args.size)
        both = ours + theirs
        rows.append([name, f"{theirs:,}", f"{alone:,}", f"{both:,}", f"{1 - both / alone:.1%}"])
    header = ["method", "rounds in which it finds more", "passes of ours", "of both", "saved"]
    print(markdown_table(header, rows, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
