"""Exact distributions of rounds that draft trees, and named wrong rules for them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exact import ByRule, Rounds, Source
from k_sequential import KSequential
from specdec_mlx.contracts import ROOT
from specdec_mlx.lab.proof.enumeration import Outcomes, Tokens
from specdec_mlx.rules import acceptance_probability, capped_ratio, point_mass, residual
from specdec_mlx.trees.shape import children_of, path_to
from specdec_mlx.trees.tree_rules import MultiRound, Traversal, TreeCoinRule, remaining_laws

TREE_RULES: dict[str, TreeCoinRule] = {
    "multi-round": MultiRound(),
    "k-sequential": KSequential(),
    "traversal": Traversal(),
}
"""The rules by coins."""

Shape = tuple[int, ...]


@functools.cache
def shapes(num_nodes: int) -> list[Shape]:
    """Parents of all ordered trees with so many tokens below the root, in pre-order."""
    found: list[Shape] = [()]
    for node in range(num_nodes):  # it hangs from the one before it, or from what that hangs from
        found = [
            (*parents, parent)
            for parents in found
            for parent in (*path_to(node - 1, parents)[::-1], ROOT)
        ]
    return found


@dataclass(frozen=True, eq=False)
class TreeDrawn:
    """Trees of one shape, their tokens drawn from a source."""

    source: Source
    parents: Shape
    replace: bool = True
    renormalised: bool = True
    fixed: bool = False

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Each with its chance, and the rows that its tokens say they were drawn from."""
        yield from self._longer(state, (), 1.0, [])

    def _longer(
        self, state: int, tokens: Tokens, weight: float, rows: list[np.ndarray]
    ) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        node = len(tokens)
        if node == len(self.parents):
            yield weight, tokens, np.stack(rows)
            return
        parent = self.parents[node]
        probs = law = self.source.after(state, _on_path(tokens, parent, self.parents))
        seen = [tokens[i] for i in range(node) if self.parents[i] == parent]
        if self.fixed:
            likeliest = np.argsort(-law, kind="stable")[[len(seen) % len(law)]]
            probs = point_mass(likeliest, law[None])[0]
        elif not self.replace:
            probs = _without(law, seen)
        for token in np.flatnonzero(probs):
            row = probs if self.renormalised else law
            longer = (*tokens, int(token))
            yield from self._longer(state, longer, weight * probs[token], [*rows, row])


def _on_path(tokens: Tokens, node: int, parents: Shape) -> Tokens:
    return tuple(tokens[i] for i in path_to(node, parents))


def _without(law: np.ndarray, seen: list[int]) -> np.ndarray:
    """A law without some tokens; uniform over the others where it has no mass on them."""
    others = np.isin(np.arange(len(law)), seen, invert=True).astype(float)
    left = law * others if (law * others).sum() > 0 else others
    return left / left.sum() if left.sum() > 0 else law


@dataclass(frozen=True, eq=False)
class ByOwnTokens:
    """Match: all that the target may draw on its way through the tree."""

    parents: Shape

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, probs: np.ndarray) -> Outcomes:
        """A row at a time: the way ends at the first draw that no child carries."""
        result: dict[Tokens, np.ndarray] = defaultdict(lambda: np.zeros(target_probs.shape[-1]))
        children = children_of(self.parents)

        def go_on(row: int, emitted: Tokens, weight: float) -> None:
            for own, chance in enumerate(target_probs[row]):
                carrying = [child for child in children[row] if tokens[child] == own]
                if carrying:
                    go_on(carrying[0] + 1, (*emitted, own), weight * chance)
                else:
                    result[emitted][own] += weight * chance

        go_on(0, (), 1.0)
        return iter(result.items())


def rounds(target: Source, drawn: Any, rule: TreeCoinRule | None) -> Rounds:
    """Rounds under a rule by coins, or under match."""
    parents = drawn.parents
    return Rounds(target, drawn, ByRule(rule, parents) if rule else ByOwnTokens(parents))


def depth(parents: Shape) -> int:
    """Tokens on the longest path."""
    return max(len(path_to(node, parents)) for node in range(len(parents)))


@dataclass(frozen=True, eq=False)
class TriedLikeliestFirst(TreeDrawn):
    """Wrong: siblings below the root are tried in the target's order."""

    target: Source | None = None

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        assert set(self.parents) == {ROOT}, "a star: rows need no reordering"
        assert self.target is not None
        p = self.target.after(state, ())
        for weight, tokens, probs in super().drafts(state):
            yield weight, tuple(sorted(tokens, key=lambda token: -p[token])), probs


class ForgetsResidual(MultiRound):
    """Wrong: each sibling is held against p itself."""

    def at_node(self, target_probs: Any, candidates: Any, draft_probs: Any) -> Any:
        p = np.stack([target_probs] * len(candidates))
        left = remaining_laws(target_probs, draft_probs)
        return acceptance_probability(p, draft_probs, candidates), left[-1]


class OneTry(KSequential):
    """Wrong: the factor of a single draw, for several."""

    def at_node(self, target_probs: Any, candidates: Any, draft_probs: Any) -> Any:
        p = np.stack([target_probs] * len(candidates))
        chances = acceptance_probability(p, draft_probs, candidates)
        return chances, residual(target_probs, draft_probs[0])


class KeepsWeight(Traversal):
    """Wrong: a row keeps its weight when a child is rejected."""

    def judge(self, target_probs: Any, draft_tokens: Any, draft_probs: Any, parents: Any) -> Any:
        left, weights = list(target_probs), [1.0] * (len(parents) + 1)
        children = children_of(parents)

        def settle(row: int) -> None:
            for child in children[row]:
                q, token = draft_probs[child], draft_tokens[child]
                weights[child + 1] = capped_ratio(weights[row] * left[row][token], q[token])
                settle(child + 1)
                left[row] = residual(left[row], q, weights[row])

        settle(0)
        return np.array(weights[1:]), np.stack(left)


WRONG_TREE_RULES: dict[str, Sequence[Any]] = {
    "residual not carried to the next sibling": (ForgetsResidual(), {}),
    "a child's row not renormalised": (MultiRound(), {"replace": False, "renormalised": False}),
    "several tries at the factor of one": (OneTry(), {}),
    "a row's weight kept after a rejection": (KeepsWeight(), {}),
}
"""Each with the way to draw that it fails on."""
