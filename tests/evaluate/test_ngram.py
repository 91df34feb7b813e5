"""The n-gram models are probability distributions, and they are scored on the real tokens only."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdlm.errors import ConfigError, DataError
from tdlm.evaluate import ngram
from tdlm.evaluate.ngram import discounts, fit, ngram_cross_entropies

texts = st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=25), min_size=1, max_size=5).filter(lambda d: any(d))


def arrays(documents):
    return [np.array(document, dtype=np.uint16) for document in documents]


@given(texts)
@settings(max_examples=60, deadline=None)
def test_every_conditional_sums_to_one_seen_or_not(documents):
    size = 6  # token 5 never occurs: unseen histories and unseen words are both covered
    for model in fit(arrays(documents), size=size).values():
        length = len(model.orders)
        for history in itertools.product(range(size), repeat=length - 1):
            grams = np.array([[*history, word] for word in range(size)], dtype=np.int64)
            probability = model.probabilities(grams)
            assert (probability > 0).all()
            assert probability.sum() == pytest.approx(1, abs=1e-12)


@given(texts, st.integers(1, 4), st.integers(1, 7), st.data())
@settings(max_examples=40, deadline=None)
def test_scores_equal_a_walk_over_the_rows(documents, count, length, data):
    pad = 5
    rows = np.array(
        data.draw(
            st.lists(st.lists(st.integers(0, 5), min_size=length, max_size=length), min_size=count, max_size=count)
        )
    )
    if (rows == pad).all():
        rows[0, 0] = 0
    models = fit(arrays(documents), size=6)
    want = dict.fromkeys((1, 2, 3), 0.0)
    for row, column in itertools.product(range(count), range(length)):
        if rows[row, column] == pad:
            continue
        history: list[int] = []
        for back in range(1, 3):
            if column - back < 0 or rows[row, column - back] == pad:
                break
            history.insert(0, rows[row, column - back])
        for order in want:
            model = models[min(order, len(history) + 1)]
            gram = [*history, rows[row, column]][-len(model.orders) :]
            want[order] -= math.log(model.probabilities(np.array([gram]))[0])
    got = ngram_cross_entropies(arrays(documents), rows, size=6, pad_id=pad)
    real = int((rows != pad).sum())
    assert got == pytest.approx({"unigram": want[1] / real, "bigram": want[2] / real, "trigram": want[3] / real})


def test_bigram_by_hand():
    # a b a b a c: pairs ab 2, ba 2, ac 1; too few counts of counts, so every discount is one half
    model = fit([np.array([0, 1, 0, 1, 0, 2])], size=4, orders=(2,))[2]
    base = np.array([0.5, 0.5, 0.5, 0]) / 3 + (1.5 / 3) / 4  # one distinct predecessor each
    assert model.probabilities(np.array([[0, w] for w in range(4)])) == pytest.approx(
        np.array([0, 1.5, 0.5, 0]) / 3 + (1.0 / 3) * base
    )
    assert model.probabilities(np.array([[3, w] for w in range(4)])) == pytest.approx(base)  # never seen: passed on


def test_discounts_follow_the_counts_of_counts():
    counts = np.array([1] * 40 + [2] * 20 + [3] * 10 + [4] * 5 + [9])
    share = 40 / 80
    assert discounts(counts) == pytest.approx(
        [0, 1 - 2 * share * 20 / 40, 2 - 3 * share * 10 / 20, 3 - 4 * share * 5 / 10]
    )


def test_no_ngram_crosses_a_document():
    together = fit([np.array([0, 1, 2, 3] * 5)], size=4)[2]
    apart = fit([np.array([0, 1]), np.array([2, 3])] * 5, size=4)[2]
    gram = np.array([[1, 2]])
    assert together.probabilities(gram)[0] > 0.8
    assert apart.probabilities(gram)[0] == pytest.approx(apart.orders[0].mix(np.array([2]), 4, np.array([0.25]))[0])


def test_longer_histories_help_on_a_text_with_memory():
    generator = np.random.default_rng(0)
    text = [0, 1]
    for _ in range(20_000):  # the next token is the sum of the last two most of the time: only a trigram can see it
        text.append((text[-1] + text[-2]) % 7 if generator.random() < 0.9 else int(generator.integers(7)))
    stream = np.array(text)
    got = ngram_cross_entropies([stream[:15_000]], stream[15_000:20_000].reshape(50, 100), size=8, pad_id=7)
    exact = -(0.9 + 0.1 / 7) * math.log(0.9 + 0.1 / 7) - 6 * (0.1 / 7) * math.log(0.1 / 7)
    assert got["trigram"] < got["bigram"] - 0.5
    assert got["trigram"] == pytest.approx(exact, abs=0.08)
    assert got["unigram"] == pytest.approx(math.log(7), abs=0.01)


def test_chunks_change_nothing(monkeypatch):
    generator = np.random.default_rng(1)
    documents = [generator.integers(0, 50, 400) for _ in range(5)]
    rows = generator.integers(0, 51, (40, 16))
    whole = ngram_cross_entropies(documents, rows, size=51, pad_id=50)
    monkeypatch.setattr(ngram, "CHUNK", 48)
    assert ngram_cross_entropies(documents, rows, size=51, pad_id=50) == pytest.approx(whole, rel=1e-12)


def test_large_vocabulary_keys_do_not_overflow():
    size = 200_019
    top = size - 1
    got = ngram_cross_entropies(
        [np.array([top, top, top, top], dtype=np.uint32)], np.array([[top, top, top]]), size=size, pad_id=0
    )
    assert 0 < got["trigram"] < math.log(size)


def test_only_the_orders_asked_for():
    assert list(ngram_cross_entropies([np.array([0, 1])], np.array([[0, 1]]), size=3, pad_id=2, orders=(1,))) == [
        "unigram"
    ]
    assert list(ngram_cross_entropies([np.array([0])], np.array([[0, 1]]), size=3, pad_id=2, orders=(3,))) == [
        "trigram"
    ]


@pytest.mark.parametrize(
    ("documents", "rows", "orders", "error", "words"),
    [
        ([], [[0]], (1,), DataError, "got none"),
        ([[0]], [[2]], (1,), DataError, "besides PAD"),
        ([[0]], [[9]], (1,), DataError, "9"),
        ([[9]], [[0]], (1,), DataError, "9"),
        ([[0]], [0], (1,), DataError, "shape"),
        ([[0]], [[0]], (4,), ConfigError, "orders"),
    ],
)
def test_mistakes_end_with_one_clear_line(documents, rows, orders, error, words):
    with pytest.raises(error, match=words) as caught:
        ngram_cross_entropies([np.array(d) for d in documents], np.array(rows), size=3, pad_id=2, orders=orders)
    assert "\n" not in str(caught.value)
