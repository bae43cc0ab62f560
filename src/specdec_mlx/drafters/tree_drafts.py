"""Drafts that fork. They are written level by level, with one pass for each level.

A deterministic tree is grown as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4): the
likeliest nodes of each level are continued, and the likeliest of all are the draft. Drawn trees
have siblings without replacement (Sequoia, Chen et al. 2024, arXiv 2402.12374); the number of draws
at a place is settled by the distribution there and the tokens above, never by what was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import mlx.core as mx

from specdec_mlx.contracts import ROOT, Draft, DraftContext, Evidence, chain
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.drawing import match_vocab, processed
from specdec_mlx.models.anatomy import top_tokens
from specdec_mlx.sampling import Sampling
from specdec_mlx.token_ids import read_all, to_ids
from specdec_mlx.trees.shape import path_to

NextRows = Callable[[mx.array | None, Sequence[int]], mx.array]
"""Logits after more tokens of a tree (see `draft_sources.DraftSource.next_logits`)."""


@dataclass
class Siblings:
    """The tokens that may follow one node.

    Attributes:
        depth: depth of the siblings.
        evidence: evidence for each sibling.
        chances: chance of each sibling, given the node.
        children: the siblings that became nodes, in order.
    """

    depth: int
    evidence: list[Evidence]
    chances: list[float]
    children: list[int] = field(default_factory=list)


@dataclass
class TreeDraws:
    """One draft that forks, while it is written. Parents come before their children.

    Attributes:
        text: prompt of `num_prompt` tokens and emitted tokens [n].
        branches: most siblings.
        known: chances by evidence, which learn.
        parents: parent of each node, or `ROOT`.
        tokens: token of each node.
        reaches: chance that the text contains the path to a node.
        siblings: the siblings that may follow a node or `ROOT`.
        fed: index of a node among the nodes that were fed to the source.
    """

    context: DraftContext
    sampling: Sampling
    text: Sequence[int]
    num_prompt: int
    branches: int
    known: Chances
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reaches: dict[int, float] = field(default_factory=lambda: {ROOT: 1.0})
    siblings: dict[int, Siblings] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})
    _num_drawn: int = 0

    def write(self, step: NextRows, limit: int, depth: int) -> Draft:
        grow = self._likeliest if self.sampling.greedy else self._drawn
        return grow(step, limit, depth)

    def _likeliest(self, step: NextRows, limit: int, depth: int) -> Draft:
        """A deterministic tree of the nodes with the largest chances."""
        nodes = [ROOT]
        best: list[int] = []
        for _ in range(depth):
            rows = _guesses(self._logits_after(nodes, step), self.branches)
            new = []
            for node, (tokens, confidences) in zip(nodes, rows, strict=True):
                self.open(node, confidences)
                new += [self.add(node, token) for token in tokens]
            best = nlargest(limit, range(len(self.parents)), key=lambda i: (self.reaches[i], -i))
            # a node that is not among the best has no descendant among them
            # A node outside the best has no descendant among them, because reaches only fall along
            # a path.
            least = self.reaches[best[-1]] if len(best) == limit else 0.0
            nodes = [node for node in new if self.reaches[node] > least]
            if not nodes:
                break
        return self.draft(sorted(best))

    def _drawn(self, step: NextRows, limit: int, depth: int) -> Draft:
        """A drawn tree. The numbers of children are fixed before anything is drawn."""
        nodes, rows = [ROOT], []
        for level in range(depth):
            q = self.sampling.log_distribution(self._logits_after(nodes, step))
            count = min(self.branches, q.shape[-1])
            # All siblings are drawn, and the shares below decide how many are kept, without looking
            # at them.
            drawn, laws = self._without_replacement(q, nodes, count)
            confidences = mx.exp(mx.max(q, axis=-1))
            tokens, possible, sure = read_all(drawn, mx.sum(q > -mx.inf, axis=-1), confidences)
            for node, most, confidence in zip(nodes, possible, sure, strict=True):
                self.open(node, [confidence] * min(most, count))
            new = []
            shares = self._shares(nodes, limit - len(self.parents), depth - level)
            for i, (node, share) in enumerate(zip(nodes, shares, strict=True)):
                new += [self.add(node, token) for token in tokens[i][:share]]
                rows += [law[i] for law in laws[:share]]
            nodes = new
            if not nodes or len(self.parents) == limit:
                break
        return self.draft(range(len(self.parents)), mx.stack(rows))

    def open(self, node: int, confidences: Sequence[float]) -> None:
        """Note the siblings that may follow a node, with the confidence in each."""
        depth, is_drawn = len(self._path(node)), not self.sampling.greedy
        evidence = [
            Evidence(confidence=sure, rank=rank, is_drawn=is_drawn)
            for rank, sure in enumerate(confidences)
        ]
        chances = [self.known.of_draft([one], first=depth)[0] for one in evidence]
        # Siblings exclude each other, so their chances add up to at most 1.
        total = max(1.0, sum(chances))
        self.siblings[node] = Siblings(depth, evidence, [chance / total for chance in chances])

    def add(self, node: int, token: int) -> int:
        place, new = self.siblings[node], len(self.parents)
        self.reaches[new] = self.reaches[node] * place.chances[len(place.children)]
        self.parents.append(node)
        self.tokens.append(token)
        place.children.append(new)
        return new

    def learn(self, text: Sequence[int]) -> None:
        node: int | None = ROOT
        for token in text:
            place = self.siblings.get(node) if node is not None else None
            if place is None:
                return
            node = None
            for child, evidence in zip(place.children, place.evidence, strict=False):
                right = self.tokens[child] == token
                self.known.learn([evidence], [right], first=place.depth)
                node = child if right else node

    def draft(self, nodes: Sequence[int], logprobs: mx.array | None = None) -> Draft:
        """The draft of these nodes, which include their ancestors."""
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        parents = [place[self.parents[node]] for node in nodes]
        forks = parents != chain(len(parents))
        tokens = [self.tokens[node] for node in nodes]
        return Draft(tokens, logprobs, parents=parents if forks else None)

    def _path(self, node: int) -> list[int]:
        return path_to(node, self.parents)

    def _logits_after(self, nodes: Sequence[int], step: NextRows) -> mx.array:
        """Processed logits [n, V] after these nodes."""
        if nodes == [ROOT]:
            logits = step(None, ())
        else:
            parents = [self.fed[self.parents[node]] for node in nodes]
            self.fed |= {node: len(self.fed) - 1 + i for i, node in enumerate(nodes)}
            logits = step(to_ids([self.tokens[node] for node in nodes]), parents)
        logits = match_vocab(logits, self.context.vocab_size)
        if not self.context.logits_processors:
            return logits
        rows: list[mx.array] = list(mx.split(logits, len(nodes)))
        for i, node in enumerate(nodes):
            seen = to_ids([*self.text, *(self.tokens[above] for above in self._path(node))])
            rows[i] = processed(rows[i], seen, self.context.logits_processors)
        return mx.concatenate(rows)

    def _without_replacement(
        self, q: mx.array, nodes: Sequence[int], count: int
    ) -> tuple[mx.array, list[mx.array]]:
        """Tokens [n, count] after n nodes, and the log-distributions [n, V] of each rank."""
        # Gumbel top-k: the largest values of log q + noise are draws without replacement.
        drawn, laws = top_tokens(q + self._noise(nodes, q.shape[-1]), count), [q]
        for rank in range(count - 1):
            is_drawn = mx.arange(q.shape[-1]) == drawn[:, rank, None]
            # Sibling r + 1 is drawn from q without the siblings before it: q(x) / (1 - sum of their
            # q).
            left = mx.where(is_drawn, -mx.inf, laws[-1])
            laws.append(left - mx.logsumexp(left, axis=-1, keepdims=True))
        return drawn, laws

    def _noise(self, nodes: Sequence[int], vocab_size: int) -> mx.array:
        if self.context.coupled:
            # Coupled drafts use the noise of the target's own draw at this position.
            depth = len(self._path(nodes[0]))
            return self.context.draft_gumbel(len(self.text) - self.num_prompt, depth)[None]
        first, self._num_drawn = self._num_drawn, self._num_drawn + len(nodes)
        return self.context.draft_gumbels(len(self.text) - self.num_prompt, len(nodes), first)

    def _shares(self, nodes: Sequence[int], limit: int, depth: int) -> list[int]:
        """Number of draws after each node, out of `limit` for the next `depth` levels."""
        here = [(self.reaches[node], self.siblings[node].chances) for node in nodes]
        values = [[reach * chance for chance in chances] for reach, chances in here]
        # A heuristic for tokens below: every later level is as likely as the first guess here.
        deeper = [reach * chances[0] ** k for reach, chances in here for k in range(2, depth + 1)]
        best = nlargest(limit, [*(value for row in values for value in row), *deeper])
        shares: list[int] = []
        for row in values:
            share = min(limit - sum(shares), sum(value >= best[-1] for value in row))
            shares.append(share)
        return shares


def _guesses(logits: mx.array, count: int) -> list[tuple[list[int], list[float]]]:
    """The likeliest tokens of each row [n, V] in order, with their probabilities."""
    logprobs = logits.astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    tokens = top_tokens(logprobs, count)
    rows = read_all(tokens, mx.exp(mx.take_along_axis(logprobs, tokens, axis=-1)))
    return list(zip(*rows, strict=True))
