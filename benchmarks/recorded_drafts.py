"""What a draft model would propose at each place of a recorded text, and how sure it was.

Recorded once, any policy can be scored at any cost of a draft step without running the model again:

    python -m benchmarks.recorded_drafts texts.json --draft-model SMALL --json drafts.json
    specdec-mlx replay texts.json --drafts drafts.json --draft-cost 0.1
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load
from mlx_lm.models.cache import KVCache, make_prompt_cache
from tqdm import tqdm

from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Evidence, GoesOn, Session, Step
from specdec_mlx.lab.bench.record import load_record
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.token_ids import to_ids

LONGEST_CHAIN = 16

ROWS = 16  # places at which a draft model goes on at a time


@dataclass(frozen=True)
class Chain:
    """Greedy draft tokens [n], and the probability that the draft model gave to each [n]."""

    tokens: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class RecordedDrafts:
    """Greedy drafts at every place of one text.

    id: of the text. own: what the draft model would write next at each place of the text, [m].
    wrong: place -> how it would go on there, where its own token is not the text's.
    """

    id: str
    own: Chain
    wrong: dict[int, Chain] = field(default_factory=dict)

    def chain(self, place: int, generated: Sequence[int], longest: int) -> Chain:
        """The draft after `place` generated tokens: along the text as far as it is right."""
        tokens: list[int] = []
        confidence: list[float] = []
        while place < len(generated) and len(tokens) < longest:
            tokens.append(self.own.tokens[place])
            confidence.append(self.own.confidence[place])
            if tokens[-1] != generated[place]:
                tokens += self.wrong[place].tokens
                confidence += self.wrong[place].confidence
                break
            place += 1
        return Chain(tokens[:longest], confidence[:longest])


def record_drafts(
    model: nn.Module, text: RecordedText, longest: int = LONGEST_CHAIN
) -> RecordedDrafts:
    """Run a draft model along a text.

    One pass over the text gives its own token at each place; only where that is not the text's
    does it go on by itself.

    Args:
        model: the draft model.
        text: what the target wrote.
        longest: most tokens of a draft.
    """
    rollback = Rollback(make_prompt_cache(model))
    logits = rollback.forward(model, to_ids([*text.prompt, *text.generated[:-1]]))
    own = _chain(logits[len(text.prompt) - 1 :])
    wrong = [i for i, token in enumerate(text.generated) if own.tokens[i] != token]
    go_on = _in_rows if all(type(c) is KVCache for c in rollback.caches) else _one_by_one
    chains: dict[int, Chain] = {}
    for first in range(len(wrong), 0, -ROWS):  # from the last place on, so that caches are only cut
        places = wrong[max(0, first - ROWS) : first]
        chains |= go_on(model, rollback, len(text.prompt), own, places, longest - 1)
    return RecordedDrafts(text.id, own, chains)


def _in_rows(
    model: nn.Module,
    rollback: Rollback,
    num_prompt: int,
    own: Chain,
    places: Sequence[int],
    length: int,
) -> dict[int, Chain]:
    """How the model goes on by itself at several places, as rows of one batch."""
    ends = [num_prompt + place for place in places]
    caches = [KVCache.merge([_cut(cache, end) for end in ends]) for cache in rollback.caches]
    tokens = mx.array([[own.tokens[place]] for place in places], mx.uint32)
    steps = []
    for _ in range(length):
        logits = model(tokens, cache=caches)[:, -1]
        tokens = mx.argmax(logits, axis=-1, keepdims=True).astype(mx.uint32)
        steps.append(logits)
        mx.async_eval(tokens)
    rows = mx.stack(steps, axis=1)
    return {place: _chain(rows[i]) for i, place in enumerate(places)}


def _cut(cache: KVCache, end: int) -> KVCache:
    """The same cache with its first `end` positions."""
    shorter = copy.copy(cache)
    shorter.trim(cache.offset - end)
    return shorter


def _one_by_one(
    model: nn.Module,
    rollback: Rollback,
    num_prompt: int,
    own: Chain,
    places: Sequence[int],
    length: int,
) -> dict[int, Chain]:
    """The same on caches that can only be cut, from the last place to the first."""
    chains = {}
    for place in reversed(places):
        rollback.rewind_to(num_prompt + place)
        token = mx.array([own.tokens[place]], mx.uint32)
        rows = []
        for _ in range(length):
            row = rollback.forward(model, token)
            token = mx.argmax(row, axis=-1).astype(mx.uint32)
            rows.append(row)
            mx.async_eval(token)
        chains[place] = _chain(mx.concatenate(rows))
    return chains


def _chain(logits: mx.array) -> Chain:
    """The likeliest tokens of logits [n, V], and their probabilities."""
    tokens = mx.argmax(logits, axis=-1)
    best = mx.max(logits.astype(mx.float32), axis=-1)
    confidence = mx.exp(best - mx.logsumexp(logits.astype(mx.float32), axis=-1))
    return Chain(tokens.tolist(), [round(x, 5) for x in confidence.tolist()])  # type: ignore[union-attr, arg-type]


class RecordedDrafter(Drafter):
    """Drafts as recorded; its sessions count the steps that the draft model would have run.

    Args:
        name: of the draft model.
        texts: the recorded texts.
        drafts: of each of them.
    """

    def __init__(
        self, name: str, texts: Sequence[RecordedText], drafts: Sequence[RecordedDrafts]
    ) -> None:
        """Texts are told apart by their prompts."""
        by_id = {recorded.id: recorded for recorded in drafts}
        self.name = name
        self.num_steps = 0
        self._by_prompt = {tuple(text.prompt): (text, by_id[text.id]) for text in texts}

    @property
    def key(self) -> str:
        """The draft model's name."""
        return f"RecordedDrafter({self.name})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> RecordedSession:
        """Begin at the first place of the text with this prompt."""
        return RecordedSession(self, *self._by_prompt[tuple(prompt)])


