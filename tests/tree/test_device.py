"""What a GPU computes, run on the processor: the same operations of torch, the same guarantees, and hardly a wait in them."""
from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import tree as benchmark
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


def test_the_benchmark_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every tree is made, one that fails is told and stops no other, and each aim is judged by its own tree."""
    monkeypatch.setattr(benchmark, "DEVICE_RUNS", {"K=225, height 2": 2, "broken": 1, "late": 1})
    monkeypatch.setitem(benchmark.REQUESTS, "broken", ("gpt2", 1, None))
    options = argparse.Namespace(device="cpu", data=None, seconds=600.0, tiny=True, out=tmp_path / "tree.json")
    result = benchmark.on_device(options)
    tree = result["trees"]["K=225, height 2"]
    assert tree["device"]["same_bytes"] and tree["device"]["sha256"] == tree["processor"]["sha256"]
    assert tree["device"]["splits"] == 1 and tree["device"]["splits_out_of_bounds"] == 0
    assert "at least 2, got 1" in result["trees"]["broken"]["device"]["failed"]
    assert [aim["met"] for aim in result["aims"].values()] == [True] * 3
    assert set(json.loads(options.out.read_text())["trees"]) == {"K=225, height 2", "broken", "late"}
    options.seconds = 0.0
    assert all("left out" in both["device"]["failed"] for both in benchmark.on_device(options)["trees"].values())


def test_aims_of_a_device():
    here = {"seconds": {"first": 4.0, "median": 1.0}, "root_inertia": 102.0, "splits_out_of_bounds": 0, "same_bytes": False}
    aims = benchmark.device_aims({"K=512": {"device": here, "processor": {"seconds": 9.0, "root_inertia": 100.0}}})
    assert {name.split(": ")[1]: aim["met"] for name, aim in aims.items()} == {
        "root inertia over the processor's": False, "splits out of bounds": True, "same bytes in every run": False,
        "seconds, first": False, "seconds, median": True}
