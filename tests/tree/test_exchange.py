"""Exchange clustering: the counts, the objective, the steps, and the tree that comes of it."""
from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import TreeError
from tdlm.tree.build import build_tree
from tdlm.tree.embeddings import from_corpus
from tdlm.tree.exchange import Classes, Leads, Step, exchange, propose
from tdlm.tree.mass import capped, spread
from tdlm.tree.neighbours import count_neighbours, other_side
from tdlm.tree.tree import split_bounds

NUMBERS = np.random.default_rng(5)


def chain(classes: int, members: int, length: int, seed: int, sharp: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """A text whose classes follow a Markov chain, tokens uniform within their class; the true class of every token."""
    draw = np.random.default_rng(seed)
    true = draw.permutation(np.repeat(np.arange(classes), members))
    turn = np.cumsum(draw.dirichlet(np.full(classes, sharp), classes), axis=1)
    now, text = 0, np.empty(length, dtype=np.int64)
    tokens = [np.flatnonzero(true == number) for number in range(classes)]
    for place, (chance, which) in enumerate(zip(draw.random(length), draw.integers(0, members, length))):
        now = min(int(np.searchsorted(turn[now], chance)), classes - 1)
        text[place] = tokens[now][which]
    return text, true


def naive_counts(documents: list[np.ndarray], window: int) -> Counter[tuple[int, int, int]]:
    found: Counter[tuple[int, int, int]] = Counter()
    for text in documents:
        for i, j in itertools.product(range(len(text)), repeat=2):
            if 0 < abs(i - j) <= window:
                found[(j - i, int(text[i]), int(text[j]))] += 1
    return found


def naive_objective(documents: list[np.ndarray], label: np.ndarray, window: int, context: np.ndarray | None = None) -> float:
    """J from its definition, pair by pair: no tables, no offsets' numbers."""
    total = 0.0
    for offset in itertools.chain(range(1, window + 1), range(-window, 0)):
        pairs: Counter[tuple[int, int]] = Counter()
        for (o, x, y), count in naive_counts(documents, window).items():
            if o == offset and label[x] >= 0:
                pairs[(int(label[x]), int((label if context is None else context)[y]))] += count
        many = sum(pairs.values())
        left, right = Counter[int](), Counter[int]()
        for (a, b), count in pairs.items():
            left[a] += count
            right[b] += count
        total += sum(n / many * np.log(n * many / (left[a] * right[b])) for (a, b), n in pairs.items()) / abs(offset) / 2
    return total


def small(seed: int, size: int = 9) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, size, int(draw.integers(1, 40))) for _ in range(4)]


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_counts_are_the_pairs_of_the_text(seed: int, window: int):
    documents = small(seed)
    near = count_neighbours(documents, 9, window)
    found = Counter[tuple[int, int, int]]()
    owner, place = near.rows(np.arange(9))
    for x, code, count in zip(owner, near.code[place], near.count[place]):
        number, y = divmod(int(code), 9)
        found[((number // 2 + 1) * (1 - 2 * (number % 2)), int(x), y)] += int(count)
    assert found == naive_counts(documents, window)
    assert other_side(np.arange(6)).tolist() == [1, 0, 3, 2, 5, 4]


@given(st.integers(0, 10_000), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_objective_kept_through_moves_is_the_one_from_scratch(seed: int, mutual: bool):
    documents, draw = small(seed), np.random.default_rng(seed)
    near = count_neighbours(documents, 9, 2)
    label, context = draw.integers(0, 3, 9), None if mutual else draw.integers(0, 4, 9)
    if not mutual:
        label[draw.integers(0, 9, 2)] = -1
    classes = Classes(near, label, 3, context)
    part = np.flatnonzero(label >= 0)
    assert classes.value == pytest.approx(naive_objective(documents, label, 2, context), abs=1e-12)
    for _ in range(4):
        tokens = draw.permutation(part)[: int(draw.integers(1, len(part) + 1))]
        before, value = classes.table.copy(), classes.measure()
        was = classes.label[tokens]
        classes.move(tokens, draw.integers(0, 3, len(tokens)))
        fresh = Classes(near, classes.label, 3, context)
        assert np.array_equal(classes.table, fresh.table), "whole numbers: equal, not close"
        assert classes.measure() == fresh.value == pytest.approx(naive_objective(documents, classes.label, 2, context), abs=1e-12)
        if draw.random() < 0.5:
            classes.move(tokens, was)
            assert np.array_equal(classes.table, before) and classes.measure() == value, "undone exactly"


def test_leads_are_the_first_order_change():
    """With one token of few occurrences moving among large counts, the lead is N times the change of J (half: one-sided)."""
    text, true = chain(4, 4, 30_000, seed=1, sharp=5.0)
    rare = np.full(len(text) // 500, 16)
    text[:: len(text) // len(rare)][: len(rare)] = rare
    near = count_neighbours([text], 17, 2)
    context = np.r_[true, 0]
    classes = Classes(near, np.r_[true, 0], 4, context)
    lead = classes.leads(np.arange(17), "cpu").join
    pairs = classes.table[0].sum()
    for to in (1, 2, 3):
        other = Classes(near, np.r_[true, to], 4, context)
        assert lead[16, to] == pytest.approx((other.value - classes.value) * 2 * pairs, rel=0.1)
    assert np.isneginf(lead[np.arange(17), classes.label]).all()


def test_every_batch_that_stays_raises_the_objective_and_every_other_leaves_no_trace(monkeypatch: pytest.MonkeyPatch):
    """Of random steps, which are mostly bad ones."""
    text, true = chain(6, 8, 6_000, seed=2)
    near, draw = count_neighbours([text], 48, 2), np.random.default_rng(2)
    original, seen = Classes.attempt, []

    def attempt(self: Classes, steps: list[Step]) -> int:
        before, table, label = self.value, self.table.copy(), self.label.copy()
        stayed = original(self, steps)
        assert self.value == self.measure()
        assert self.value > before if stayed else np.array_equal(self.table, table) and np.array_equal(self.label, label)
        seen.append((len(steps), stayed))
        return stayed

    monkeypatch.setattr(Classes, "attempt", attempt)
    classes = Classes(near, np.where(np.arange(48) % 3 > 0, true, draw.permutation(true)), 6)
    for _ in range(60):
        tokens = draw.permutation(48)[:16].reshape(8, 2)
        assert classes.attempt([Step((int(x), int(y)), (int(classes.label[y]), int(classes.label[x]))) for x, y in tokens]) <= 8
    assert {(8, 0), (1, 0), (1, 1), (2, 2)} <= set(seen), "whole batches and single steps, kept and refused"
    start = classes.value
    _, values = exchange(near, classes.label, 6, 6, 10, rounds=30, enough=0)
    assert values[0] == start and (np.diff(values) >= 0).all() and values[-1] > start


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_any_subset_of_proposed_steps_keeps_the_bounds(seed: int):
    draw = np.random.default_rng(seed)
    size, k = 40, 5
    lo, hi = split_bounds(size, k, 0.6, 1.4)
    label = draw.permutation(np.arange(size) % k)
    label[:2] = (label[:2] + 1) % k
    tokens = np.sort(draw.permutation(size)[:30])
    join = draw.normal(size=(30, k)).astype(np.float32)
    join[np.arange(30), label[tokens]] = -np.inf
    leads = Leads(join, draw.normal(size=30), draw.exponential(size=k))
    lead = np.maximum(join, leads.rule[:, None] - leads.held)
    steps = propose(tokens, label, leads, k, lo, hi)
    moved = [token for step in steps for token in step.tokens]
    assert len(set(moved)) == len(moved) and set(moved) <= set(tokens.tolist()) and steps
    for step in steps:
        rows = [int(np.flatnonzero(tokens == token)[0]) for token in step.tokens]
        assert sum(lead[row, to] for row, to in zip(rows, step.to)) > 0
    for _ in range(10):
        after = label.copy()
        for step in steps:
            if draw.random() < 0.5:
                after[list(step.tokens)] = step.to
        sizes = np.bincount(after, minlength=k)
        assert sizes.min() >= lo and sizes.max() <= hi


@pytest.mark.parametrize("ratios", [(1.0, 1.0), (0.8, 1.2), (0.0, 3.0)])
def test_planted_classes_are_found(ratios: tuple[float, float]):
    """From random labels, the best of a few starts."""
    text, true = chain(8, 8, 40_000, seed=3)
    near = count_neighbours([text], 64, 2)
    lo, hi = split_bounds(64, 8, *ratios)
    draw, best = np.random.default_rng(0), (0.0, true)
    for _ in range(6):
        found, values = exchange(near, draw.permutation(np.arange(64) % 8), 8, lo, hi, rounds=60, enough=0)
        sizes = np.bincount(found, minlength=8)
        assert lo <= sizes.min() and sizes.max() <= hi
        best = max(best, (values[-1], found), key=lambda end: end[0])
    assert len(set(zip(true.tolist(), best[1].tolist()))) == 8, "a class found for every class planted"
    assert best[0] == pytest.approx(Classes(near, true, 8).value, abs=1e-12)


def test_the_best_of_all_divisions_of_a_tiny_vocabulary():
    """All 35 divisions of eight tokens into two classes of four, J of each by definition: a third of all starts and more end
    at the greatest, and most raise J."""
    text, _ = chain(2, 4, 400, seed=4, sharp=1.0)
    near = count_neighbours([text], 8, 1)
    starts = []
    for chosen in itertools.combinations(range(1, 8), 3):
        label = np.ones(8, dtype=np.int64)
        label[[0, *chosen]] = 0
        starts.append(label)
    best = max(naive_objective([text], label, 1) for label in starts)
    values = np.array([(found[0], found[-1]) for found in (exchange(near, label, 2, 4, 4, rounds=50, enough=0)[1]
                                                           for label in starts)])
    assert values[:, 1].max() == pytest.approx(best, abs=1e-12) and (values[:, 1] >= values[:, 0]).all()
    assert np.isclose(values[:, 1], best).mean() > 1 / 3 and (values[:, 1] > values[:, 0]).mean() > 2 / 3


def test_frequent_tokens_leave_a_crowd(monkeypatch: pytest.MonkeyPatch):
    """Eight frequent tokens of different use in one class, rare ones that tell nothing in the others: estimates of the first
    order alone leave some of them there."""
    text, _ = chain(8, 1, 20_000, seed=8)
    draw = np.random.default_rng(8)
    rare = draw.random(len(text)) < 0.1
    text = np.where(rare, draw.integers(8, 64, len(text)), text)
    near = count_neighbours([text], 64, 1)
    crowd = np.arange(64) // 8
    found, values = exchange(near, crowd, 8, 8, 8, rounds=40, enough=0)
    assert len(set(found[:8])) == 8 and values[-1] > 2 * values[0]
    leads = Classes.leads

    def first_order(self: Classes, tokens: np.ndarray, device: str) -> Leads:
        full = leads(self, tokens, device)
        return Leads(full.join, np.full(len(tokens), -np.inf), full.held)

    monkeypatch.setattr(Classes, "leads", first_order)
    stuck, lower = exchange(near, crowd, 8, 8, 8, rounds=40, enough=0)
    assert len(set(stuck[:8])) < 8 and lower[-1] < values[-1]


def test_tokens_without_neighbours_and_other_parts_stay():
    text, true = chain(4, 4, 5_000, seed=6)
    near = count_neighbours([text], 20, 1)  # 16 to 19 never occur
    label = np.r_[NUMBERS.permutation(np.arange(16) % 4), [0, 1, 2, 3]]
    found, _ = exchange(near, label, 4, 5, 5)
    assert found[16:].tolist() == [0, 1, 2, 3] and np.bincount(found).tolist() == [5] * 4
    part = np.where(np.arange(20) < 12, label, -1)
    found, values = exchange(near, part, 4, 2, 4, context=np.r_[true, [0] * 4], rounds=20, enough=0)
    assert (found[12:] == -1).all() and values[-1] > values[0]
    sizes = np.bincount(found[:12], minlength=4)
    assert sizes.min() >= 2 and sizes.max() <= 4


@given(st.integers(0, 10_000), st.sampled_from([2.0, 2.5, 4.0]))
@settings(max_examples=25, deadline=None)
def test_no_class_holds_more_than_its_share(seed: int, ratio: float):
    """Counts by Zipf's law, crowded as K-means crowds them; sizes stay, and what exchange does to it stays in bounds."""
    draw = np.random.default_rng(seed)
    size, k = 60, 6
    counts = np.floor(2000 / np.arange(1, size + 1) ** 1.2).astype(np.int64)
    label, rows = np.arange(size) // 10, draw.normal(size=(size, 3)).astype(np.float32)
    weight, most = capped(counts, k, ratio)
    assert np.bincount(label, weight).max() > most and weight.max() <= most / 2
    found = spread(rows, label, counts, k, ratio)
    assert np.bincount(found).tolist() == [10] * k and np.bincount(found, weight).max() <= most
    assert np.array_equal(found, spread(rows, label, counts, k, ratio))
    near = count_neighbours([draw.choice(size, 1500, p=counts / counts.sum())], size, 1)
    after, values = exchange(near, found, k, 8, 12, weight=weight, most=most)
    assert np.bincount(after, weight).max() <= most * (1 + 1e-12) and values[-1] > values[0]
    loose, free = exchange(near, found, k, 8, 12)
    assert not np.array_equal(after, loose) or free == values


def test_spreading_takes_the_cheapest_exchange():
    """Two frequent tokens crowd a class; of the two, the one nearer to the other class goes, and the lightest comes."""
    rows = np.array([[0.0], [1.0], [0.2], [9.0], [9.5], [10.0]], dtype=np.float32)
    counts = np.array([40, 40, 1, 2, 5, 3])
    label = np.array([0, 0, 0, 1, 1, 1])
    assert spread(rows, label, counts, 2, 2.0).tolist() == label.tolist(), "91 may stand together, since 45.5 is the mean"
    rows, counts, label = np.r_[rows, [[20.0]], [[21.0]], [[22.0]]], np.r_[counts, 1, 1, 1], np.r_[label, 2, 2, 2]
    found = spread(rows.astype(np.float32), label, counts, 3, 2.0)
    assert found.tolist() == [0, 1, 0, 0, 1, 1, 2, 2, 2]
    with pytest.raises(TreeError, match="classes of so unequal sizes cannot each hold at most"):
        spread(rows.astype(np.float32), np.array([0, 0, 0, 0, 0, 0, 0, 0, 1]), np.full(9, 5), 2, 1.5)


def neighbours_and_vectors(seed: int = 7) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    text, true = chain(8, 16, 30_000, seed)
    return [text], true, from_corpus([text], 130, contexts=64, dimensions=8).rows


@pytest.mark.parametrize("k, height", [(12, 2), (5, None), (2, None)])
def test_a_tree_keeps_its_bounds_and_its_bytes(k: int, height: int | None):
    """130 tokens, the last two unseen. K=12 takes its own classes as neighbours', K=5 and K=2 find some first."""
    documents, _, rows = neighbours_and_vectors()
    near = count_neighbours(documents, 130, 2)
    kept = {"branching": k, "height": height, "seed": 3}
    one, two = (build_tree(rows, method="exchange", near=near, **kept) for _ in range(2))
    assert one.to_bytes() == two.to_bytes() and one.meta["exchange"] == {"window": 2, "rounds": 12}
    one.check()
    plain = build_tree(rows, **kept)
    assert not np.array_equal(one.ancestor.numpy(), plain.ancestor.numpy()) and one.height == plain.height
    information = np.array([level["information"] for level in one.meta["levels"]])
    assert (information[:, 1] >= information[:, 0]).all() and (information[:, 1] > information[:, 0]).any()


def test_a_tree_finds_planted_classes_where_it_starts_from_nothing_useful():
    text, true = chain(8, 8, 40_000, seed=3)
    rows = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    near = count_neighbours([text], 64, 2)
    tree = build_tree(rows, branching=8, method="exchange", near=near, height=2, rounds=60)
    assert len(set(zip(true.tolist(), tree.slot[1].tolist()))) == 8


def test_what_cannot_be_built():
    documents, _, rows = neighbours_and_vectors()
    with pytest.raises(TreeError, match="exchange looks at the neighbours of tokens in text: give --data"):
        build_tree(rows, branching=12, method="exchange")
    with pytest.raises(TreeError, match="neighbours are counted for 131 tokens, the tree has 130"):
        build_tree(rows, branching=12, method="exchange", near=count_neighbours(documents, 131, 1))
    for method, ratio, counts in (("kmeans", 1.5, np.ones(130)), ("kmeans", 2.0, None), ("random", 2.0, np.ones(130))):
        with pytest.raises(TreeError, match="a bound on the share of the text is at least 2 times the mean, for kmeans"):
            build_tree(rows, branching=12, method=method, max_mass=ratio, counts=counts)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TreeError, match="window of at least 1, got 0"):
        count_neighbours(documents, 130, 0)
    with pytest.raises(TreeError, match="the corpus is empty"):
        count_neighbours([], 130, 1)
    with pytest.raises(TreeError, match="token 127 in the corpus, but the vocabulary has 100"):
        count_neighbours([np.array([127])], 100, 1)
