"""Unigram, bigram and trigram models: what counting alone reaches on the very tokens that the bound is measured on.

Interpolated Kneser-Ney smoothing with three discounts per order, estimated from the counts of counts
(Chen and Goodman 1999). With c the count of the word after the history h, and D(c) = D_1, D_2, D_3+ the discounts,

    p(w | h) = (c(h w) - D(c(h w))) / c(h .) + (sum_v D(c(h v))) / c(h .) * p(w | h without its first token),

and p(w | h) = p(w | shorter h) where h was never seen. What the discounts take from the seen words is exactly what the
shorter history is given, so every conditional sums to one; the recursion ends at 1/V, so every token has mass. The
highest order counts tokens, the lower ones count distinct predecessors. The unigram model is the same formula without
a history: token counts, discounted towards 1/V.

A row begins without a history: its first token is scored by the unigram model and, by the trigram model, its second
token by the bigram model. Documents are counted one by one, no n-gram crosses from one to the next.

An n-gram is one int64, the digits of base V. Counting is sorting, looking up is a binary search over sorted queries:
30M tokens take seconds and about 1.5 GB.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError, DataError

NAMES = {1: "unigram", 2: "bigram", 3: "trigram"}
LARGEST = 2**21 - 1  # three digits of this base still fit into 63 bits
CHUNK = 4_000_000  # evaluation tokens looked up at a time
LEAST_DISCOUNT = 0.05  # keeps a way down to 1/V open where the counts of counts would close it


@dataclass(frozen=True)
class Order:
    """One line of the recursion: what is kept of each n-gram's count, and what each history passes down."""

    keys: np.ndarray  # int64, sorted: the n-grams seen
    kept: np.ndarray  # float64: (count - discount) / count of the history
    histories: np.ndarray  # int64, sorted: keys // V
    passed: np.ndarray  # float64: the share of the shorter history

    @classmethod
    def of(cls, keys: np.ndarray, counts: np.ndarray, size: int) -> Order:
        """From the sorted distinct n-grams and their counts."""
        taken = discounts(counts)[np.minimum(counts, 3)]
        histories, start = _runs(keys // size)
        total = np.add.reduceat(counts, start).astype(np.float64)
        passed = np.add.reduceat(taken, start) / total
        lengths = np.diff(np.append(start, len(keys)))
        return cls(keys, (counts - taken) / np.repeat(total, lengths), histories, passed)

    def mix(self, keys: np.ndarray, size: int, lower: np.ndarray) -> np.ndarray:
        """Probabilities of n-grams, given those under the shorter history."""
        history, known = _find(self.histories, keys // size)
        gram, seen = _find(self.keys, keys)
        own = np.where(seen, self.kept[gram], 0.0)
        return np.where(known, own + self.passed[history] * lower, lower)


@dataclass(frozen=True)
class Ngram:
    """A smoothed model over `size` tokens; `orders[k]` reads a history of k tokens."""

    size: int
    orders: tuple[Order, ...]

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """p(last column | columns before it) for int64 grams (n, len(orders))."""
        probability = np.full(len(grams), 1.0 / self.size)
        for length, order in enumerate(self.orders, start=1):
            probability = order.mix(_pack(grams[:, len(self.orders) - length :], self.size), self.size, probability)
        return probability


def discounts(counts: np.ndarray) -> np.ndarray:
    """(0, D_1, D_2, D_3+) from the counts of counts; one half each where there are too few to tell."""
    n = np.bincount(np.minimum(counts, 5), minlength=6)[1:5].astype(np.float64)
    if not (n > 0).all():
        return np.array([0.0, 0.5, 0.5, 0.5])
    share = n[0] / (n[0] + 2 * n[1])
    estimate = [c - (c + 1) * share * n[c] / n[c - 1] for c in (1, 2, 3)]
    return np.array([0.0, *(min(max(value, LEAST_DISCOUNT), c) for c, value in enumerate(estimate, start=1))])


def fit(documents: Iterable[np.ndarray], *, size: int, orders: Sequence[int] = (1, 2, 3)) -> dict[int, Ngram]:
    """Models of the given orders, each counted on all documents (arrays of token ids below `size`)."""
    if not orders or not set(orders) <= set(NAMES):
        raise ConfigError(f"n-gram orders are a choice of 1, 2 and 3, got {tuple(orders)}")
    if not 1 <= size <= LARGEST:
        raise ConfigError(f"n-gram models take a vocabulary of 1 to {LARGEST:,} tokens, got {size:,}")
    tokens, starts = _join(documents, size)
    counts = np.bincount(tokens, minlength=size)
    seen = np.flatnonzero(counts)
    models = {1: Ngram(size, (Order.of(seen, counts[seen], size),))}
    if max(orders) == 1:
        return models
    pairs, pair_counts = _count(_grams(tokens, starts, 2, size))
    words = np.bincount(pairs % size, minlength=size)  # distinct predecessors of each token
    seen = np.flatnonzero(words)
    # A text without a single pair still needs the chain of orders: it then ends at the token counts.
    base = Order.of(seen, words[seen], size) if len(seen) else models[1].orders[0]
    # The trigram model needs the bigram too: for the second token of a row.
    models[2] = Ngram(size, (base, Order.of(pairs, pair_counts, size))) if len(pairs) else models[1]
    if 3 in orders:
        triples, triple_counts = _count(_grams(tokens, starts, 3, size))
        if len(triples):
            middle = Order.of(*_count(triples % size**2), size)
            models[3] = Ngram(size, (base, middle, Order.of(triples, triple_counts, size)))
        else:
            models[3] = models[2]
    return models


def ngram_cross_entropies(
    train_documents: Iterable[np.ndarray], rows: np.ndarray, *, size: int, pad_id: int,
    orders: Sequence[int] = (1, 2, 3),
) -> dict[str, float]:
    """Cross-entropies in nats/token on the real tokens of `rows` (R, S) of models counted on the training documents.

    PAD is not a target, and nothing before a PAD is a history. Returns {"unigram": ..., "bigram": ..., ...}.
    """
    rows = np.asarray(rows)
    if rows.ndim != 2:
        raise DataError(f"evaluation rows of shape (R, S) are expected, got {rows.shape}")
    if rows.size and (rows.min() < 0 or rows.max() >= size):
        raise DataError(f"evaluation rows hold token ids from {rows.min()} to {rows.max()}, "
                        f"but the vocabulary has {size} tokens; prepare the text with the run's tokenizer")
    count = int((rows != pad_id).sum())
    if not count:
        raise DataError("the evaluation rows hold no token besides PAD; choose another split or more rows")
    models = fit(train_documents, size=size, orders=orders)
    sums = dict.fromkeys(orders, 0.0)
    step = max(1, CHUNK // max(1, rows.shape[1]))
    for first in range(0, len(rows), step):
        chunk = rows[first : first + step].astype(np.int64)
        for available, grams in _targets(chunk, pad_id, max(orders)):
            for order in orders:
                sums[order] += _nats(models[min(order, available + 1)], grams)
    return {NAMES[order]: sums[order] / count for order in orders}


def _targets(rows: np.ndarray, pad_id: int, longest: int) -> Iterable[tuple[int, np.ndarray]]:
    """Every real token once, with as many tokens before it as a model of order `longest` may read."""
    real = rows != pad_id
    reach = real.astype(np.int64)  # 0 at PAD, else 1 + the number of usable tokens before it
    for back in range(1, longest):
        reach[:, back:] += real[:, :-back] & (reach[:, back:] == back)
    for available in range(longest):
        row, column = np.nonzero(reach == available + 1)
        yield available, np.stack([rows[row, column - back] for back in range(available, -1, -1)], axis=1)


def _nats(model: Ngram, grams: np.ndarray) -> float:
    """Sum of -log p over the targets; equal n-grams are looked up once, in sorted order."""
    length = len(model.orders)
    keys, counts = _count(_pack(grams[:, max(0, grams.shape[1] - length) :], model.size))
    digits = np.stack([keys // model.size**back % model.size for back in range(length - 1, -1, -1)], axis=1)
    return float(-(np.log(model.probabilities(digits)) * counts).sum())


def _join(documents: Iterable[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens in one int32 array, and where the documents start."""
    parts = [np.asarray(document).astype(np.int32, copy=False).reshape(-1) for document in documents]
    parts = [part for part in parts if len(part)]
    if not parts:
        raise DataError("n-gram models need training documents, got none; is the train split empty?")
    tokens = np.concatenate(parts)
    if tokens.min() < 0 or tokens.max() >= size:
        raise DataError(f"training documents hold token ids from {tokens.min()} to {tokens.max()}, "
                        f"but the vocabulary has {size} tokens; prepare the text with the run's tokenizer")
    return tokens, np.cumsum([0] + [len(part) for part in parts[:-1]])


def _grams(tokens: np.ndarray, starts: np.ndarray, length: int, size: int) -> np.ndarray:
    """Keys of all n-grams that lie within one document."""
    if len(tokens) < length:
        return np.empty(0, dtype=np.int64)
    whole = np.ones(len(tokens) - length + 1, dtype=bool)
    for back in range(1, length):  # an n-gram that begins `back` tokens before a start runs over it
        before = starts - back
        whole[before[(before >= 0) & (before < len(whole))]] = False
    keys = tokens[: len(whole)].astype(np.int64)
    for back in range(1, length):
        keys *= size
        keys += tokens[back : back + len(whole)]
    return keys[whole]


def _pack(grams: np.ndarray, size: int) -> np.ndarray:
    keys = np.zeros(len(grams), dtype=np.int64)
    for column in range(grams.shape[1]):
        keys = keys * size + grams[:, column]
    return keys


def _runs(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values of a sorted array, and where each begins."""
    new = np.ones(len(ordered), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    start = np.flatnonzero(new)
    return ordered[start], start


def _count(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted distinct keys and how often each occurs (np.unique keeps more copies)."""
    ordered = np.sort(keys)
    values, start = _runs(ordered)
    return values, np.diff(np.append(start, len(ordered)))


def _find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the keys stand in a sorted table (0 where they do not), and whether they do."""
    place = np.searchsorted(table, keys)
    place[place == len(table)] = 0
    found = table[place] == keys
    return np.where(found, place, 0), found
