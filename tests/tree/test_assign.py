"""The assignment step: prices and repair against the exact optimum."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tdlm.tree.assign import Prices, polish, raise_prices, repair, split_in_two, two_cheapest, violations
from tests.tree.optimum import best_assignment, hungarian, labellings


def total(cost: np.ndarray, label: np.ndarray) -> float:
    return float(cost[np.arange(len(label)), label].sum())


def instance(seed: int, n: int, k: int, dims: int = 3) -> np.ndarray:
    """Squared distances of n points to k centres, unevenly spread."""
    draw = np.random.default_rng(seed)
    points = draw.standard_normal((n, dims)) * draw.lognormal(0, 0.7, (n, 1))
    centres = points[draw.choice(n, k, replace=False)]
    return ((points[:, None] - centres) ** 2).sum(2)


def test_the_judge_itself():
    for seed in range(30):
        draw = np.random.default_rng(seed)
        n, k = int(draw.integers(2, 8)), int(draw.integers(2, 4))
        lo, hi = n // k - int(n // k > 0 and draw.integers(2)), -(-n // k) + int(draw.integers(2))
        cost = draw.integers(0, 9, (n, k)).astype(float) if seed % 2 else draw.standard_normal((n, k))
        every = min(total(cost, label) for label in labellings(n, k, lo, hi))
        assert best_assignment(cost, lo, hi) == pytest.approx(every)
        square = draw.standard_normal((6, 6))
        assert sorted(hungarian(square)) == list(range(6))


@given(st.integers(0, 10_000), st.integers(4, 14), st.integers(2, 4), st.booleans(), st.data())
def test_repair_is_optimal_on_tiny_instances(seed: int, n: int, k: int, ties: bool, data: st.DataObject):
    """From every point in its cheapest cluster, shortest paths lead to the optimum, also through third clusters."""
    k = min(k, n)
    lo = data.draw(st.integers(0, n // k))
    hi = data.draw(st.integers(-(-n // k), n))
    draw = np.random.default_rng(seed)
    cost = draw.integers(0, 6, (n, k)).astype(np.float64) if ties else draw.exponential(1.0, (n, k))
    label = repair(cost, cost.argmin(1), lo, hi)
    assert violations(label, k, lo, hi) == 0
    assert total(cost, label) == pytest.approx(best_assignment(cost, lo, hi), abs=1e-9)


def test_the_best_path_leads_through_a_third_cluster():
    """Point 1 may leave cluster 0 for 1 only cheaply, point 2 cluster 1 for 2: two small moves beat one large one."""
    cost = np.array([[0, 9, 9], [0, 1, 9], [9, 0, 1], [9, 0, 9.0]])
    label = repair(cost, np.array([0, 0, 1, 1]), 1, 2)
    assert label.tolist() == [0, 0, 2, 1]
    assert repair(cost, np.array([0, 0, 0, 1]), 1, 2).tolist() == [0, 0, 2, 1]


@pytest.mark.parametrize("seed", range(12))
def test_prices_repair_and_polish(seed: int):
    """Prices and repair come near, polish comes to the optimum, from there and from any other start."""
    n, k = 90, (3, 6, 9)[seed % 3]
    cost = instance(seed, n, k)
    lo, hi = int(0.8 * n / k), int(1.2 * n / k)
    best = best_assignment(cost, lo, hi)
    found = raise_prices(torch.from_numpy(cost)[None].float(), torch.ones(1, n, dtype=torch.bool), torch.tensor([lo]),
                         torch.tensor([hi]), Prices(1, k, torch.device("cpu")), 30)[0].numpy()
    label = repair(cost, found, lo, hi)
    assert violations(label, k, lo, hi) == 0 and violations(cost.argmin(1), k, lo, hi) > 0
    assert total(cost, label) <= 1.05 * best
    anywhere = repair(cost, np.random.default_rng(seed).integers(0, k, n), lo, hi)
    assert total(cost, anywhere) > 1.05 * best, "the second start shows nothing"
    for start in (label, anywhere):
        polished = polish(cost, start, lo, hi)
        assert violations(polished, k, lo, hi) == 0
        assert total(cost, polished) == pytest.approx(best, rel=1e-4)


@given(st.integers(0, 10_000), st.integers(4, 14), st.integers(2, 4), st.data())
def test_polish_is_optimal_on_tiny_instances_from_any_start(seed: int, n: int, k: int, data: st.DataObject):
    lo = data.draw(st.integers(0, n // k))
    hi = data.draw(st.integers(-(-n // k), n))
    draw = np.random.default_rng(seed)
    cost = draw.integers(0, 6, (n, k)).astype(np.float64)
    label = polish(cost, draw.permutation(np.arange(n) % k), lo, hi)
    assert violations(label, k, lo, hi) == 0
    assert total(cost, label) == pytest.approx(best_assignment(cost, lo, hi), abs=1e-9)


@given(st.integers(0, 10_000), st.integers(2, 9), st.data())
def test_two_clusters_are_cut_at_the_optimum(seed: int, n: int, data: st.DataObject):
    lo = data.draw(st.integers(0, n // 2))
    hi = data.draw(st.integers(-(-n // 2), n))
    cost = np.random.default_rng(seed).standard_normal((n, 2))
    padded = torch.cat([torch.from_numpy(cost), torch.zeros(3, 2, dtype=torch.float64)])[None]
    valid = torch.arange(n + 3)[None] < n
    label = split_in_two(padded, valid, torch.tensor([lo]), torch.tensor([hi]))[0]
    assert label[n:].tolist() == [2, 2, 2]
    assert violations(label[:n].numpy(), 2, lo, hi) == 0
    assert total(cost, label[:n].numpy()) == pytest.approx(min(total(cost, each) for each in labellings(n, 2, lo, hi)))


@pytest.mark.parametrize("nodes, places, k", [(1, 7, 2), (3, 5, 4), (2, 600, 900), (40, 30, 500)])
def test_two_cheapest_is_topk(nodes: int, places: int, k: int):
    """Whatever the blocks it works through."""
    draw = torch.Generator().manual_seed(k)
    cost, price = torch.rand(nodes, places, k, generator=draw), torch.rand(nodes, k, generator=draw)
    valid = torch.rand(nodes, places, generator=draw) > 0.2
    best, second, slack = two_cheapest(cost, price, valid)
    value, index = (cost + price[:, None]).topk(2, dim=2, largest=False)
    assert torch.equal(best, index[:, :, 0].masked_fill(~valid, k))
    assert torch.equal(second, index[:, :, 1].masked_fill(~valid, k))
    assert torch.equal(slack, torch.where(valid, value[:, :, 1] - value[:, :, 0], 0))


def test_bounds_that_only_a_bulk_move_reaches_in_time():
    """Thousands of points in one cluster: every bound is met, and nobody moves who need not."""
    n, k = 6000, 30
    cost = np.ones((n, k))
    cost[:, 0] = 0
    label = repair(cost, np.zeros(n, dtype=np.int64), 100, 300)
    sizes = np.bincount(label, minlength=k)
    assert sizes.min() >= 100 and sizes.max() <= 300 and sizes[0] == 300
