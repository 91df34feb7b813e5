"""Token vectors from a corpus alone: how each token's neighbours differ from chance.

    n(x, c)      how often context c stands within `window` places right (left) of x, a pair at distance o counting 1/o;
                 contexts are the C most frequent tokens, left and right kept apart: a matrix (V, 2C); pooled, the
                 right half stays empty
    PPMI(x, c)   max(0, log( n(x,c) / n(x) / p(c) )),   p(c) = n(c)^0.75 / sum of n^0.75,   each side by itself
    vectors      U S^0.5 of its singular value decomposition of rank `dimensions` (the damped spectrum)

Pairs are counted by sorting: a pair and its weight share one 64-bit word, chunks of words are sorted and summed, and
sorted runs are merged when they are of like size. The decomposition is subspace iteration on blocks of dense rows, which
at a few per cent of non-zeros is faster than sparse products. Both are deterministic: what is summed out of order are whole
numbers. All of it but the reading happens on `device`.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

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
    context = torch.full((size + 1,), -1)  # the last entry serves the gaps, whose id is -1
    context[torch.from_numpy(chosen)] = torch.arange(len(chosen))
    bits = 63 - (size * 2 * len(chosen)).bit_length()  # of a word, for the weight; the pair has the rest
    words = _count_pairs(documents, context.to(device), size, len(chosen), window, int(counts.max()), sides, bits)
    rows, columns, values = _positive_pmi(words, size, len(chosen), smoothing, bits)
    return _decompose(rows, columns, values, size, 2 * len(chosen), dimensions, damping, seed)


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


def _count_pairs(documents: Iterable[np.ndarray], context: Tensor, size: int, contexts: int, window: int, most: int, sides: str,
                 bits: int) -> Tensor:
    """Sorted words (token * 2C + side and context) << bits | weight, each pair once; weights in units of 1/scale. No token
    occurs more than `most` times, and so no pair at one offset."""
    scale = math.lcm(*range(1, window + 1))
    weights = [scale // offset for offset in range(1, window + 1)]
    left = contexts if sides == "apart" else 0
    if 2 * most * sum(weights) >= 1 << max(bits, 0):  # pooled, a pair counts on both sides
        raise TreeError(f"counts of a token that occurs {most} times with window {window} do not fit; use a smaller window or "
                        "fewer tokens")
    runs: list[Tensor] = []
    for chunk in token_chunks(documents, size, window):
        token = torch.from_numpy(chunk).to(context.device)
        near = context[token]
        words = []
        for offset, weight in enumerate(weights, start=1):
            for row, column, side in ((token[:-offset], near[offset:], 0), (token[offset:], near[:-offset], left)):
                pair = row * (2 * contexts) + column + side
                words.append(((pair << bits) | weight)[(row >= 0) & (column >= 0)])
        runs.append(_merge(words, bits))
        while len(runs) > 1 and 2 * len(runs[-1]) > len(runs[-2]):
            runs[-2:] = [_merge(runs[-2:], bits)]
    return _merge(runs, bits) if runs else context.new_zeros(0)


def _merge(words: list[Tensor], bits: int) -> Tensor:
    """Sorted, the weights of equal pairs added."""
    joined = torch.cat(words)
    if joined.is_cuda:
        joined = joined.sort().values
    else:
        joined.numpy().sort()  # twice as fast as torch's
    pair = joined >> bits
    last = torch.cat([pair[1:] != pair[:-1], torch.ones_like(pair[:1], dtype=torch.bool)]).nonzero()[:, 0]
    if len(last) == len(joined):
        return joined
    until = (joined & ((1 << bits) - 1)).cumsum(0)[last]
    return (pair[last] << bits) | torch.diff(until, prepend=until.new_zeros(1))


def _positive_pmi(words: Tensor, size: int, contexts: int, smoothing: float, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and values of the positive entries, sorted by row."""
    pair, weight = words >> bits, (words & ((1 << bits) - 1)).double()
    rows, columns = (pair // (2 * contexts)).int(), (pair % (2 * contexts)).int()
    of = 2 * rows + (columns >= contexts)  # a token's left and its right are counted apart
    by_row = torch.bincount(of, weight, minlength=2 * size)
    by_column = torch.bincount(columns, weight, minlength=2 * contexts).view(2, contexts) ** smoothing
    chance = torch.log(by_column / by_column.sum(1, keepdim=True)).flatten()  # nothing looks up a side that is empty
    values = (weight.log() - by_row.log()[of] - chance[columns]).float()
    keep = values > 0
    return rows[keep], columns[keep], values[keep]


def _decompose(rows: Tensor, columns: Tensor, values: Tensor, size: int, width: int, dimensions: int, damping: float,
               seed: int) -> np.ndarray:
    """U S^damping of the matrix (size, width) with these entries."""
    device = rows.device
    rank = min(dimensions, width, size)
    probe = min(rank + 32, width)
    bits = rng.words(torch.arange(width), probe, "neighbours", seed)
    basis = (rng.to_uniform(bits).float() - 0.5).to(device)
    step = max(1, _BLOCK // width)
    cuts = torch.searchsorted(rows, torch.arange(0, size + step, step, device=device, dtype=rows.dtype)).tolist()

    def blocks() -> Iterator[tuple[int, Tensor]]:
        for number, start in enumerate(range(0, size, step)):
            part = slice(cuts[number], cuts[number + 1])
            block = torch.zeros(min(step, size - start), width, device=device)
            block.view(-1)[(rows[part].long() - start) * width + columns[part]] = values[part]
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
