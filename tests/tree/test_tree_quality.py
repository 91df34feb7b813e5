"""The yardstick for trees that needs no network (benchmarks/tree_quality.py): its counts, its probabilities, what it prefers."""
from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from benchmarks.tree_quality import Counts, Grams, Parts, interpolated, measure
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
    assert len(train.own) == 600 and (train.left["class"] == k).sum() == (train.right["token"] == 12).sum() == 30
    ends = [(left, right) for left in range(13) for right in range(13)]
    left, right, token = (np.array(part) for part in zip(*((a, b, x) for a, b in ends for x in range(12))))
    classes = np.append(label, k)
    asked = Grams(label[token], token, {"nothing": 0 * left, "class": classes[left], "token": left},
                  {"nothing": 0 * left, "class": classes[right], "token": right})
    parts = Parts(train, asked, label, k)
    known = ("nothing", "class", "token")
    for one, other in itertools.product(known, known):
        found, history = parts.mixed(one, "token", "class", other)
        sums = found.reshape(len(ends), 3, k, -1).sum(1)  # the tokens of a class stand 4 apart
        whole = history.reshape(len(ends), 3, k)[:, 0] > 0
        assert np.isin(np.round(sums, 12), (0, 1)).all() and (sums[..., -1] == pytest.approx(1))
        assert any(np.allclose(sums[..., part], whole) for part in range(sums.shape[2])), "the longest, where it was seen"
        found, history = parts.mixed(one, "class", "nothing", other)
        sums = found.reshape(len(ends), 12, -1)[:, :4].sum(1)  # the first four tokens: each class once
        assert np.isin(np.round(sums, 12), (0, 1)).all() and np.allclose(sums[:, -1], 1)
    by_hand = sum(text[i - 1] == 3 and text[i] == 5 and text[i + 1] == 7 for i in range(1, 599) if i % 20 not in (0, 19))
    here = (left == 3) & (token == 5) & (right == 7)
    assert parts.count("token", "token", "token")[here].item() == by_hand


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

    def cost(label: np.ndarray) -> Any:
        rows = np.eye(classes, dtype=np.float32)[label]
        return measure(build_tree(rows, branching=classes), train, test, document)

    planted, other = cost(true)["classes"], cost(np.random.default_rng(1).permutation(true))["classes"]
    assert planted["sum"] < other["sum"] - 0.5 and planted["leaf"] == pytest.approx(np.log(members), abs=0.02)
    assert planted["sum"] == pytest.approx(planted["root"] + planted["leaf"])
    turn = np.random.default_rng(3)
    turn.permutation(np.repeat(np.arange(classes), members))
    turn = turn.dirichlet(np.full(classes, 0.2), classes)  # chain's own: p(own | left, right) is known
    own = true[text]
    joint = turn[own[:-2, None], np.arange(classes)[None]] * turn[np.arange(classes)[None], own[2:, None]]
    exact = -np.log(joint[np.arange(len(joint)), own[1:-1]] / joint.sum(1))[100_000:].mean()
    assert exact - 0.02 < planted["root"] < exact + 0.1
