"""Token vectors from a corpus alone: how each token's neighbours differ from chance.

    n(x, c)      how often context c stands within `window` places right (left) of x, a pair at distance o counting 1/o;
                 contexts are the C most frequent tokens, left and right kept apart: a matrix (V, 2C); pooled, the
                 right half stays empty
    PPMI(x, c)   max(0, log( n(x,c) / n(x) / p(c) )),   p(c) = n(c)^0.75 / sum of n^0.75,   each side by itself
    vectors      U S^0.5 of its singular value decomposition of rank `dimensions` (the damped spectrum)

Pairs are counted by sorting: a pair and its weight share one 64-bit word, chunks of words are sorted and summed, and
sorted runs are merged when they are of like size. The decomposition is subspace iteration on blocks of dense rows, which
at a few per cent of non-zeros is faster than sparse products. Both are deterministic.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from .. import rng
from ..errors import TreeError

_CHUNK = 1 << 20  # tokens counted at once
_BLOCK = 1 << 23  # numbers in a block of dense rows


def count_tokens(documents: Iterable[np.ndarray], size: int) -> np.ndarray:
    """(V,) occurrences."""
    counts = np.zeros(size, dtype=np.int64)
    for chunk in token_chunks(documents, size, gap=1):
        counts += np.bincount(chunk[chunk >= 0], minlength=size)
    return counts


def neighbour_vectors(documents: Iterable[np.ndarray], counts: np.ndarray, *, contexts: int = 4096, window: int = 4,
                      sides: str = "apart", dimensions: int = 128, damping: float = 0.5, smoothing: float = 0.75,
                      seed: int = 0, device: str = "cpu") -> np.ndarray:
    """(V, dimensions) float32; rows of tokens without a telling neighbour are zero."""
    size = len(counts)
    chosen = np.argsort(-counts, kind="stable")[: min(contexts, int((counts > 0).sum()))]
    if sides not in ("apart", "pooled"):
        raise TreeError(f"the sides of a token are kept apart or pooled, got {sides!r}")
    if len(chosen) == 0 or window < 1:
        raise TreeError("no tokens to learn neighbours from: the corpus is empty, or the window is below 1")
    context = np.full(size + 1, -1, dtype=np.int32)  # the last entry serves the gaps, whose id is -1
    context[chosen] = np.arange(len(chosen))
    bits = 63 - (size * 2 * len(chosen)).bit_length()  # of a word, for the weight; the pair has the rest
    words = _count_pairs(documents, context, size, len(chosen), window, int(counts.max()), sides, bits)
    rows, columns, values = _positive_pmi(words, size, len(chosen), smoothing, bits)
    return _decompose(rows, columns, values, size, 2 * len(chosen), dimensions, damping, seed, device)


def token_chunks(documents: Iterable[np.ndarray], size: int, gap: int) -> Iterator[np.ndarray]:
    """Many documents in one array, with a gap of -1 after each so that no window reaches across."""
    parts: list[np.ndarray] = []
    length = 0
    empty = np.full(gap, -1, dtype=np.int64)
    for document in documents:
        for start in range(0, len(document), _CHUNK):  # a huge document is cut; the windows across the cuts are lost
            part = np.asarray(document[start : start + _CHUNK], dtype=np.int64)
            if part.size and (part.min() < 0 or part.max() >= size):
                raise TreeError(f"token {int(part.max())} in the corpus, but the vocabulary has {size}; "
                                "prepare the data again with this tokenizer")
            parts += [part, empty]
            length += len(part) + gap
            if length >= _CHUNK:
                yield np.concatenate(parts)
                parts, length = [], 0
    if parts:
        yield np.concatenate(parts)


def _count_pairs(documents: Iterable[np.ndarray], context: np.ndarray, size: int, contexts: int, window: int,
                 most: int, sides: str, bits: int) -> np.ndarray:
    """Sorted words (token * 2C + side and context) << bits | weight, each pair once; weights in units of 1/scale. No token
    occurs more than `most` times, and so no pair at one offset."""
    scale = math.lcm(*range(1, window + 1))
    weights = [scale // offset for offset in range(1, window + 1)]
    left = contexts if sides == "apart" else 0
    if 2 * most * sum(weights) >= 1 << max(bits, 0):  # pooled, a pair counts on both sides
        raise TreeError(f"counts of a token that occurs {most} times with window {window} do not fit; use a smaller window or "
                        "fewer tokens")
    runs: list[np.ndarray] = []
    for chunk in token_chunks(documents, size, window):
        near = context[chunk].astype(np.int64)
        words = []
        for offset, weight in enumerate(weights, start=1):
            for row, column, side in ((chunk[:-offset], near[offset:], 0), (chunk[offset:], near[:-offset], left)):
                real = (row >= 0) & (column >= 0)
                pair = row[real] * (2 * contexts) + column[real] + side
                words.append((pair << bits) | weight)
        runs.append(_merge(words, bits))
        while len(runs) > 1 and 2 * len(runs[-1]) > len(runs[-2]):
            runs[-2:] = [_merge(runs[-2:], bits)]
    return _merge(runs, bits) if runs else np.zeros(0, dtype=np.int64)


def _merge(words: list[np.ndarray], bits: int) -> np.ndarray:
    """Sorted, the weights of equal pairs added."""
    joined = np.concatenate(words)
    joined.sort()
    pair = joined >> bits
    start = np.flatnonzero(np.r_[True, pair[1:] != pair[:-1]]) if len(joined) else np.zeros(0, dtype=np.int64)
    if len(start) == len(joined):
        return joined
    weight = np.add.reduceat(joined & ((1 << bits) - 1), start)
    return (pair[start] << bits) | weight


def _positive_pmi(words: np.ndarray, size: int, contexts: int, smoothing: float,
                  bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and values of the positive entries, sorted by row."""
    pair = words >> bits
    weight = (words & ((1 << bits) - 1)).astype(np.float64)
    rows, columns = (pair // (2 * contexts)).astype(np.int32), (pair % (2 * contexts)).astype(np.int32)
    values = np.zeros(len(pair), dtype=np.float32)
    for side in (0, 1):
        here = (columns >= contexts) == bool(side)
        row, column, count = rows[here], columns[here] - side * contexts, weight[here]
        by_row = np.bincount(row, count, minlength=size)
        by_column = np.bincount(column, count, minlength=contexts) ** smoothing
        with np.errstate(divide="ignore"):
            chance = np.log(by_column / by_column.sum()) if by_column.any() else by_column
            values[here] = np.log(count) - np.log(by_row)[row] - chance[column]
    keep = values > 0
    return rows[keep], columns[keep], values[keep]


def _decompose(rows: np.ndarray, columns: np.ndarray, values: np.ndarray, size: int, width: int, dimensions: int,
               damping: float, seed: int, device: str) -> np.ndarray:
    """U S^damping of the matrix (size, width) with these entries."""
    rank = min(dimensions, width, size)
    probe = min(rank + 32, width)
    bits = rng.words(torch.arange(width), probe, "neighbours", seed)
    basis = (rng.to_uniform(bits).float() - 0.5).to(device)
    step = max(1, _BLOCK // width)
    cuts = np.searchsorted(rows, np.arange(0, size + step, step))

    def blocks() -> Iterator[tuple[int, torch.Tensor]]:
        for number, start in enumerate(range(0, size, step)):
            part = slice(int(cuts[number]), int(cuts[number + 1]))
            block = torch.zeros(min(step, size - start), width, device=device)
            place = (rows[part].astype(np.int64) - start) * width + columns[part]
            block.view(-1)[torch.from_numpy(place).to(device)] = torch.from_numpy(values[part]).to(device)
            yield start, block

    for _ in range(4):
        total = torch.zeros(width, probe, device=device)
        for _, block in blocks():
            total += block.T @ (block @ basis)
        basis = torch.linalg.qr(total).Q
    left = torch.cat([block @ basis for _, block in blocks()]).double().cpu()
    power, turn = torch.linalg.eigh(left.T @ left)
    power, turn = power.flip(0)[:rank], turn.flip(1)[:, :rank]
    singular = power.clamp(min=0).sqrt()
    real = singular > 1e-6 * singular[0].clamp(min=1e-12)
    scale = torch.where(real, singular.clamp(min=1e-30) ** (damping - 1), 0)
    return (left @ turn * scale).float().numpy()