class RecordedSession(Session):
    """Proposes what was recorded; see `Session.propose_while`."""

    def __init__(
        self, drafter: RecordedDrafter, text: RecordedText, drafts: RecordedDrafts
    ) -> None:
        """Nothing is generated yet."""
        self._drafter = drafter
        self._text = text
        self._drafts = drafts
        self._place = 0

    def propose(self, limit: int) -> Draft:
        """The recorded draft, up to its limit."""
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The recorded draft, as far as it is worth drafting."""
        chain = self._drafts.chain(self._place, self._text.generated, limit)
        evidence: list[Evidence] = []
        step = Step.GO_ON
        for confidence in chain.confidence:
            self._drafter.num_steps += 1
            evidence.append(Evidence(confidence=confidence))
            step = goes_on(evidence)
            if step is not Step.GO_ON:
                break
        n = len(evidence) - (step is Step.STOP_BEFORE)
        return Draft(chain.tokens[:n], evidence=evidence[:n])

    def observe(self, tokens: Sequence[int]) -> None:
        """Go on along the text."""
        self._place += len(tokens)


def save_drafts(name: str, drafts: Sequence[RecordedDrafts], path: Path | str) -> None:
    """Write as JSON; `name` is the draft model's."""
    data = {"draft_model": name, "drafts": [asdict(recorded) for recorded in drafts]}
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def load_drafts(path: Path | str, texts: Sequence[RecordedText]) -> RecordedDrafter:
    """A drafter that proposes what `save_drafts` wrote.

    Raises:
        ValueError: for another file, or one of other texts.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        drafts = [
            RecordedDrafts(
                entry["id"],
                Chain(**entry["own"]),
                {int(place): Chain(**chain) for place, chain in entry["wrong"].items()},
            )
            for entry in data["drafts"]
        ]
        return RecordedDrafter(data["draft_model"], texts, drafts)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no drafts for these texts ({error!r}). Record them: python -m "
            "benchmarks.recorded_drafts texts.json --draft-model MODEL --json drafts.json"
        ) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Record a draft model's drafts along the texts of a benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", metavar="FILE", help="what specdec-mlx bench --json wrote")
    parser.add_argument("--draft-model", required=True, metavar="MODEL")
    parser.add_argument("--longest", type=int, default=LONGEST_CHAIN, metavar="N")
    parser.add_argument("--json", required=True, metavar="FILE", help="where to write them")
    args = parser.parse_args(argv)
    model = load(args.draft_model)[0]
    texts = load_record(args.record).texts
    bar = tqdm(texts, disable=not sys.stderr.isatty())
    save_drafts(args.draft_model, [record_drafts(model, t, args.longest) for t in bar], args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
