"""The yardstick for trees that needs no network (benchmarks/tree_quality.py): its counts, its probabilities, what it prefers."""
from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.tree_quality import Counts, Grams, components, interpolated, measure
from tdlm.tree.build import build_tree
from tests.tree.test_exchange import chain


@pytest.mark.parametrize("span", [50, 1 << 40])
def test_counts(span: int):
    keys = np.random.default_rng(0).integers(0, 50, 300) * (span // 50)
    counts, true = Counts.of(keys, span), Counter(keys.tolist())
    asked = np.arange(50) * (span // 50)
    assert counts.dense == (span == 50) and counts[asked].tolist() == [true[key] for key in asked.tolist()]


def stream(text: np.ndarray, documents: int) -> np.ndarray:
    return np.r_[-1, np.concatenate([np.r_[part, -1] for part in np.split(text, documents)])]


def test_every_part_is_a_distribution():
    """Over all classes between two neighbours, and over all tokens of a class between them, each part sums to one where its
    history was seen, to nothing where it was not; edges are neighbours too."""
    text, _ = chain(4, 3, 600, seed=0)
    label, k = np.arange(12) % 4, 4
    train = Grams.of(stream(text, 30), label, k)
    assert len(train.own) == 600 and (train.left == k).sum() == (train.right == k).sum() == 30
    ends = [(left, right) for left in range(k + 1) for right in range(k + 1)]
    left, right, token = (np.array(part) for part in zip(*((a, b, x) for a, b in ends for x in range(12))))
    found = components(train, Grams(left, label[token], right, token), label, k)
    leaf, history = found["leaf"]
    sums = np.array([np.bincount(label, part) for part in leaf.T.reshape(-1, 12)]).reshape(5, 25, 4)
    seen = history.reshape(25, 12)[:, :4] > 0
    assert np.allclose(sums[0], seen) and np.allclose(sums[1:], 1)
    root, history = found["root"]  # the first three tokens' classes are 0, 1, 2, 3: each class once
    sums = root.reshape(25, 12, 5)[:, :4].sum(1)
    assert np.allclose(sums[:, 0], history.reshape(25, 12)[:, 0] > 0) and np.allclose(sums[:, 1:], 1)


def test_the_mixture_takes_the_part_that_tells():
    """Two parts: one says 0.9 of what comes, one 0.5; the mixture is nearly the first. Without history it is refitted."""
    parts = np.tile([0.9, 0.5], (4000, 1))
    parts[::8] = [0.1, 0.5]  # one in eight times the first is wrong: 0.875 of the weight is the best there is, nearly all
    half, history = np.arange(4000) // 2000, np.zeros(4000)
    nats = interpolated(parts, history, half).mean()
    weights = np.linspace(0, 1, 1001)
    best = min((-np.log(parts @ np.array([w, 1 - w]))).mean() for w in weights)
    assert best <= nats + 1e-9 and nats == pytest.approx(best, abs=1e-3)


def test_planted_classes_cost_the_least_and_never_less_than_the_source():
    classes, members = 8, 8
    text, true = chain(classes, members, 120_000, seed=3)
    train, test = stream(text[:100_000], 50), stream(text[100_000:], 20)
    document = np.cumsum(test < 0)

    def cost(label: np.ndarray) -> dict[str, float]:
        rows = np.eye(classes, dtype=np.float32)[label]
        return measure(build_tree(rows, branching=classes), train, test, document)

    planted, other = cost(true), cost(np.random.default_rng(1).permutation(true))
    assert planted["sum"] < other["sum"] - 0.5 and planted["leaf"] == pytest.approx(np.log(members), abs=0.02)
    assert planted["sum"] == pytest.approx(planted["root"] + planted["leaf"])
    turn = np.random.default_rng(3)
    turn.permutation(np.repeat(np.arange(classes), members))
    turn = turn.dirichlet(np.full(classes, 0.2), classes)  # chain's own: p(own | left, right) is known
    own = true[text]
    joint = turn[own[:-2, None], np.arange(classes)[None]] * turn[np.arange(classes)[None], own[2:, None]]
    exact = -np.log(joint[np.arange(len(joint)), own[1:-1]] / joint.sum(1))[100_000:].mean()
    assert exact - 0.02 < planted["root"] < exact + 0.1
