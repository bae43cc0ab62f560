"""How a draft that forks is written: level by level, all tokens of a level in one pass.

A point-mass tree is grown as EAGLE-2 has it (Li et al. 2024, arXiv 2406.16858, section 4): a node
has a *chance* that the text goes through it, that of its parent times what the draft's probability
of its token is worth (`stats.nodes`). Of each level those nodes are continued that are among the
likeliest so far, and at the end the likeliest of all are the draft. Which tokens these are is no
draw, so any may be left out.

Drawn trees have siblings drawn without replacement (Sequoia, Chen et al. 2024, arXiv 2402.12374),
each with the distribution that it was drawn from, given those before it. A token that was drawn
must not be dropped for what it is, so how many are drawn at a place is settled before, by the
distribution there and by the tokens above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, nlargest
from itertools import count
from typing import Protocol, runtime_checkable

import mlx.core as mx

from specdec_mlx.drafters.drawing import fit_width
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.stats.nodes import NodeHistory
from specdec_mlx.token_ids import read_all, to_ids
from specdec_mlx.types import ROOT, Draft, DraftContext
from specdec_mlx.types.trees import chain, path_to


def check_branches(branches: int) -> None:
    """Raise ValueError for what cannot be a number of tokens at a place."""
    if branches < 1:
        raise ValueError(f"branches={branches}: expected an int >= 1 (1: chains).")


@runtime_checkable
class Levels(Protocol):
    """What knows a draft's distribution after each of its tokens."""

    def logits_after(self, tokens: mx.array, parents: Sequence[int]) -> mx.array:
        """Logits [n, V] of what follows each of n further tokens.

        Args:
            tokens: [n].
            parents: [n] of each, among all tokens that were given so far; `ROOT` for those that
                continue the text.
        """
        ...


@dataclass
class Place:
    """What may follow a node: siblings, each with the confidence in it and its chance.

    depth: how many tokens of the tree stand before them. children: those that became nodes.
    """

    depth: int
    confidences: list[float]
    chances: list[float]
    children: list[int] = field(default_factory=list)


@dataclass
class Tree:
    """A tree in the making.

    history: how likely its nodes are. parents, tokens, chances: of each node, parents first.
    places: node -> what follows it, for those whose continuations were asked for, in that order;
    `ROOT` for the text.
    """

    history: NodeHistory
    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})

    def __len__(self) -> int:
        """Nodes."""
        return len(self.parents)

    def reach(self, node: int) -> float:
        """Chance that the text goes through a node."""
        return 1.0 if node == ROOT else self.chances[node]

    def open(self, node: int, confidences: list[float]) -> Place:
        """Note what may follow a node."""
        depth = len(path_to(node, self.parents))
        place = Place(depth, confidences, self.history.chances(confidences, depth))
        self.places[node] = place
        return place

    def add(self, node: int, token: int) -> int:
        """A further node: the next sibling at a place."""
        place = self.places[node]
        self.chances.append(self.reach(node) * place.chances[len(place.children)])
        self.parents.append(node)
        self.tokens.append(token)
        place.children.append(len(self) - 1)
        return len(self) - 1

    def feed(self, nodes: Sequence[int], levels: Levels) -> mx.array:
        """Logits [n, V] of what follows some nodes."""
        parents = [self.fed[self.parents[node]] for node in nodes]
        for node in nodes:
            self.fed[node] = len(self.fed) - 1
        return levels.logits_after(to_ids([self.tokens[node] for node in nodes]), parents)

    def learn(self, text: Sequence[int]) -> None:
        """Tell the history how the text went on."""
        node = ROOT
        for token in text:
            place = self.places.get(node)
            if place is None:
                return
            right = [self.tokens[child] for child in place.children]
            rank = right.index(token) if token in right else None
            self.history.learn(place.confidences[: len(right)], place.depth, rank)
            if rank is None:
                return
            node = place.children[rank]

    def draft(self, nodes: Sequence[int], logprobs: mx.array | None = None) -> Draft:
        """Some of the nodes, in order, with all their ancestors; a chain where they do not fork."""
        if not nodes:
            return Draft()
        place = {node: i for i, node in enumerate(nodes)} | {ROOT: ROOT}
        parents = [place[self.parents[node]] for node in nodes]
        forks = parents != chain(len(parents))
        tokens = [self.tokens[node] for node in nodes]
        return Draft(tokens, logprobs, parents=parents if forks else None)


