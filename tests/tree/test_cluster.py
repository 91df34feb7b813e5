"""Balanced K-means: bounds that hold exactly for whatever comes in, and an objective beside the enumerated one."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import TreeError
from tdlm.tree.cluster import Task, balanced_kmeans, balanced_kmeans_many, check_rows, inertia
from tests.tree.optimum import best_assignment, labellings

SHAPES = ("normal", "equal rows", "three different rows", "one cluster swallows all", "wild scales", "far from zero", "zero")


def points(shape: str, n: int, seed: int, dims: int = 3) -> np.ndarray:
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((n, dims))
    if shape == "equal rows":
        x[:] = x[0]
    elif shape == "three different rows":
        x = x[draw.integers(0, min(3, n), n)]
    elif shape == "one cluster swallows all":
        x[n // 10:] *= 1e-4
        x[: n // 10] *= 100
    elif shape == "wild scales":
        x *= 10.0 ** draw.integers(-20, 19, (n, 1))
    elif shape == "far from zero":
        x += 1e6
    elif shape == "zero":
        x[:] = 0
    return x.astype(np.float32)


@settings(max_examples=150)
@given(st.sampled_from(SHAPES), st.integers(1, 80), st.integers(1, 12), st.integers(0, 1000), st.data())
def test_sizes_are_in_bounds_whatever_comes_in(shape: str, n: int, k: int, seed: int, data: st.DataObject):
    k = min(k, n)
    lo = data.draw(st.integers(0, n // k))
    hi = data.draw(st.integers(-(-n // k), n))
    x = points(shape, n, seed)
    label = balanced_kmeans(x, k, lo, hi, seed=seed, iterations=4)
    sizes = np.bincount(label, minlength=k)
    assert label.shape == (n,) and label.min() >= 0 and len(sizes) == k
    assert sizes.min() >= lo and sizes.max() <= hi
    assert np.array_equal(label, balanced_kmeans(x, k, lo, hi, seed=seed, iterations=4))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratios", [(0.8, 1.2), (1.0, 1.0)])
def test_large_nodes_too(shape: str, ratios: tuple[float, float]):
    n, k = 3000, 40
    lo, hi = int(ratios[0] * n / k), int(ratios[1] * n / k)
    sizes = np.bincount(balanced_kmeans(points(shape, n, 1), k, lo, hi, seed=0, iterations=5), minlength=k)
    assert sizes.min() >= lo and sizes.max() <= hi


def test_the_last_assignment_is_the_optimum_for_its_means():
    """Within 1.5% in every instance, and nearly always exactly."""
    ratio = []
    for seed in range(40):
        draw = np.random.default_rng(seed)
        n, k = int(draw.integers(20, 90)), int(draw.integers(3, 12))
        x = (draw.standard_normal((n, 4)) * draw.lognormal(0, 0.7, (n, 1))).astype(np.float32)
        lo, hi = max(1, int(0.8 * n / k)), max(-(-n // k), int(1.2 * n / k))
        label = balanced_kmeans(x, k, lo, hi, seed=0)
        means = np.stack([x[label == cluster].mean(0) for cluster in range(k)]).astype(np.float64)
        cost = ((x[:, None] - means) ** 2).sum(2)
        ratio.append(cost[np.arange(n), label].sum() / best_assignment(cost, lo, hi))
    assert max(ratio) < 1.015 and np.median(ratio) < 1 + 1e-6


@pytest.mark.parametrize("n, k, lo, hi", [(9, 2, 3, 6), (8, 3, 2, 4)])
def test_small_instances_against_every_partition(n: int, k: int, lo: int, hi: int):
    """K-means ends in a local optimum; the best of some starts is the global one of all partitions."""
    every = labellings(n, k, lo, hi)
    for seed in range(5):
        x = points("normal", n, seed, dims=2)
        best = min(inertia(x, label, k) for label in every)
        found = [inertia(x, balanced_kmeans(x, k, lo, hi, seed=start), k) for start in range(16)]
        assert min(found) >= best - 1e-5
        assert min(found) <= 1.015 * best


def test_planted_clusters_are_found():
    draw = np.random.default_rng(0)
    truth = np.repeat(np.arange(6), [20, 24, 18, 22, 20, 16])
    x = (10 * np.eye(6)[truth] + draw.standard_normal((120, 6))).astype(np.float32)
    starts = [balanced_kmeans(x, 6, 16, 24, seed=seed) for seed in range(5)]
    label = min(starts, key=lambda label: inertia(x, label, 6))
    assert all(len(np.unique(label[truth == cluster])) == 1 for cluster in range(6))
    assert len(np.unique(label)) == 6


def test_many_nodes_at_once_of_any_size():
    x = points("normal", 500, 3)
    draw = np.random.default_rng(3)
    sizes = (3, 300, 7, 290, 40, 41, 5, 280)
    tasks = [Task(np.sort(draw.choice(500, n, replace=False)), 3, n // 4, n // 2 + 1) for n in sizes]
    done: list[int] = []
    labels = balanced_kmeans_many(x, tasks, seed=0, progress=done.append)
    assert [len(label) for label in labels] == list(sizes) and sum(done) == sum(sizes)
    for task, label in zip(tasks, labels):
        alone = balanced_kmeans_many(x, [task], seed=0)[0]
        assert inertia(x[task.rows], label, 3) == pytest.approx(inertia(x[task.rows], alone, 3), rel=0.05)


def test_inertia_is_the_sum_of_squares():
    x = np.array([[0, 0], [2, 0], [5, 5], [5, 9]], dtype=np.float32)
    assert inertia(x, np.array([0, 0, 2, 2]), 3) == pytest.approx(2 + 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(bad: float):
    x = points("normal", 10, 0)
    x[7, 1] = bad
    x[9, 0] = bad
    with pytest.raises(TreeError, match=r"vector of token 7 is not finite \(2 such rows of 10\); mend the embedding"):
        balanced_kmeans(x, 2, 4, 6, seed=0)
    with pytest.raises(TreeError, match="vector of token 107"):
        check_rows(x, np.arange(100, 110))


@pytest.mark.parametrize("rows, says", [
    (np.zeros(4), "a matrix"), (np.zeros((4, 0)), "a matrix"), (np.zeros((2, 2, 2)), "a matrix"),
    (np.array([["a", "b"]]), "must be numbers"), (np.zeros((3, 2), complex), "must be numbers"),
    (np.zeros((3, 2), bool), "must be numbers"), (np.full((3, 2), 1e39), "not finite")])
def test_rows_that_are_no_vectors(rows: np.ndarray, says: str):
    with pytest.raises(TreeError, match=says):
        check_rows(rows)


@pytest.mark.parametrize("k, lo, hi, says", [
    (5, 1, 3, "4 points cannot fill 5 clusters of at least 1"), (2, 3, 4, "4 points do not fit 2 clusters of 3 to 4"),
    (2, 0, 1, r"4 points do not fit 2 clusters of 0 to 1 \(that is 0 to 2 points\)"), (0, 0, 4, "k >= 1"), (2, 3, 2, "lo <= hi"),
    (2, -1, 4, "0 <= lo")])
def test_bounds_that_cannot_be_met(k: int, lo: int, hi: int, says: str):
    with pytest.raises(TreeError, match=says):
        balanced_kmeans(points("normal", 4, 0), k, lo, hi, seed=0)


def test_fewer_points_than_clusters():
    label = balanced_kmeans(points("normal", 3, 0), 7, 0, 1, seed=0)
    assert len(np.unique(label)) == 3
