"""The recursion: heights as asked, every split in bounds, controls, tokens without a vector, requests that cannot be met."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import TreeError
from tdlm.tree.build import build_tree
from tdlm.tree.embeddings import Vectors
from tdlm.tree.neighbours import count_neighbours
from tdlm.tree.request import METHODS, lowest_height
from tdlm.tree.tree import Tree, split_bounds
from tests.tree.test_cluster import SHAPES, points


def check_splits(tree: Tree, ratios: tuple[float, float] = (0.8, 1.2), height: int | None = None) -> int:
    """Every split counted from the ancestors alone; how many there are."""
    ancestor, k, splits = tree.ancestor.numpy(), tree.branching, 0
    for h in range(tree.height, 0, -1):
        nodes, size = np.unique(ancestor[h], return_counts=True)
        for node, count in zip(nodes[size > k], size[size > k]):
            children, sizes = np.unique(ancestor[h - 1][ancestor[h] == node], return_counts=True)
            low, high = split_bounds(int(count), k, *ratios, k ** (h - 1) if height else None)
            assert len(children) == k and sizes.min() >= low and sizes.max() <= high, node
            splits += 1
        whole = nodes[(size <= k) & (nodes >= tree.size)]
        assert (tree.num_children[whole].numpy() == size[(size <= k) & (nodes >= tree.size)]).all(), "small nodes hold tokens"
    return splits


@settings(max_examples=60)
@given(st.sampled_from([shape for shape in SHAPES if shape != "zero"]), st.integers(2, 120), st.integers(2, 9),
       st.sampled_from([(0.8, 1.2), (0.5, 1.5), (0.0, 3.0), (1.0, 1.0)]), st.integers(0, 99))
def test_any_vocabulary(shape: str, size: int, k: int, ratios: tuple[float, float], seed: int):
    tree = build_tree(points(shape, size, seed), branching=k, min_ratio=ratios[0], max_ratio=ratios[1], seed=seed, iterations=3,
                      max_depth=120)
    check_splits(tree, ratios)
    assert (tree.size, tree.branching) == (size, k) and lowest_height(size, k) <= tree.height
    if size <= k:
        assert tree.height == 1 and tree.children[0].tolist() == [*range(size), *[-1] * (k - size)]


@pytest.mark.parametrize("method", ["kmeans", "random", "frequency"])
@pytest.mark.parametrize("size, k, height", [(50, 7, 2), (49, 7, 2), (120, 5, 3), (125, 5, 3), (100, 10, 2), (64, 2, 6)])
def test_the_height_that_was_asked_for(method: Any, size: int, k: int, height: int):
    rows = None if method != "kmeans" else points("normal", size, 1)
    counts = np.arange(size) if method == "frequency" else None
    if k**height < size:
        says = f"{size} tokens do not fit a tree of K={k} and {height} levels .* use K >= 8, or 3 levels"
        with pytest.raises(TreeError, match=says):
            build_tree(rows, size=size, branching=k, height=height, method=method, counts=counts)
        return
    tree = build_tree(rows, size=size, branching=k, height=height, method=method, counts=counts, iterations=4)
    assert tree.height == height
    assert check_splits(tree, height=height) == sum(k**h for h in range(height - 1))


@pytest.mark.parametrize("k, height, free", [(512, 2, 2), (256, 2, 2), (225, 2, None), (37, 3, None)])
def test_heights_on_the_size_of_gpt2s_vocabulary(k: int, height: int, free: int | None):
    """225^2 and 37^3 are just above V: these heights are reached when they are asked for."""
    tree = build_tree(None, size=50_258, branching=k, height=height, method="random")
    assert tree.height == height and check_splits(tree, height=height)
    if free:
        assert build_tree(None, size=50_258, branching=k, method="random").height == free


@pytest.mark.slow
@pytest.mark.parametrize("k, height, asked", [(225, 2, 2), (37, 3, 3), (225, 3, None), (37, 4, None)])
def test_heights_by_clustering_vectors_of_gpt2s_number(k: int, height: int, asked: int | None):
    rows = points("normal", 50_257, 0, dims=4)
    tree = build_tree(rows, size=50_258, branching=k, height=asked, iterations=2)
    assert tree.height == height and check_splits(tree, height=asked)


@pytest.mark.parametrize("request_, says", [
    ({"branching": 1}, "branching factor must be at least 2, got 1"),
    ({"branching": 5, "height": 0}, "between 1 and --max-depth"),
    ({"branching": 5, "height": 40}, "height 40, max depth 32"),
    ({"branching": 5, "max_depth": 0}, "max depth 0"),
    ({"branching": 5, "height": 4}, "came out 3 levels high, 4 were asked for.*--height 3"),
    ({"branching": 50, "height": 2}, r"came out 1 levels high, 2 were asked for.* smaller K \(7 or"),
    ({"branching": 3, "max_depth": 3}, "40 tokens do not fit a tree of K=3 and 3 levels .* use K >= 4, or 4 levels or more"),
    ({"branching": 2, "max_depth": 6, "min_ratio": 0.1, "max_ratio": 1.9},
     "--max-depth is 6; raise it, or use K >= 2 with --height 6"),
    ({"branching": 5, "min_ratio": 1.1}, "0 <= min <= 1 <= max, got 1.1 and 1.2"),
    ({"branching": 5, "max_ratio": 0.9}, "1 <= max"),
    ({"branching": 5, "min_ratio": float("nan")}, "ratios must satisfy"),
    ({"branching": 5, "max_ratio": float("inf")}, "ratios must"),
    ({"branching": 5, "method": "best"}, "choose one of kmeans, exchange, random, frequency, hdlm"),
    ({"branching": 5, "order": "alphabet"}, "choose id or count"),
    ({"branching": 5, "size": 39}, "40 token vectors for 39 tokens"),
    ({"branching": 5, "counts": np.ones(39)}, "counts are for 39 tokens, the tree has 40"),
    ({"branching": 5, "method": "frequency"}, "needs token counts: give --data"),
    ({"branching": 7, "height": 2, "method": "hdlm"}, "cannot keep to a height"),
    ({"branching": 3, "method": "hdlm", "max_depth": 4}, "raise it, or use a smaller --branching, or --method kmeans"),
    ({"branching": 2, "complete": False}, "no tree of K=2 over 40 tokens has 6 real choices"),
    ({"branching": 5, "complete": False, "height": 6}, "no tree of K=5 over 40 tokens has 6 real choices")])
def test_requests_that_cannot_be_met(request_: dict[str, Any], says: str):
    with pytest.raises(TreeError, match=says):
        build_tree(points("one cluster swallows all", 40, 0), **request_)


def test_vectors_that_are_not_there():
    with pytest.raises(TreeError, match="every token vector is zero"):
        build_tree(points("zero", 9, 0)[:, :2] * 0, branching=2)
    with pytest.raises(TreeError, match="number of tokens must be given"):
        build_tree(None, branching=2, method="random")
    for method in ("kmeans", "hdlm"):
        with pytest.raises(TreeError, match=f"method {method} clusters token vectors, none were given"):
            build_tree(None, size=9, branching=2, method=method)
    with pytest.raises(TreeError, match="at least 2 tokens, got 1"):
        build_tree(None, size=1, branching=2, method="random")


@pytest.mark.parametrize("method", METHODS)
def test_the_same_request_gives_the_same_bytes(method: Any):
    rows, counts = points("normal", 90, 2), np.random.default_rng(0).integers(0, 9, 90)
    near = count_neighbours([np.random.default_rng(1).integers(0, 90, 900)], 90) if method == "exchange" else None
    made = [build_tree(rows, branching=4, method=method, counts=counts, seed=seed, max_depth=90, near=near).to_bytes()
            for seed in (1, 1, 2)]
    assert made[0] == made[1]
    assert (made[0] != made[2]) or method == "frequency"


def test_complete_and_not():
    """Complete: paths that end early are padded. Not complete: the tree is cut so that every path has H real choices."""
    rows = points("normal", 60, 4)
    free = build_tree(rows, branching=4, iterations=4)
    choices = (free.num_children[free.ancestor[1:]] > 1).sum(0)
    assert free.height == 4 and int(choices.min()) == 3, "60 of 4^3 places, in bounds, but not all of them at one depth"
    full = build_tree(rows, branching=4, height=3, complete=False, iterations=4)
    assert full.height == 3 and bool((full.num_children[full.ancestor[1:]] > 1).all())
    assert int(full.num_children[60:].min()) >= 2
    assert build_tree(points("normal", 19, 0), branching=5, complete=False, iterations=4).height == 2, "the lowest possible"


def test_a_split_makes_neighbours_of_what_lies_close():
    truth = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 4))
    rows = 8 * np.eye(4)[truth] + 0.1 * points("normal", 16, 0, dims=4)
    tree = build_tree(rows, branching=4)
    assert all(len(np.unique(truth[tree.ancestor[1].numpy() == node])) == 1 for node in range(16, 20))


def test_tokens_without_a_vector_are_placed_last():
    """In order of their ids, in the clusters nearest to the mean that have room; where the others are does not change."""
    noise = 0.1 * points("normal", 18, 0, dims=2)
    rows = noise + np.repeat([[10.0, 10.0], [-10.0, 0.0], [0.0, -10.0]], 6, axis=0)
    middle, last = np.arange(6, 12), np.arange(12, 18)
    holes = np.zeros((4, 2))
    whole = build_tree(np.r_[rows, holes].astype(np.float32), branching=3, min_ratio=0.6, max_ratio=1.3, max_depth=9)
    cluster = whole.ancestor[whole.height - 1].numpy()
    assert len(np.unique(cluster[:6])) == len(np.unique(cluster[middle])) == len(np.unique(cluster[last])) == 1
    near = sorted((middle, last), key=lambda rows_: float(((rows[rows_].mean(0) - rows.mean(0)) ** 2).sum()))
    assert split_bounds(22, 3, 0.6, 1.3) == (4, 9)
    assert (cluster[18:21] == cluster[near[0][0]]).all(), "three fit into the nearest cluster"
    assert cluster[21] == cluster[near[1][0]], "the last one into the next"
    short = build_tree(rows.astype(np.float32), size=22, branching=3, min_ratio=0.6, max_ratio=1.3, max_depth=9)
    assert np.array_equal(short.ancestor, whole.ancestor), "rows that are missing at the end count as zero"
    assert whole.meta["without_vector"] == short.meta["without_vector"] == 4


@pytest.mark.parametrize("seen", [1, 2, 4, 11, 30])
def test_hardly_any_token_has_a_vector(seen: int):
    """Every bound holds all the same, twice in the same way."""
    rows = points("normal", 60, 5)
    rows[np.random.default_rng(1).permutation(60)[seen:]] = 0
    tree = build_tree(rows, branching=4)
    assert check_splits(tree) and tree.to_bytes() == build_tree(rows, branching=4).to_bytes()
    assert tree.meta["without_vector"] == 60 - seen


def test_a_frequency_tree_puts_equally_frequent_tokens_together():
    counts = np.random.default_rng(0).permutation(16)
    tree = build_tree(None, size=16, branching=4, method="frequency", counts=counts)
    assert all(np.ptp(counts[tree.ancestor[1].numpy() == node]) == 3 for node in range(16, 20))


def test_a_random_tree_is_random():
    one, other = (build_tree(None, size=256, branching=16, method="random", seed=seed) for seed in (0, 1))
    together = [(tree.ancestor[1][:, None] == tree.ancestor[1]).numpy() for tree in (one, other)]
    common = (together[0] & together[1]).sum() - 256
    assert 100 < common < 380, "two random trees share pairs of siblings by chance: 226 of 3840"


def test_the_order_of_children():
    rows, counts = points("normal", 30, 0), np.arange(30) % 7
    by_id = build_tree(rows, branching=6, counts=counts)
    by_count = build_tree(rows, branching=6, counts=counts, order="count")
    firsts = [int((by_id.ancestor[by_id.height - 1] == node).nonzero()[0]) for node in by_id.children[-1].tolist()]
    assert firsts == sorted(firsts)
    for node in range(30, by_count.nodes):
        mass = by_count.mass(torch_of(counts))[by_count.children[node - 30][by_count.children[node - 30] >= 0]].tolist()
        assert mass == sorted(mass, reverse=True)


def torch_of(values: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(values)


def test_the_baselines_routine_keeps_no_bounds_and_says_so():
    rows = points("one cluster swallows all", 400, 0)
    tree = build_tree(rows, branching=8, method="hdlm", max_depth=90)
    assert tree.meta["bounds"]["exact"] is False and tree.meta["levels"][0]["outside"] > 0
    exact = build_tree(rows, branching=8)
    assert exact.meta["bounds"]["exact"] and sum(level["outside"] for level in exact.meta["levels"]) == 0


def test_what_a_tree_tells_about_itself():
    told: list[tuple[int, int, int]] = []
    vectors = Vectors(points("normal", 60, 0), {"kind": "array", "metric": "euclidean"})
    tree = build_tree(vectors, branching=4, tokenizer_hash="abc", progress=lambda *now: told.append(now))
    meta = tree.meta
    assert tree.tokenizer_hash == "abc" and meta["vectors"] == vectors.source
    assert meta["bounds"] == {"exact": True, "min_ratio": 0.8, "max_ratio": 1.2, "height": None}
    assert (meta["levels"][0]["nodes"], meta["levels"][0]["lo"], meta["levels"][0]["hi"]) == (1, 12, 18)
    assert {depth for depth, _, _ in told} == set(range(len(meta["levels"]))) and told[0] == (0, 60, 60)
    assert all(done <= total for _, done, total in told)
