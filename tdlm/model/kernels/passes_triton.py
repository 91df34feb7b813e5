"""`passes` as Triton kernels: one sweep over memory each.

A program of `enter` and `leave` walks some rows of one sequence, a whole row of d channels at a time, with the modulations in
registers; `leave` sums over its rows on the way and writes one partial sum per program. Their speed is the memory's: 8 and 12
to 14 bytes a position and channel. Rows a program and warps were chosen by measuring on an H200.
"""
# pyright: reportIndexIssue=false, reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .passes import EPS, FLOAT8, GAIN, LARGEST, SIGMAS

ENTER = (8, 4, 4)
"""Rows a program walks, how many are on their way at once, warps."""
LEAVE = (64, 3, 1, 4)
"""Tiles a program walks, how many are on their way at once, rows a tile, warps."""
BEND = (2048, 4)
"""Elements a program, warps."""
UNBEND = (128, 1, 512, 4)
"""Rows a program walks, how many are on their way at once, channels it has, warps."""
TURN = (2, 4)
"""Positions a program, warps."""


@triton.jit
def _enter(x, branch, gate, weight, shift, scale, stream, out, mean, rstd, S, d, gate_row, shift_row, scale_row,
           ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, BRANCH: tl.constexpr, EPS: tl.constexpr,
           GAIN: tl.constexpr, LARGEST: tl.constexpr):
    b, chunk = tl.program_id(1), tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < d
    m = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    m = m * (1.0 + tl.load(scale + b * scale_row + column, mask=real, other=0.0).to(tl.float32))
    a = tl.load(shift + b * shift_row + column, mask=real, other=0.0).to(tl.float32)
    if BRANCH:
        g = tl.load(gate + b * gate_row + column, mask=real, other=0.0).to(tl.float32)
    for i in tl.range(0, ROWS, num_stages=STAGES):
        s = chunk * ROWS + i
        inside = real & (s < S)
        row = b.to(tl.int64) * S + s
        at = row * d + column
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            v += g * tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            v = v.to(stream.dtype.element_ty)
            tl.store(stream + at, v, mask=inside)
            v = v.to(tl.float32)
        mu = tl.sum(v, 0) / d
        centred = tl.where(real, v - mu, 0.0)
        r = tl.rsqrt(tl.sum(centred * centred, 0) / d + EPS)
        y = centred * r * m + a
        if GAIN != 1:
            y = tl.minimum(tl.maximum(y * GAIN, -LARGEST), LARGEST)
        tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
        tl.store(mean + row, mu, mask=s < S)
        tl.store(rstd + row, r, mask=s < S)


@triton.jit
def _leave(dstream, dout, x, branch, gate, weight, shift, scale, mean, rstd, dx, dbranch, out, sums, narrow, narrow_scale,
           narrow_size, S, d, gate_row, shift_row, scale_row, NARROW: tl.constexpr, LARGEST: tl.constexpr, TILES: tl.constexpr,
           STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr, BRANCH: tl.constexpr,
           BEFORE: tl.constexpr, AGAIN: tl.constexpr):
    """ROWS rows at once, so that their loads and their sums over channels overlap."""
    b, chunk = tl.program_id(1), tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < d
    m = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    m = m * (1.0 + tl.load(scale + b * scale_row + column, mask=real, other=0.0).to(tl.float32))
    if AGAIN:
        a = tl.load(shift + b * shift_row + column, mask=real, other=0.0).to(tl.float32)
    if BRANCH:
        g = tl.load(gate + b * gate_row + column, mask=real, other=0.0).to(tl.float32)
    sum_out = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_normal = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_stream = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.range(0, TILES, num_stages=STAGES):
        s = (chunk * TILES + i) * ROWS + tl.arange(0, ROWS)
        inside = real[None, :] & (s < S)[:, None]
        row = b.to(tl.int64) * S + s
        at = row[:, None] * d + column[None, :]
        dy = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if BRANCH:
            y = tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
        if STREAM:
            above = tl.load(dstream + at, mask=inside, other=0.0).to(tl.float32)
        mu = tl.load(mean + row, mask=s < S, other=0.0)[:, None]
        r = tl.load(rstd + row, mask=s < S, other=0.0)[:, None]
        if BEFORE:
            v = (v + g[None, :] * y).to(x.dtype.element_ty).to(tl.float32)
        n = tl.where(inside, (v - mu) * r, 0.0)
        sum_out += dy
        sum_normal += dy * n
        along = dy * m[None, :]
        total = (along - (tl.sum(along, 1) / d)[:, None] - n * (tl.sum(along * n, 1) / d)[:, None]) * r
        if STREAM:
            total += above
        total = tl.where(inside, total, 0.0)
        sum_stream += total
        tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside)
        if BRANCH:
            sum_gate += total * y
            total = total * g[None, :]
            tl.store(dbranch + at, total.to(dbranch.dtype.element_ty), mask=inside)
            if NARROW:
                unit = tl.maximum(tl.max(tl.abs(total), 1) / LARGEST, 1e-30)
                tl.store(narrow_scale + row, unit, mask=s < S)
                tl.store(narrow_size + row, tl.sqrt(tl.sum(total * total, 1)), mask=s < S)
                total = tl.minimum(tl.maximum(total / unit[:, None], -LARGEST), LARGEST)
                tl.store(narrow + at, total.to(narrow.dtype.element_ty), mask=inside)
        if AGAIN:
            tl.store(out + at, (n * m[None, :] + a[None, :]).to(out.dtype.element_ty), mask=inside)
    base = (b * tl.num_programs(0) + chunk).to(tl.int64) * 4 * d + column
    tl.store(sums + base, tl.sum(sum_out, 0), mask=real)
    tl.store(sums + base + d, tl.sum(sum_normal, 0), mask=real)
    tl.store(sums + base + 2 * d, tl.sum(sum_gate, 0), mask=real)
    tl.store(sums + base + 3 * d, tl.sum(sum_stream, 0), mask=real)


