"""Sweeps over the rows of tables, for the embedding and the heads, as Triton kernels.

    gather       out[i] = table[index[i]], in another dtype on the way
    place        out[target[i]] = values[source[i]]; targets are distinct
    add_runs     out[key[i]] += values[order[i]], keys sorted: runs of one key are added up before they meet memory
    choose       of rows of logits: nll of the wanted class, and share (softmax - onehot) in place of the logits
    choose_wide  the same for rows that no program holds at once; wanted may be a stretch of classes, all as good
    survey       of rows of logits: log p of two classes, sum of softplus(k + log p), and what its gradient needs
    tilt         the gradient by the logits in their place, from that by what `survey` found
"""
# pyright: reportIndexIssue=false, reportMissingImports=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUN = 32
"""Rows that a program of `add_runs` walks."""
CHUNK = 4096
"""Classes that a program of `choose_wide` holds at once."""


@triton.jit
def _gather(table, index, out, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = tl.load(index + row).to(tl.int64)
    value = tl.load(table + at * d + column, mask=column < d, other=0.0)
    tl.store(out + row * d + column, value.to(out.dtype.element_ty), mask=column < d)


@triton.jit
def _place(values, source, target, out, d, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, to = tl.load(source + row).to(tl.int64), tl.load(target + row).to(tl.int64)
    value = tl.load(values + at * d + column, mask=column < d, other=0.0)
    tl.store(out + to * d + column, value.to(out.dtype.element_ty), mask=column < d)


@triton.jit
def _add_runs(values, order, key, out, M, d, ROWS: tl.constexpr, BLOCK: tl.constexpr, ORDER: tl.constexpr):
    first = tl.program_id(0) * ROWS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < d
    total = tl.zeros([BLOCK], tl.float32)
    current = tl.load(key + first).to(tl.int64)
    for i in range(ROWS):
        row = first + i
        if row < M:
            k = tl.load(key + row).to(tl.int64)
            if k != current:
                tl.atomic_add(out + current * d + column, total, mask=real, sem="relaxed")
                total = tl.zeros([BLOCK], tl.float32)
                current = k
            if ORDER:
                at = tl.load(order + row).to(tl.int64)
            else:
                at = row.to(tl.int64)
            total += tl.load(values + at * d + column, mask=real, other=0.0).to(tl.float32)
    tl.atomic_add(out + current * d + column, total, mask=real, sem="relaxed")


@triton.jit
def _choose(logits, offset, group, limit, slot, share, nll, n, stride, BLOCK: tl.constexpr, OFFSET: tl.constexpr,
            GRADIENT: tl.constexpr):
    """A row at once. `limit`: how many classes a group has; they fill the first slots."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.load(group + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    real = column < tl.load(limit + g)
    value = tl.load(logits + row * stride + column, mask=column < n, other=0.0).to(tl.float32)
    if OFFSET:
        value += tl.load(offset + g * n + column, mask=column < n, other=0.0)
    value = tl.where(real, value, -float("inf"))
    top = tl.max(value, 0)
    raised = tl.where(real, tl.exp(value - top), 0.0)
    total = tl.sum(raised, 0)
    wanted = column == tl.load(slot + row)
    tl.store(nll + row, top + tl.log(total) - tl.sum(tl.where(wanted, value, 0.0), 0))
    if GRADIENT:
        slope = (raised / total - wanted.to(tl.float32)) * tl.load(share + row).to(tl.float32)
        tl.store(logits + row * stride + column, slope.to(logits.dtype.element_ty), mask=column < n)


@triton.jit
def _choose_wide(logits, offset, target, until, share, nll, stride, n: tl.constexpr, BLOCK: tl.constexpr, STRETCH: tl.constexpr,
                 GRADIENT: tl.constexpr):
    """A row in pieces, twice: first its normaliser (and that of the wanted stretch, which may lie far below the rest: it has a
    maximum of its own), then (still in the cache) its gradient. Padding classes have offset -inf."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    low = tl.load(target + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if STRETCH:
        high = tl.load(until + row).to(tl.int64)
        best_inside = tl.full([BLOCK], -1e30, tl.float32)
        total_inside = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        value = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32)
        value += tl.load(offset + at, mask=at < n, other=-float("inf"))
        higher = tl.maximum(best, value)
        total = total * tl.exp(best - higher) + tl.exp(value - higher)
        best = higher
        if STRETCH:  # noqa: SIM102 - one is decided by the compiler, the other row by row
            if (start < high) & (start + BLOCK > low):
                inside = (at >= low) & (at < high)
                higher = tl.maximum(best_inside, tl.where(inside, value, -1e30))
                total_inside = total_inside * tl.exp(best_inside - higher) + tl.where(inside, tl.exp(value - higher), 0.0)
                best_inside = higher
    top = tl.max(best, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(best - top), 0))
    if STRETCH:
        top = tl.max(best_inside, 0)
        aim = top + tl.log(tl.sum(total_inside * tl.exp(best_inside - top), 0))
    else:
        aim = tl.load(logits + low).to(tl.float32) + tl.load(offset + low)
    tl.store(nll + row, normaliser - aim)
    if GRADIENT:
        weight = tl.load(share + row).to(tl.float32)
        tl.debug_barrier()  # all have read the wanted logit before it is overwritten
        for start in range(0, n, BLOCK):
            at = start + column
            value = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32)
            value += tl.load(offset + at, mask=at < n, other=-float("inf"))
            slope = tl.exp(value - normaliser)
            if STRETCH:
                if (start < high) & (start + BLOCK > low):
                    slope -= tl.where((at >= low) & (at < high), tl.exp(value - aim), 0.0)
            else:
                slope -= (at == low).to(tl.float32)
            tl.store(logits + at, (slope * weight).to(logits.dtype.element_ty), mask=at < n)


