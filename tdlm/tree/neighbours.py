"""Which tokens stand how far from which: the counts that exchange clustering (`exchange.py`) is about.

    n_o(x, y)   how often y stands o places after x (before x for negative o),   o = +1, -1, +2, -2, ..., +W, -W

Both directions are kept although n_-o(x, y) = n_o(y, x): all that concerns a token then lies in one stretch. Pairs are counted
by sorting one 64-bit word a pair, an offset at a time; no pair reaches from one document into the next.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import TreeError
from .cooccurrence import token_chunks


@dataclass(frozen=True)
class Neighbours:
    """Row x is `start[x]:start[x + 1]`: the token `code % V` stood at offset number `code // V` of x, `count` times."""

    size: int
    window: int
    start: np.ndarray
    code: np.ndarray
    count: np.ndarray

    @property
    def offsets(self) -> int:
        return 2 * self.window

    def rows(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Entries of several tokens: which of `tokens` each belongs to, and its place in `code` and `count`."""
        length = self.start[tokens + 1] - self.start[tokens]
        owner = np.repeat(np.arange(len(tokens)), length)
        before = np.cumsum(length) - length
        return owner, np.arange(len(owner)) + np.repeat(self.start[tokens] - before, length)


def other_side(offset: np.ndarray) -> np.ndarray:
    """The number of the offset -o."""
    return offset ^ 1


def count_neighbours(documents: Iterable[np.ndarray], size: int, window: int = 2) -> Neighbours:
    """The counts of all pairs of tokens at most `window` places apart."""
    if window < 1:
        raise TreeError(f"neighbours are counted within a window of at least 1, got {window}")
    parts = [chunk.astype(np.int32) for chunk in token_chunks(documents, size, gap=window)]
    if not parts:
        raise TreeError("no tokens to learn neighbours from: the corpus is empty")
    stream = np.concatenate(parts)
    del parts
    lists = [listed for offset in range(1, window + 1) for listed in _pairs(stream, size, offset)]
    lengths = [np.bincount(row, minlength=size) for row, _, _ in lists]
    start = np.r_[0, np.cumsum(np.sum(lengths, axis=0))]
    code, count = np.empty(start[-1], np.int32), np.empty(start[-1], np.int32)
    free = start[:-1].copy()
    for number, length in enumerate(lengths):
        row, near, times = lists[number]
        place = free[row] + np.arange(len(row)) - (np.cumsum(length) - length)[row]
        code[place], count[place] = number * size + near, times
        free += length
        lists[number] = (row[:0], near[:0], times[:0])  # what is done need not be kept
    return Neighbours(size, window, start, code, count)


def _pairs(stream: np.ndarray, size: int, offset: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(x, y, n_o(x, y)) in order of x, for o = offset and o = -offset."""
    left, right = stream[:-offset], stream[offset:]
    real = (left >= 0) & (right >= 0)
    pair = left[real].astype(np.int64) * size + right[real]
    pair.sort()
    first = np.flatnonzero(np.r_[True, pair[1:] != pair[:-1]]) if len(pair) else np.zeros(0, np.int64)
    times = np.diff(np.r_[first, len(pair)]).astype(np.int32)
    x, y = (pair[first] // size).astype(np.int32), (pair[first] % size).astype(np.int32)
    order = np.argsort(y, kind="stable")
    return [(x, y, times), (y[order], x[order], times[order])]
