"""The best assignment and the best clustering, found the slow and certain way: the judges of the tests beside them."""
from __future__ import annotations

import itertools

import numpy as np


def best_assignment(cost: np.ndarray, lo: int, hi: int) -> float:
    """The least total cost of putting every point (row) into a cluster (column) with lo <= size <= hi.

    As a one-to-one assignment: a cluster is `lo` places that must be taken and `hi - lo` that may be; points that do
    not exist take what is left of the latter."""
    n, k = cost.shape
    must = np.repeat(np.arange(k), lo)
    may = np.repeat(np.arange(k), hi - lo)
    spare = len(must) + len(may) - n
    far = 1 + 2 * n * float(np.abs(cost).max(initial=0))
    square = np.block([[cost[:, must], cost[:, may]],
                       [np.full((spare, len(must)), far), np.zeros((spare, len(may)))]])
    column_of = hungarian(square)
    cluster = np.r_[must, may][column_of[:n]]
    sizes = np.bincount(cluster, minlength=k)
    assert sizes.min() >= lo and sizes.max() <= hi
    return float(cost[np.arange(n), cluster].sum())


def hungarian(cost: np.ndarray) -> np.ndarray:
    """The column of every row in a cheapest one-to-one assignment of a square matrix (shortest augmenting paths)."""
    n = len(cost)
    row_price, column_price = np.zeros(n + 1), np.zeros(n + 1)
    row_of = np.full(n + 1, -1)  # the last column stands for "not yet assigned"
    for row in range(n):
        row_of[n] = row
        here, distance, before = n, np.full(n, np.inf), np.full(n, n)
        done = np.zeros(n + 1, dtype=bool)
        while row_of[here] >= 0:
            done[here] = True
            reduced = cost[row_of[here]] - row_price[row_of[here]] - column_price[:n]
            better = ~done[:n] & (reduced < distance)
            distance[better], before[better] = reduced[better], here
            step = distance[~done[:n]].min()
            row_price[row_of[done]] += step
            column_price[done] -= step
            distance[~done[:n]] -= step
            here = int(np.flatnonzero(~done[:n])[distance[~done[:n]].argmin()])
        while here != n:
            row_of[here] = row_of[before[here]]
            here = int(before[here])
    column_of = np.empty(n, dtype=np.int64)
    column_of[row_of[:n]] = np.arange(n)
    return column_of


def labellings(n: int, k: int, lo: int, hi: int) -> list[np.ndarray]:
    """Every way to put n points into k clusters of lo..hi."""
    found = (np.array(label) for label in itertools.product(range(k), repeat=n))
    return [label for label in found if lo <= (size := np.bincount(label, minlength=k)).min() and size.max() <= hi]
