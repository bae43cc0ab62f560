"""Passes over a token tree whose branches are rows of a batch, for models that take no mask.

Each leaf's path is a row, padded on the right, on repeated caches that are dropped after it: what
was kept is fed again, and the model's own caches never hold another token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList

from specdec_mlx.contracts.trees import ROOT, children_of, path_to


class BranchRows(NamedTuple):
    """A tree as a batch of its paths.

    paths: nodes from the root to each leaf. places: row and column of each node's logits, K + 1
    pairs, the first for the token before the tree.
    """

    paths: list[list[int]]
    places: list[tuple[int, int]]

    @classmethod
    def of(cls, parents: Sequence[int]) -> BranchRows:
        """Those of a tree of K >= 1 tokens; see `Draft.parents`."""
        children = children_of(parents)
        leaves = [node for node in range(len(parents)) if not children[node + 1]]
        paths = [list(path_to(leaf, parents)) for leaf in leaves]
        places = {ROOT: (0, 0)}
        for row, path in enumerate(paths):
            for column, node in enumerate(path, start=1):
                places.setdefault(node, (row, column))
        return cls(paths, [places[node] for node in range(ROOT, len(parents))])

    def fed(self, tokens: mx.array) -> mx.array:
        """Token ids [R, 1 + depth]; tokens: [1 + K] the text's last one and the tree's."""
        depth = max(map(len, self.paths))
        nodes = [[ROOT, *path, *[ROOT] * (depth - len(path))] for path in self.paths]
        return tokens[mx.array(nodes) + 1]


def tree_logits(
    model: nn.Module, caches: Sequence[Any], tokens: mx.array, parents: Sequence[int]
) -> mx.array:
    """Logits [K+1, V] of the last token of a text and of a tree after it, lazy.

    caches: of the text but for that token; left alone. tokens: [1 + K] that token and the tree's.
    """
    rows = BranchRows.of(parents)
    logits = model(rows.fed(tokens), cache=[repeated(cache, len(rows.paths)) for cache in caches])
    row, column = zip(*rows.places, strict=True)
    found: mx.array = logits[mx.array(row), mx.array(column)]
    return found


def repeated(cache: Any, num_rows: int) -> Any:
    """A cache of `num_rows` texts that are all the one of a cache."""
    if isinstance(cache, CacheList):
        return CacheList(*(repeated(part, num_rows) for part in cache.caches))
    made = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(made, name, _repeated(value, num_rows))
    return made


def _repeated(value: Any, num_rows: int) -> Any:
    """Arrays [1, ...], also in lists, in so many rows; anything else as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_repeated(item, num_rows) for item in value)
    if isinstance(value, mx.array) and value.ndim > 1 and value.shape[0] == 1:
        return mx.repeat(value, num_rows, axis=0)
    return value
