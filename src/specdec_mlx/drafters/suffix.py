"""Drafts copied from wherever the text has been before, in this generation or in a memory.

The longest match of the last tokens is found in the text and in a `Memory`, and the places that
match best vote on what follows. Suffix decoding (Oliaro et al. 2024) counts continuations in a
suffix tree; here the places are kept, so that those whose surroundings agree weigh more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext
from specdec_mlx.drafters.election import Source, Voters, vote
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.memory.index import Context, GrowingIndex
from specdec_mlx.memory.store import Memory, as_memory
from specdec_mlx.options import require

MOST_PLACES = 24  # places that are asked of each index: 20 lose 0.1 to 0.2% of the tokens a pass
FEWER_PLACES = 4  # of those, the ones that match shorter than the longest; 8 gain nothing
WITHIN = 1  # by how many tokens a match may be shorter than the longest one and still vote
MEMORY_WEIGHT = 0.3  # of a place in a memory, to one of equal match in the text itself


@dataclass(frozen=True)
class SuffixDrafter:
    """Copies what followed the places that match best, in the text and in a memory.

    Places vote, token by token; those outvoted drop out, and the draft ends when none remains. A
    longer match outweighs shorter ones; of equal ones those in the text itself count more, and of
    matches of 1 or 2 tokens those that have more tokens in common before them. memory: texts shared
    between generations: a `Memory`, the path of its file, made if need be and saved when the
    process ends, or "process" for one of no file; a generation's own text is added at its end. None
    remembers nothing. num_draft: most tokens in a draft, None for no cap of its own. min_match: the
    shortest match that is continued.

    Memory: a token of the text costs at most 400 bytes, one of a `Memory` 80. ValueError out of
    range.
    """

    memory: Memory | str | None = None
    num_draft: int | None = None
    min_match: int = 1

    def __post_init__(self) -> None:
        some = "an int >= 1, or None for no cap; to draft nothing, leave the drafter out"
        require(self, self.num_draft is None or self.num_draft >= 1, "num_draft", some)
        require(self, 1 <= self.min_match <= 64, "min_match", "an int from 1 to 64")
        object.__setattr__(self, "memory", as_memory(self.memory))

    @property
    def key(self) -> str:
        """Its options, and whether it remembers; not what."""
        kind = "a memory" if self.memory is not None else "no memory"
        options = f"{kind}, num_draft={self.num_draft}, min_match={self.min_match}"
        return f"{type(self).__module__}.SuffixDrafter({options})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the memory was written by another tokenizer."""
        self._memory_of(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> SuffixSession:
        """Index `prompt` [n], and take the memory as it is now."""
        return SuffixSession(self, prompt, self._memory_of(context))

    def _memory_of(self, context: DraftContext) -> Memory | None:
        memory = self.memory.of(context) if isinstance(self.memory, Memory) else None
        if memory and context.vocab_size and memory.largest_token >= context.vocab_size:
            raise TokenizerMismatchError(
                f"The memory holds token {memory.largest_token}, the target has "
                f"{context.vocab_size}. Give a memory that was written with its tokenizer."
            )
        return memory


class SuffixSession:
    """One generation's text, its index, and the memory as it was at the beginning."""

    cheap = True

    def __init__(self, config: SuffixDrafter, prompt: Sequence[int], memory: Memory | None) -> None:
        self._config = config
        self._memory = memory
        indexes = memory.indexes() if memory is not None else ()
        self._num_prompt = len(prompt)
        self._text = GrowingIndex(prompt)
        self._sources: list[tuple[Source, float]] = [
            (self._text, 1.0),
            *((index, MEMORY_WEIGHT) for index in reversed(indexes)),
        ]

    def propose(self, limit: int) -> Draft:
        """Copy up to `limit` tokens from the places that match best."""
        return self.propose_after((), limit)

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """Copy what follows matches of text and `tokens` together; nothing is noted."""
        cap = self._config.num_draft
        length = limit if cap is None else min(limit, cap)
        if length <= 0:
            return NO_DRAFT
        context = self._text.context(tokens)
        voters = self._voters(context)
        return vote(voters, context.last, length, tokens) if voters else NO_DRAFT

    def observe(self, tokens: Sequence[int]) -> None:
        """Append the tokens [n] to the text."""
        self._text.append(tokens)

    def close(self, length: int) -> None:
        """Remember what was written, up to `length` tokens of prompt and output."""
        memory, self._memory = self._memory, None
        if memory is not None:
            written = 0 if memory.remember_prompts else self._num_prompt
            memory.add(self._text.ids[written:length])

    def _voters(self, context: Context) -> list[Voters]:
        """The places that match best, in the text and in the memory, the longest match first."""
        least = self._config.min_match
        voters: list[Voters] = []
        for source, weight in self._sources:
            rings = source.nearest(context, MOST_PLACES, WITHIN, least, FEWER_PLACES)
            if rings:
                least = max(least, rings[0][0] - WITHIN)
                for match, ends in rings:
                    voters.append((match, ends, source, weight))
        voters.sort(key=itemgetter(0), reverse=True)
        while voters and voters[-1][0] < least:
            voters.pop()
        return voters
