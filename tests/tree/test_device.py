"""What a GPU computes, run on the processor: the same operations of torch, the same guarantees, and hardly a wait in them."""
from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdlm.tree import assign
from tdlm.tree.assign import segment_sums, sizes_of, two_cheapest
from tdlm.tree.build import build_tree
from tdlm.tree.cluster import balanced_kmeans, inertia
from tests.tree.test_build import check_splits
from tests.tree.test_cluster import SHAPES, points

WAITS = ("_local_scalar_dense", "nonzero")
"""Operations after which the processor knows what the device found."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Tensors are treated as if they lay on a GPU."""
    monkeypatch.setattr(assign, "in_numpy", lambda values: False)
    return monkeypatch


class Launches(TorchDispatchMode):
    """Operations by name: a device is asked for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(self.count[name] for name in WAITS)


@pytest.mark.parametrize("nodes, places, k, ties", [(1, 700, 90, False), (40, 30, 50, False), (3, 60, 7, True)])
def test_the_pieces_are_the_same(nodes: int, places: int, k: int, ties: bool, monkeypatch: pytest.MonkeyPatch):
    """To the bit, also which of equally cheap clusters is taken."""
    draw = torch.Generator().manual_seed(k)
    cost, price = torch.rand(nodes, places, k, generator=draw), torch.rand(nodes, k, generator=draw)
    if ties:
        cost, price = (cost * 3).round(), (price * 2).round()
    valid = torch.rand(nodes, places, generator=draw) > 0.2
    label = torch.where(valid, cost.argmin(2), k)
    here = [*two_cheapest(cost, price, valid), sizes_of(label, k), *segment_sums(cost[0], label[0], k + 1)]
    monkeypatch.setattr(assign, "in_numpy", lambda values: False)
    there = [*two_cheapest(cost, price, valid), sizes_of(label, k), *segment_sums(cost[0], label[0], k + 1)]
    assert len(here) == len(there) == 6 and all(torch.equal(a, b) for a, b in zip(here, there))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n, k", [(900, 2), (900, 30), (1500, 80)])
def test_bounds_hold_and_the_clusters_are_as_good(shape: str, n: int, k: int, monkeypatch: pytest.MonkeyPatch):
    """Within 1% of what the processor finds: sums are rounded in another order, and thousands of points lie near a boundary."""
    x, lo, hi = points(shape, n, 1), int(0.8 * n / k), int(1.2 * n / k)
    here = balanced_kmeans(x, k, lo, hi, seed=0, iterations=8)
    monkeypatch.setattr(assign, "in_numpy", lambda values: False)
    there = balanced_kmeans(x, k, lo, hi, seed=0, iterations=8)
    assert np.array_equal(there, balanced_kmeans(x, k, lo, hi, seed=0, iterations=8)), "the same twice"
    sizes = np.bincount(there, minlength=k)
    assert sizes.min() >= lo and sizes.max() <= hi
    least = 1e-6 * float(np.square(x, dtype=np.float64).sum())  # of identical rows every partition is as good
    assert inertia(x, there, k) <= 1.01 * inertia(x, here, k) + least


@pytest.mark.parametrize("k, height", [(30, None), (12, 3), (6, None), (2, None)])
def test_whole_trees(k: int, height: int | None, elsewhere: pytest.MonkeyPatch):
    rows = points("normal", 1300, 2, dims=8)
    rows[::100] = 0
    tree = build_tree(rows, branching=k, height=height, iterations=4)
    assert check_splits(tree, height=height) and tree.to_bytes() == build_tree(rows, branching=k, height=height,
                                                                               iterations=4).to_bytes()
    elsewhere.undo()
    here = build_tree(rows, branching=k, height=height, iterations=4)
    for one, other in zip(tree.meta["levels"][:2], here.meta["levels"][:2]):
        assert one["inertia"] == pytest.approx(other["inertia"], rel=0.01)


@pytest.mark.parametrize("n, k", [(600, 80), (1200, 160)])
def test_waits_and_launches_do_not_grow_with_the_problem(n: int, k: int, elsewhere: pytest.MonkeyPatch):
    """About two questions and a hundred operations a price step, however many points and clusters."""
    x, steps = points("normal", n, 3), 5 * 4 + 3 * 10
    with Launches() as seen:
        balanced_kmeans(x, k, int(0.8 * n / k), -(-n * 6 // (5 * k)), seed=0, iterations=5)
    assert 0 < seen.waits <= 3 * steps and sum(seen.count.values()) <= 110 * steps, seen.count.most_common(12)
