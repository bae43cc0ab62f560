"""Token trees by their nodes' parents; row 0 of a pass follows the text, row i + 1 token i."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.contracts import ROOT


def children_of(parents: Sequence[int]) -> list[list[int]]:
    """The draft tokens that continue each row, in order; K+1 lists."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        children[parent + 1].append(node)
    return children


def depths_of(parents: Sequence[int]) -> list[int]:
    """Number of tokens before each node in its path. 0 for nodes that continue the text."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root down to a node. Empty for `ROOT`."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]