@triton.jit
def _survey(logits, offset, pair, k, found, normalisers, lifts, M, stride, n: tl.constexpr, BLOCK: tl.constexpr):
    """A row in pieces, twice: its normaliser, then the sums over its log p."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        value = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32)
        value += tl.load(offset + at, mask=at < n, other=-float("inf"))
        higher = tl.maximum(best, value)
        total = total * tl.exp(best - higher) + tl.exp(value - higher)
        best = higher
    top = tl.max(best, 0)
    normaliser = top + tl.log(tl.sum(total * tl.exp(best - top), 0))
    up = tl.load(k + row).to(tl.float32)
    spread = tl.zeros([BLOCK], tl.float32)
    lift = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        at = start + column
        value = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32)
        value += tl.load(offset + at, mask=at < n, other=-1e30)
        raised = tl.maximum(value - normaliser, -1e30) + up
        e = tl.exp(-tl.abs(raised))
        small = e * (1 - e * (0.5 - e / 3))  # log(1 + e) with all its digits
        spread += tl.maximum(raised, 0.0) + tl.where(e < 1e-3, small, tl.log(1 + e))
        lift += tl.where(raised >= 0, 1.0, e) / (1 + e)
    first = tl.load(pair + 2 * row).to(tl.int64)
    second = tl.load(pair + 2 * row + 1).to(tl.int64)
    tl.store(found + row, tl.load(logits + first).to(tl.float32) + tl.load(offset + first) - normaliser)
    tl.store(found + M + row, tl.load(logits + second).to(tl.float32) + tl.load(offset + second) - normaliser)
    tl.store(found + 2 * M + row, tl.sum(spread, 0))
    tl.store(normalisers + row, normaliser)
    tl.store(lifts + row, tl.sum(lift, 0))


@triton.jit
def _tilt(logits, offset, pair, k, normalisers, lifts, slopes_first, slopes_second, slopes_spread, stride, n: tl.constexpr,
          BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(slopes_first + row)
    second = tl.load(slopes_second + row)
    spread = tl.load(slopes_spread + row)
    value = tl.load(logits + at, mask=at < n, other=0.0).to(tl.float32) + tl.load(offset + at, mask=at < n, other=-1e30)
    log_p = tl.maximum(value - tl.load(normalisers + row), -1e30)
    raised = log_p + tl.load(k + row).to(tl.float32)
    e = tl.exp(-tl.abs(raised))
    slope = spread * tl.where(raised >= 0, 1.0, e) / (1 + e) - (first + second + spread * tl.load(lifts + row)) * tl.exp(log_p)
    slope += tl.where(at == tl.load(pair + 2 * row), first, 0.0) + tl.where(at == tl.load(pair + 2 * row + 1), second, 0.0)
    tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < n)


def gather(table: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    d, index = table.shape[1], index.contiguous()
    out = torch.empty(*index.shape, d, dtype=dtype, device=table.device)
    if index.numel():
        _gather[(index.numel(),)](table, index, out, d, BLOCK=triton.next_power_of_2(d), num_warps=4)
    return out


def place(values: Tensor, source: Tensor, target: Tensor, out: Tensor) -> None:
    d = out.shape[1]
    if len(source):
        _place[(len(source),)](values, source, target, out, d, BLOCK=triton.next_power_of_2(d), num_warps=4)


def add_runs(values: Tensor, key: Tensor, out: Tensor, order: Tensor | None = None) -> None:
    """Distinct programs meet in float32 by atomic additions: the last bits may differ from run to run."""
    M, d = values.shape
    if M:
        block = min(1024, triton.next_power_of_2(d))
        _add_runs[(triton.cdiv(M, RUN), triton.cdiv(d, block))](
            values, key if order is None else order, key, out, M, d, ROWS=RUN, BLOCK=block, ORDER=order is not None, num_warps=4)


def choose(logits: Tensor, offset: Tensor | None, group: Tensor, limit: Tensor, slot: Tensor, share: Tensor | None) -> Tensor:
    """nll; with shares, the gradient of sum(share nll) lies where the logits were."""
    M, n = logits.shape
    nll = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        block = triton.next_power_of_2(n)
        _choose[(M,)](logits, nll if offset is None else offset, group, limit, slot, nll if share is None else share, nll, n,
                      logits.stride(0), BLOCK=block, OFFSET=offset is not None, GRADIENT=share is not None,
                      num_warps=1 if block <= 256 else 2 if block <= 1024 else 8)
    return nll


def choose_wide(logits: Tensor, offset: Tensor, target: Tensor, share: Tensor | None, until: Tensor | None) -> Tensor:
    M, n = logits.shape
    nll = torch.empty(M, dtype=torch.float32, device=logits.device)
    if M:
        block = CHUNK if until is None else CHUNK // 2  # a stretch has sums of its own: as many registers
        _choose_wide[(M,)](logits, offset, target, target if until is None else until, nll if share is None else share, nll,
                           logits.stride(0), n=n, BLOCK=block, STRETCH=until is not None, GRADIENT=share is not None, num_warps=8)
    return nll


def survey(logits: Tensor, offset: Tensor, pair: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    M, n = logits.shape
    found = torch.empty(3, M, dtype=torch.float32, device=logits.device)
    normaliser, lift = torch.empty_like(found[0]), torch.empty_like(found[0])
    if M:
        _survey[(M,)](logits, offset, pair.contiguous(), k, found, normaliser, lift, M, logits.stride(0), n=n, BLOCK=CHUNK // 2,
                      num_warps=8)
    return found, normaliser, lift


def tilt(logits: Tensor, offset: Tensor, pair: Tensor, k: Tensor, normaliser: Tensor, lift: Tensor,
         slope: tuple[Tensor, Tensor, Tensor]) -> None:
    M, n = logits.shape
    if M:
        block = CHUNK // 2
        _tilt[(M, triton.cdiv(n, block))](logits, offset, pair.contiguous(), k, normaliser, lift, *slope, logits.stride(0), n=n,
                                          BLOCK=block, num_warps=8)