class TreeDraws:
    """One draft that forks, while it is written.

    Args:
        context: the generation's.
        sampling: how drafts are drawn; greedy makes point masses.
        text: [n] prompt and tokens emitted.
        num_prompt: tokens of the prompt.
        branches: most tokens at a place.
        history: how likely nodes are.
    """

    def __init__(
        self,
        context: DraftContext,
        sampling: Sampling,
        text: Sequence[int],
        num_prompt: int,
        branches: int,
        history: NodeHistory,
    ) -> None:
        """Nothing was written yet."""
        self.tree = Tree(history)
        self._context = context
        self._sampling = sampling
        self._text = text
        self._start = len(text) - num_prompt
        self._branches = branches
        self._num_drawn = 0

    def write(self, first: mx.array, levels: Levels, limit: int, depth: int | None = None) -> Draft:
        """A tree of at most `limit` tokens.

        Args:
            first: [1, V] logits of what follows the text.
            levels: what knows the others.
            limit: most tokens, at least one.
            depth: most tokens on a path, at least one; None for any number.
        """
        grow = self._drawn if self.tree.history.is_drawn else self._likeliest
        return grow(first, levels, limit, limit if depth is None else min(limit, depth))

    def _likeliest(self, logits: mx.array, levels: Levels, limit: int, depth: int) -> Draft:
        """The tokens of the greatest chances."""
        tree, nodes = self.tree, [ROOT]
        best: list[int] = []
        for level in range(depth):
            if level:
                logits = tree.feed(nodes, levels)
            new = []
            rows = _guesses(self._processed(logits, nodes), self._branches)
            for node, (tokens, confidences) in zip(nodes, rows, strict=True):
                tree.open(node, confidences)
                new += [tree.add(node, token) for token in tokens]
            best = nlargest(limit, range(len(tree)), key=lambda i: (tree.chances[i], -i))
            least = tree.chances[best[-1]] if len(best) == limit else 0.0
            nodes = [node for node in new if tree.chances[node] > least]
            if not nodes:
                break
        return tree.draft(sorted(best))

    def _drawn(self, logits: mx.array, levels: Levels, limit: int, depth: int) -> Draft:
        """Draws, as many at each place as pay best by what is known before them."""
        tree, nodes, rows = self.tree, [ROOT], []
        for level in range(depth):
            if level:
                logits = tree.feed(nodes, levels)
            q = self._sampling.log_distribution(self._processed(logits, nodes))
            count = min(self._branches, q.shape[-1])
            drawn, laws = self._without_replacement(q, nodes, count)
            confidences = mx.exp(mx.max(q, axis=-1))
            numbers = read_all(drawn, mx.sum(q > -mx.inf, axis=-1), confidences)
            for node, most, confidence in zip(nodes, *numbers[1:], strict=True):
                tree.open(node, [confidence] * min(most, count))
            new = []
            shares = _shares(tree, nodes, limit - len(tree), depth - level)
            for i, (node, share) in enumerate(zip(nodes, shares, strict=True)):
                new += [tree.add(node, token) for token in numbers[0][i][:share]]
                rows += [law[i] for law in laws[:share]]
            nodes = new
            if not nodes or len(tree) == limit:
                break
        return tree.draft(range(len(tree)), mx.stack(rows))

    def _without_replacement(
        self, q: mx.array, nodes: Sequence[int], count: int
    ) -> tuple[mx.array, list[mx.array]]:
        """`count` draws after each of n nodes, as the greatest of scores with Gumbel noise.

        Args:
            q: [n, V] log-probabilities.
            nodes: [n].
            count: how many.

        Returns:
            Tokens [n, count], and [n, V] log-probabilities of each rank, given those before it.
        """
        scores = q + self._noise(nodes, q.shape[-1])
        some = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
        order = mx.argsort(-mx.take_along_axis(scores, some, axis=-1), axis=-1)
        drawn = mx.take_along_axis(some, order, axis=-1)
        laws = [q]
        for rank in range(count - 1):
            is_drawn = mx.arange(q.shape[-1]) == drawn[:, rank, None]
            left = mx.where(is_drawn, -mx.inf, laws[-1])
            laws.append(left - mx.logsumexp(left, axis=-1, keepdims=True))
        return drawn, laws

    def _noise(self, nodes: Sequence[int], vocab_size: int) -> mx.array:
        """Gumbel noise [n, V], independent for each node; coupled, that of the target's draw."""
        if self._context.coupled:
            depth = len(path_to(nodes[0], self.tree.parents))
            return self._context.draft_gumbel(self._start, depth)[None]
        first, self._num_drawn = self._num_drawn, self._num_drawn + len(nodes)
        return self._context.draft_gumbels(self._start, len(nodes), first)

    def _processed(self, logits: mx.array, nodes: Sequence[int]) -> mx.array:
        """Logits [n, V], as the target's would be after the same text."""
        logits = fit_width(logits, self._context.vocab_size)
        if not self._context.logits_processors:
            return logits
        rows = []
        for i, node in enumerate(nodes):
            path = [self.tree.tokens[above] for above in path_to(node, self.tree.parents)]
            seen, row = to_ids([*self._text, *path]), logits[i : i + 1]
            for processor in self._context.logits_processors:
                row = processor(seen, row)
            rows.append(row)
        return mx.concatenate(rows)