def _row(modulation: Tensor) -> int:
    """From one sequence's modulation to the next; all share the only row."""
    return 0 if modulation.shape[0] == 1 else modulation.stride(0)


def _eight(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(rows, width, dtype=FLOAT8, device=device), torch.empty(rows, 1, dtype=torch.float32, device=device)


def enter(x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, shift: Tensor, scale: Tensor,
          dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, S, d = x.shape
    rows, stages, warps = ENTER
    out = torch.empty_like(x, dtype=dtype)
    stream = x if branch is None else torch.empty_like(x)
    mean, rstd = torch.empty(2, B, S, dtype=torch.float32, device=x.device)
    _enter[(triton.cdiv(S, rows), B)](
        x, x if branch is None else branch, shift if gate is None else gate, weight, shift, scale, stream, out, mean, rstd, S, d,
        0 if gate is None else _row(gate), _row(shift), _row(scale), ROWS=rows, STAGES=stages, BLOCK=triton.next_power_of_2(d),
        BRANCH=branch is not None, EPS=EPS, GAIN=GAIN if dtype == FLOAT8 else 1.0, LARGEST=LARGEST, num_warps=warps)
    return stream, out, mean, rstd


def leave(dstream: Tensor | None, dout: Tensor, x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor,
          shift: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor, before: bool, again: bool,
          narrow: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Tensor, ...] | None]:
    B, S, d = x.shape
    tiles, stages, rows, warps = LEAVE
    chunks = triton.cdiv(S, tiles * rows)
    dx = torch.empty_like(x) if dstream is None else dstream
    dbranch = None if branch is None else torch.empty_like(branch)
    sums = torch.empty(B, chunks, 4, d, dtype=torch.float32, device=x.device)
    eight = (*_eight(B * S, d, x.device), torch.empty(B * S, 1, dtype=torch.float32, device=x.device)) if narrow else None
    _leave[(chunks, B)](
        dx, dout, x, x if branch is None else branch, shift if gate is None else gate, weight, shift, scale, mean, rstd, dx,
        x if dbranch is None else dbranch, dout, sums, *(eight or (x, sums, sums)), S, d, 0 if gate is None else _row(gate),
        _row(shift), _row(scale), NARROW=narrow, LARGEST=LARGEST, TILES=tiles, STAGES=stages, ROWS=rows,
        BLOCK=triton.next_power_of_2(d), STREAM=dstream is not None, BRANCH=branch is not None, BEFORE=before, AGAIN=again,
        num_warps=warps)
    return dx, dbranch, dout if again else None, sums.sum(1), eight


# GELU's tanh form is x sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3)

@triton.jit
def _bend(h, out, total, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(h + at, mask=at < total, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=at < total)


@triton.jit
def _bend_narrow(h, out, kept, total, BLOCK: tl.constexpr, GAIN: tl.constexpr, LARGEST: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(h + at, mask=at < total, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    tl.store(out + at, tl.minimum(tl.maximum(y * GAIN, -LARGEST), LARGEST).to(out.dtype.element_ty), mask=at < total)
    tl.store(kept + at, tl.minimum(tl.maximum(x * GAIN, -LARGEST), LARGEST).to(kept.dtype.element_ty), mask=at < total)


@triton.jit
def _unbend(h, dout, again, sums, narrow, narrow_scale, size, unit, N, width, ROWS: tl.constexpr, STAGES: tl.constexpr,
            BLOCK: tl.constexpr, GAIN: tl.constexpr, NARROW: tl.constexpr, SIGMAS: tl.constexpr, LARGEST: tl.constexpr):
    chunk = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(0, ROWS, num_stages=STAGES):
        row = chunk.to(tl.int64) * ROWS + i
        at = row * width + column
        inside = (column < width) & (row < N)
        x = tl.load(h + at, mask=inside, other=0.0).to(tl.float32) / GAIN
        dy = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        dx = dy * (gate + x * gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x))
        total += dx
        tl.store(dout + at, dx.to(dout.dtype.element_ty), mask=inside)
        tl.store(again + at, (x * gate).to(again.dtype.element_ty), mask=inside)
        if NARROW:
            step = tl.maximum(tl.load(size + row, mask=row < N, other=0.0) * tl.load(unit) * (SIGMAS / LARGEST), 1e-30)
            tl.store(narrow_scale + row, step, mask=(row < N) & (tl.program_id(0) == 0))
            dx = tl.minimum(tl.maximum(dx / step, -LARGEST), LARGEST)
            tl.store(narrow + at, dx.to(narrow.dtype.element_ty), mask=inside)
    tl.store(sums + chunk.to(tl.int64) * width + column, total, mask=column < width)


def bend(h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    block, warps = BEND
    _bend[(triton.cdiv(h.numel(), block),)](h, out, h.numel(), BLOCK=block, num_warps=warps)
    return out


def bend_narrow(h: Tensor) -> tuple[Tensor, Tensor]:
    out, kept = torch.empty_like(h, dtype=FLOAT8), torch.empty_like(h, dtype=FLOAT8)
    block, warps = BEND
    _bend_narrow[(triton.cdiv(h.numel(), block),)](h, out, kept, h.numel(), BLOCK=block, GAIN=GAIN, LARGEST=LARGEST,
                                                   num_warps=warps)
    return out, kept


def unbend(h: Tensor, dout: Tensor, size: Tensor | None = None, unit: Tensor | None = None) -> tuple[Tensor, ...]:
    """dh, GELU(h), sums over rows; where the size of what came in is known also dh in float8, and its scales."""
    N, width = h.shape
    rows, stages, block, warps = UNBEND
    chunks = triton.cdiv(N, rows)
    sums = torch.empty(chunks, width, dtype=torch.float32, device=h.device)
    again = torch.empty_like(dout) if h.dtype == FLOAT8 else h
    eight = None if size is None else _eight(N, width, h.device)
    _unbend[(triton.cdiv(width, block), chunks)](
        h, dout, again, sums, *(eight or (dout, sums)), sums if size is None else size, sums if unit is None else unit, N, width,
        ROWS=rows, STAGES=stages, BLOCK=block, GAIN=GAIN if h.dtype == FLOAT8 else 1.0, NARROW=eight is not None, SIGMAS=SIGMAS,
        LARGEST=LARGEST, num_warps=warps)
    return (dout, again, sums.sum(0), *(eight or ()))


@triton.jit
def _turn(qkv, cos, sin, positions, S, row, PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of q and k of a position are counted through both and all heads: head = pair // HALF."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (r < positions) & (pair < PAIRS)
    angle = (r % S) * HALF + pair % HALF
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    at = r.to(tl.int64) * row + (pair // HALF) * (2 * HALF) + pair % HALF
    left = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv + at, (left * c - right * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + at + HALF, (right * c + left * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _unturn(dq, dk, dv, cos, sin, out, narrow, narrow_scale, positions, S, qb, qs, qh, kb, ks, kh, vb, vs, vh,
            PAIRS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
            LARGEST: tl.constexpr):
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (r < positions) & (pair < PAIRS)
    b, place = (r // S).to(tl.int64), (r % S).to(tl.int64)
    head, i = pair // HALF, pair % HALF
    c = tl.load(cos + place * HALF + i, mask=inside, other=0.0)
    s = tl.load(sin + place * HALF + i, mask=inside, other=0.0)
    at = b * qb + place * qs + head * qh + i
    left = tl.load(dq + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(dq + at + HALF, mask=inside, other=0.0).to(tl.float32)
    q0, q1 = left * c + right * s, right * c - left * s
    at = b * kb + place * ks + head * kh + i
    left = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(dk + at + HALF, mask=inside, other=0.0).to(tl.float32)
    k0, k1 = left * c + right * s, right * c - left * s
    at = b * vb + place * vs + head * vh + i
    v0 = tl.load(dv + at, mask=inside, other=0.0).to(tl.float32)
    v1 = tl.load(dv + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = r.to(tl.int64) * (6 * PAIRS) + head * (2 * HALF) + i
    tl.store(out + to, q0.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + HALF, q1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + 2 * PAIRS, k0.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + 2 * PAIRS + HALF, k1.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + 4 * PAIRS, v0.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to + 4 * PAIRS + HALF, v1.to(out.dtype.element_ty), mask=inside)
    if NARROW:
        high = tl.maximum(tl.maximum(tl.abs(q0), tl.abs(q1)), tl.maximum(tl.abs(k0), tl.abs(k1)))
        high = tl.maximum(high, tl.maximum(tl.abs(v0), tl.abs(v1)))
        unit = tl.maximum(tl.max(high, 1) / LARGEST, 1e-30)[:, None]
        tl.store(narrow_scale + r, unit, mask=r < positions)
        kind = narrow.dtype.element_ty
        tl.store(narrow + to, tl.minimum(tl.maximum(q0 / unit, -LARGEST), LARGEST).to(kind), mask=inside)
        tl.store(narrow + to + HALF, tl.minimum(tl.maximum(q1 / unit, -LARGEST), LARGEST).to(kind), mask=inside)
        to += 2 * PAIRS
        tl.store(narrow + to, tl.minimum(tl.maximum(k0 / unit, -LARGEST), LARGEST).to(kind), mask=inside)
        tl.store(narrow + to + HALF, tl.minimum(tl.maximum(k1 / unit, -LARGEST), LARGEST).to(kind), mask=inside)
        to += 2 * PAIRS
        tl.store(narrow + to, tl.minimum(tl.maximum(v0 / unit, -LARGEST), LARGEST).to(kind), mask=inside)
        tl.store(narrow + to + HALF, tl.minimum(tl.maximum(v1 / unit, -LARGEST), LARGEST).to(kind), mask=inside)


def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
    B, S, _, heads, D = qkv.shape
    rows, warps = TURN
    pairs = heads * D  # of q and k together: half of 2 heads D
    _turn[(triton.cdiv(B * S, rows),)](qkv, cos, sin, B * S, S, 3 * heads * D, PAIRS=pairs, HALF=D // 2, ROWS=rows,
                                       BLOCK=triton.next_power_of_2(pairs), num_warps=warps)


def unturn(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, narrow: bool = False) -> Any:
    """The gradient; with `narrow` also in float8, and its scales."""
    B, heads, S, D = dq.shape
    dq, dk, dv = (t if t.stride(-1) == 1 else t.contiguous() for t in (dq, dk, dv))
    rows, warps = TURN
    pairs = heads * D // 2
    out = torch.empty(B, S, 3, heads, D, dtype=dq.dtype, device=dq.device)
    strides = [t.stride(i) for t in (dq, dk, dv) for i in (0, 2, 1)]
    eight = _eight(B * S, 3 * heads * D, dq.device) if narrow else None
    _unturn[(triton.cdiv(B * S, rows),)](dq, dk, dv, cos, sin, out, *(eight or (out, cos)), B * S, S, *strides, PAIRS=pairs,
                                         HALF=D // 2, ROWS=rows, BLOCK=triton.next_power_of_2(pairs), NARROW=narrow,
                                         LARGEST=LARGEST, num_warps=warps)
    return out if eight is None else (out, *eight)
