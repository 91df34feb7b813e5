"""Balanced K-means: k clusters of at least lo and at most hi points, exactly, for all nodes of a tree level at once.

    minimise  sum_i |x_i - mean of its cluster|^2   with   lo <= size <= hi for every cluster

Each iteration finds the assignment under the current prices (`assign.py`), a few price steps further, and recentres;
the prices carry over, so they converge together with the centres. At the end the assignment is made exact and
recentred a few times; with few clusters the last assignment is the optimum for its centres. Nodes of similar size are
padded to one tensor: a binary tree has thousands of nodes a level.

Everything is deterministic: no sums by atomics, seeds by hashing (`rng`), ties broken by a few extra coordinates that
hold a hash of the point and of the cluster, which also makes identical rows divisible among clusters.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import rng
from ..errors import TreeError
from .assign import Prices, flat_label, polish, raise_prices, repair, segment_sums, sizes_of, split_in_two

_NUMBERS = 1 << 25  # costs held at once, unless one node alone has more
_FEW = 64  # clusters up to which the last assignment is made optimal
_TIE = 1e-4  # weight of the tie breaker, in units of the points' spread
_TIE_DIMS = 6  # enough directions that every cluster is the best for some of many identical points


@dataclass(frozen=True)
class Task:
    """One node to split: which rows, into how many clusters, of which sizes."""

    rows: np.ndarray
    k: int
    lo: int
    hi: int


def check_rows(vectors: np.ndarray, ids: np.ndarray | None = None) -> np.ndarray:
    """The vectors as float32 (n, d), or a TreeError that names the first row that is not finite."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.shape[1] == 0:
        raise TreeError(f"token vectors must be a matrix with one row a token, got shape {vectors.shape}")
    if vectors.dtype.kind not in "fiu":
        raise TreeError(f"token vectors must be numbers, got {vectors.dtype}; convert them to float32")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused below
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    bad = np.asarray(~np.isfinite(vectors).all(axis=1))
    if bad.any():
        row = int(bad.argmax())
        token = int(ids[row]) if ids is not None else row
        raise TreeError(f"the vector of token {token} is not finite ({int(bad.sum())} such rows of {len(bad)}); "
                        "mend the embedding, or set those rows to zero to have them placed last")
    return vectors


def check_bounds(size: int, k: int, lo: int, hi: int) -> None:
    """TreeError unless `size` points can be put into k clusters of lo..hi."""
    if k < 1 or lo < 0 or hi < lo:
        raise TreeError(f"clusters need k >= 1 and 0 <= lo <= hi, got k={k}, lo={lo}, hi={hi}")
    if k > size and lo > 0:
        raise TreeError(f"{size} points cannot fill {k} clusters of at least {lo}: ask for at most {size} clusters")
    if not lo * k <= size <= hi * k:
        raise TreeError(f"{size} points do not fit {k} clusters of {lo} to {hi} (that is {lo * k} to {hi * k} points); "
                        "widen the ratios or change the number of clusters")


def balanced_kmeans(vectors: np.ndarray, k: int, lo: int, hi: int, *, seed: int, iterations: int = 20, finals: int = 3,
                    device: str = "cpu") -> np.ndarray:
    """(n, d) -> (n,) labels in 0..k-1 with lo <= size <= hi for every cluster, exactly."""
    vectors = check_rows(vectors)
    task = Task(np.arange(len(vectors)), k, lo, hi)
    return balanced_kmeans_many(vectors, [task], seed=seed, iterations=iterations, finals=finals, device=device)[0]


def balanced_kmeans_many(vectors: np.ndarray, tasks: Sequence[Task], *, seed: int, iterations: int = 20,
                         finals: int = 3, device: str = "cpu",
                         progress: Callable[[int], None] | None = None) -> list[np.ndarray]:
    """The labels of every task, in order. `vectors` are the rows that the tasks' `rows` point into."""
    vectors = check_rows(vectors)
    for task in tasks:
        check_bounds(len(task.rows), task.k, task.lo, task.hi)
    labels: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * len(tasks)
    shared = torch.from_numpy(vectors).to(device)
    for group in _groups(tasks):
        batch = _Batch(shared, [tasks[i] for i in group], seed)
        for i, label in zip(group, batch.solve(iterations, finals)):
            labels[i] = label
        if progress is not None:
            progress(sum(len(tasks[i].rows) for i in group))
    for task, label in zip(tasks, labels):
        size = np.bincount(label, minlength=task.k)
        assert len(size) == task.k and size.min() >= task.lo and size.max() <= task.hi, "bounds are exact"
    return labels


def cluster_sums(vectors: np.ndarray, rows: np.ndarray, label: np.ndarray, k: int) -> np.ndarray:
    """(k, d) sums of the vectors of `rows` by their labels, in float64."""
    order, end = np.argsort(label, kind="stable"), np.cumsum(np.bincount(label, minlength=k))
    parts = [vectors[rows[part]].sum(0, dtype=np.float64) for part in np.split(order, end[:-1])]
    return np.stack(parts)


def inertia(vectors: np.ndarray, label: np.ndarray, k: int, rows: np.ndarray | None = None) -> float:
    """Sum of squared distances to the cluster means, in float64; of some rows, if not of all."""
    rows = np.arange(len(vectors)) if rows is None else rows
    total, size = cluster_sums(vectors, rows, label, k), np.bincount(label, minlength=k)
    parts = (vectors[rows[first : first + 4096]] for first in range(0, len(rows), 4096))
    squares = sum(float(np.square(part, dtype=np.float64).sum()) for part in parts)
    return squares - float(((total * total).sum(1) / np.maximum(size, 1)).sum())