def _guesses(logits: mx.array, count: int) -> list[tuple[list[int], list[float]]]:
    """The likeliest tokens of each row [n, V], each with its probability, the likeliest first."""
    count = min(count, logits.shape[-1])
    logprobs = logits.astype(mx.float32)
    logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
    some = mx.argpartition(-logprobs, count - 1, axis=-1)[:, :count]
    values = mx.take_along_axis(logprobs, some, axis=-1)
    order = mx.argsort(-values, axis=-1)
    best = mx.take_along_axis(values, order, axis=-1)
    found = read_all(mx.take_along_axis(some, order, axis=-1), mx.exp(best))
    return list(zip(*found, strict=True))


def _shares(tree: Tree, nodes: Sequence[int], limit: int, depth: int) -> list[int]:
    """How many draws each of some places gets, out of `limit` for all that is still to come.

    The best tree is planned ahead as if at all deeper places the chances were those at hand, on
    average; of it the children of these places are taken.

    Args:
        tree: as far as it is.
        nodes: whose children are next.
        limit: nodes that may be added.
        depth: levels that may.
    """
    places = [tree.places[node] for node in nodes]
    usual = _usual([tree.reach(node) for node in nodes], [place.chances for place in places])
    shares = [0] * len(nodes)
    found = count()
    waiting = [
        (-tree.reach(node) * place.chances[0], next(found), index, 0, 0, place.chances)
        for index, (node, place) in enumerate(zip(nodes, places, strict=True))
    ]
    heapify(waiting)
    for _ in range(limit):
        if not waiting:
            break
        loss, _, index, level, rank, chances = heappop(waiting)
        shares[index] += level == 0
        if rank + 1 < len(chances):
            sibling = loss / chances[rank] * chances[rank + 1]
            heappush(waiting, (sibling, next(found), index, level, rank + 1, chances))
        if level + 1 < depth:
            heappush(waiting, (loss * usual[0], next(found), index, level + 1, 0, usual))
    return shares


def _usual(reaches: Sequence[float], chances: Sequence[Sequence[float]]) -> list[float]:
    """Chances by rank over some places, each weighed by how likely the text gets there."""
    total = sum(reaches)
    found = [0.0] * max(map(len, chances))
    for reach, row in zip(reaches, chances, strict=True):
        for rank, chance in enumerate(row):
            found[rank] += reach / total * chance
    return found


class Marginals:
    """A draft whose distributions depend on the place alone, as of heads that draft at once.

    logits: [n, V] of n places.
    """

    def __init__(self, logits: mx.array) -> None:
        """Nothing was asked yet."""
        self._logits = logits
        self._depths: list[int] = []

    def logits_after(self, tokens: mx.array, parents: Sequence[int]) -> mx.array:
        """Those of the place after each token; see `Levels`."""
        depths = [1 if parent == ROOT else self._depths[parent] + 1 for parent in parents]
        self._depths += depths
        return self._logits[mx.array(depths)]