def _groups(tasks: Sequence[Task]) -> list[list[int]]:
    """Tasks with the same k and similar sizes, few enough that a group's costs fit in memory."""
    order = sorted(range(len(tasks)), key=lambda i: (tasks[i].k, -len(tasks[i].rows), i))
    groups: list[list[int]] = []
    for i in order:
        task = tasks[i]
        if groups:
            first = tasks[groups[-1][0]]
            room = (len(groups[-1]) + 1) * len(first.rows) * task.k <= _NUMBERS
            if first.k == task.k and 4 * len(task.rows) >= 3 * len(first.rows) and room:
                groups[-1].append(i)
                continue
        groups.append([i])
    return groups


class _Batch:
    """Tasks of one k, padded to the longest: points (B, m, d), centres (B, k, d)."""

    def __init__(self, vectors: Tensor, tasks: list[Task], seed: int):
        device = vectors.device
        self.tasks, self.k, self.device = tasks, tasks[0].k, device
        longest = max(len(task.rows) for task in tasks)
        rows = np.full((len(tasks), longest), -1, dtype=np.int64)
        for number, task in enumerate(tasks):
            rows[number, : len(task.rows)] = task.rows
        index = torch.from_numpy(rows).to(device)
        self.valid = index >= 0
        self.count = self.valid.sum(1)
        self.lo = torch.tensor([task.lo for task in tasks], device=device)
        self.hi = torch.tensor([task.hi for task in tasks], device=device)
        points = vectors[index.clamp(min=0)] * self.valid[:, :, None]
        mean = points.sum(1, keepdim=True) / self.count[:, None, None]
        self.points = (points - mean) * self.valid[:, :, None]  # near zero, float32 distances lose fewer digits
        random = rng.to_uniform(rng.words(index.flatten(), 1 + _TIE_DIMS, "kmeans", seed)).float()
        self.chance, tie = random[:, 0].view(index.shape), random[:, 1:].view(*index.shape, _TIE_DIMS) - 0.5
        self.left = torch.cat([-2 * self.points, _TIE * tie], dim=2)
        cluster = rng.words(torch.arange(self.k, device=device), _TIE_DIMS, "kmeans clusters", seed)
        direction = torch.nn.functional.normalize(rng.to_uniform(cluster).float() - 0.5, dim=1)
        spread = (self.points * self.points).sum((1, 2)) / self.count
        self.direction = torch.where(spread > 0, spread, 1)[:, None, None] * direction
        self.costs = self.points.new_empty(len(tasks), longest, self.k)

    def start(self) -> Tensor:
        """k different points of each node, uniformly: dense regions get more centres, as equal sizes want it."""
        order = torch.where(self.valid, self.chance, 2.0).argsort(dim=1, stable=True)
        rank = torch.arange(self.k, device=self.device) % self.count[:, None]  # more clusters than points: repeat
        chosen = order.gather(1, rank)
        return self.points.gather(1, chosen[:, :, None].expand(-1, -1, self.points.shape[2]))

    def cost(self, centres: Tensor) -> Tensor:
        """(B, m, k) squared distances less |x|^2, plus the tie breaker."""
        right = torch.cat([centres, self.direction], dim=2)
        return torch.baddbmm((centres * centres).sum(2)[:, None, :], self.left, right.transpose(1, 2), out=self.costs)

    def means(self, label: Tensor, centres: Tensor) -> Tensor:
        """Cluster means (B, k, d); a cluster without points keeps its centre."""
        nodes, dims = len(self.tasks), self.points.shape[2]
        total, size = segment_sums(self.points.reshape(-1, dims), flat_label(label, self.k), nodes * (self.k + 1))
        total, size = total.view(nodes, self.k + 1, dims)[:, : self.k], size.view(nodes, self.k + 1)[:, : self.k, None]
        return torch.where(size > 0, total / size.clamp(min=1), centres)

    def solve(self, iterations: int, finals: int) -> list[np.ndarray]:
        centres = self.start()
        prices = Prices(len(self.tasks), self.k, self.device)
        label = torch.where(self.valid, 0, self.k)
        for turn in range(iterations + finals if self.k > 1 else 0):
            cost = self.cost(centres)
            last = turn >= iterations
            steps = 10 if last else 4
            if self.k == 2:
                label = split_in_two(cost, self.valid, self.lo, self.hi)
            else:
                label = raise_prices(cost, self.valid, self.lo, self.hi, prices, steps)
                if last:
                    label = self.exact(cost, label, best=turn == iterations + finals - 1 and self.k <= _FEW)
            before, centres = centres, self.means(label, centres)
            prices.follow(((centres - before) ** 2).sum(2))
        found = label.cpu().numpy()
        return [found[number, : len(task.rows)] for number, task in enumerate(self.tasks)]

    def exact(self, cost: Tensor, label: Tensor, best: bool) -> Tensor:
        """Labels with every bound met: the nodes that need it are repaired one by one, and all polished for the `best`."""
        size = sizes_of(label, self.k)
        bad = ((size < self.lo[:, None]) | (size > self.hi[:, None])).any(1)
        for number in (bad | best).nonzero()[:, 0].tolist():
            task = self.tasks[number]
            n = len(task.rows)
            costs, mended = cost[number, :n].cpu().numpy(), label[number, :n].cpu().numpy()
            mended = repair(costs, mended, task.lo, task.hi)
            if best:
                mended = polish(costs, mended, task.lo, task.hi)
            label[number, :n] = torch.from_numpy(mended).to(self.device)
        return label
