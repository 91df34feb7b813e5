"""The element-wise passes of a transformer block, each fused into one sweep over memory: plain formulas, for any device.

On a GPU `passes_triton` computes the same in one kernel each; these are their slow twins, and what a CPU runs. Rows r are
positions, c channels; modulations (shift, scale, gate) belong to a sequence (or to all: a single row). With the stream x, what
a branch (attention or MLP) added to it, and LayerNorm's weight w,

    enter      x' = x + gate branch,   n = (x' - mean) / std,   y = n w (1 + scale) + shift
    leave      backwards: from dy and the gradient D of x' that came along the stream, with g = dy w (1 + scale)
                   dx' = D + (g - mean(g) - n mean(g n)) / std,    dbranch = gate dx'
               and sums over the positions of a sequence: dy, dy n, dx' branch, dx'
    bend       GELU (tanh form); backwards its derivative, its value once more, and the sum of dh over positions
    turn       rotary embedding of q and k where they lie in the product (q | k | v); backwards it is undone, and all three lie
               side by side again

Sums are float32 (float64 for float64 input); results take the dtype of their inputs.

Products in eight bits (`eight.py`) want their inputs in float8: `enter` and `bend` then give GAIN times the value, and `leave`
and `unturn` give besides their results the same in float8 with a scale for each position (x = x8 scale).
"""
from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from types import ModuleType
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5
FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of float8: everything beyond is cut."""
SIGMAS = 16.0
"""A row of dx W is about normal with deviation |dx| rms(W): so many of them are put at LARGEST, without a look at the row."""
GAIN = 8.0
"""Norms and activations are of the order of 1; times 8 their small values keep their digits, and 56 is cut."""


class Entered(NamedTuple):
    stream: Float[Tensor, "B S d"]
    out: Float[Tensor, "B S d"]
    mean: Float[Tensor, "B S"]
    rstd: Float[Tensor, "B S"]


class Narrow(NamedTuple):
    """Rows in float8, each with its scale."""

    values: Tensor
    scale: Float[Tensor, "N one"]
    size: Float[Tensor, "N one"] | None = None
    """Euclidean length of the rows, where the next sweep needs it."""


class Left(NamedTuple):
    stream: Float[Tensor, "B S d"]
    """Gradient of x'."""
    branch: Float[Tensor, "B S d"] | None
    out: Float[Tensor, "B S d"] | None
    """y, computed once more."""
    sums: Float[Tensor, "B 4 d"]
    """Over positions: dy, dy n, dx' branch, dx'."""
    narrow: Narrow | None = None
    """`branch` in float8."""


class Modulation(NamedTuple):
    """One LayerNorm with its modulation: weight (d,), shift and scale (B or 1, d)."""

    weight: Float[Tensor, "d"]
    shift: Float[Tensor, "#B d"]
    scale: Float[Tensor, "#B d"]


@functools.cache
def usable() -> bool:
    """Whether kernels can be made here: Triton also needs a C compiler and a GPU that it knows."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        from . import passes_triton

        passes_triton.bend(torch.zeros(16, device="cuda"))
    except Exception as error:  # whatever a compiler says
        warnings.warn(f"Triton makes no kernels here, everything is computed step by step: {str(error).splitlines()[:1]}",
                      stacklevel=2)
        return False
    return True


@functools.cache
def _triton() -> ModuleType | None:
    if not usable():
        return None
    from . import passes_triton

    return passes_triton


def fast(x: Tensor) -> ModuleType | None:
    """The GPU's kernels, where they can run."""
    return _triton() if x.is_cuda and x.dtype != torch.float64 else None


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def enter(x: Float[Tensor, "B S d"], branch: Float[Tensor, "B S d"] | None, gate: Float[Tensor, "#B d"] | None,
          norm: Modulation, dtype: torch.dtype) -> Entered:
    """Add a branch to the stream, normalise and modulate."""
    if (kernels := fast(x)) is not None:
        return Entered(*kernels.enter(x, branch, gate, *norm, dtype))
    stream = _added(x, branch, gate)
    value = wide(stream)
    mean = value.mean(-1)
    rstd = torch.rsqrt((value - mean[..., None]).square().mean(-1) + EPS)
    out = _modulated((value - mean[..., None]) * rstd[..., None], norm)
    return Entered(stream, _gained(out) if dtype == FLOAT8 else out.to(dtype), mean, rstd)


def leave(dstream: Float[Tensor, "B S d"] | None, dout: Float[Tensor, "B S d"], x: Float[Tensor, "B S d"],
          branch: Float[Tensor, "B S d"] | None, gate: Float[Tensor, "#B d"] | None, norm: Modulation, mean: Float[Tensor, "B S"],
          rstd: Float[Tensor, "B S"], *, before: bool, again: bool, narrow: bool = False) -> Left:
    """Backwards through `enter`. `before`: x is the stream before the branch was added, which is then added again. `again`: y
    is wanted once more; `narrow`: dbranch in float8, too. The memory of `dstream` and `dout` is reused."""
    if (kernels := fast(x)) is not None:
        dx, dbranch, out, sums, rows = kernels.leave(dstream, dout, x, branch, gate, *norm, mean, rstd, before, again, narrow)
        return Left(dx, dbranch, out, sums, None if rows is None else Narrow(*rows))
    stream = wide(_added(x, branch, gate) if before else x)
    n = (stream - mean[..., None]) * rstd[..., None]
    dy = wide(dout)
    g = dy * wide(norm.weight) * (1 + wide(norm.scale)[:, None])
    dx = (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)) * rstd[..., None]
    dx = dx if dstream is None else dx + wide(dstream)
    parts = [dy.sum(1), (dy * n).sum(1), torch.zeros_like(dy[:, 0]) if branch is None else (dx * wide(branch)).sum(1), dx.sum(1)]
    dbranch = None if branch is None or gate is None else dx * wide(gate)[:, None]
    return Left(dx.to(x.dtype), None if dbranch is None else dbranch.to(dout.dtype),
                _modulated(n, norm).to(dout.dtype) if again else None, torch.stack(parts, 1),
                _narrowed(dbranch.flatten(0, 1)) if narrow and dbranch is not None else None)


def _added(x: Tensor, branch: Tensor | None, gate: Tensor | None) -> Tensor:
    """Rounded to the stream's dtype, so that adding again gives the same bits."""
    return x if branch is None or gate is None else (wide(x) + wide(gate)[:, None] * wide(branch)).to(x.dtype)


def _modulated(n: Tensor, norm: Modulation) -> Tensor:
    return n * wide(norm.weight) * (1 + wide(norm.scale)[:, None]) + wide(norm.shift)[:, None]


def _gained(x: Tensor) -> Tensor:
    return (x * GAIN).clamp(-LARGEST, LARGEST).to(FLOAT8)


def _narrowed(x: Float[Tensor, "N n"]) -> Narrow:
    scale = (x.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-30)
    return Narrow((x / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale.float(), x.float().norm(dim=1, keepdim=True))


def bend(h: Float[Tensor, "N F"]) -> Float[Tensor, "N F"]:
    return F.gelu(h, approximate="tanh") if (kernels := fast(h)) is None else kernels.bend(h)


def bend_narrow(h: Float[Tensor, "N F"]) -> tuple[Tensor, Tensor]:
    """GELU(h) and h, both as GAIN times the value in float8."""
    if (kernels := fast(h)) is not None:
        return kernels.bend_narrow(h)
    return _gained(F.gelu(wide(h), approximate="tanh")), _gained(wide(h))


def unbend(h: Tensor,
           dout: Float[Tensor, "N F"]) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N F"], Float[Tensor, "F"]]:
    """dh, GELU(h), and the sum of dh over positions. The memory of both inputs is reused (not of h in float8)."""
    if (kernels := fast(h)) is not None:
        return kernels.unbend(h, dout)
    x, twice = h.float() / GAIN if h.dtype == FLOAT8 else wide(h), 2 * math.sqrt(2 / math.pi)
    gate = (twice * (x + 0.044715 * x**3)).sigmoid()  # GELU(x) = x gate
    dh = wide(dout) * (gate + x * gate * (1 - gate) * twice * (1 + 3 * 0.044715 * x**2))
    return dh.to(dout.dtype), (x * gate).to(dout.dtype), dh.sum(0)


def unbend_narrow(h: Tensor, dout: Float[Tensor, "N F"], size: Float[Tensor, "N one"],
                  unit: Float[Tensor, ""]) -> tuple[Float[Tensor, "N F"], Float[Tensor, "N F"], Float[Tensor, "F"], Narrow]:
    """`unbend`, and dh in float8, too. `size`: the length of the rows of dx that dout = dx W was made of; `unit`: rms(W)."""
    if (kernels := fast(h)) is not None:
        dh, again, sums, values, scale = kernels.unbend(h, dout, size, unit)
        return dh, again, sums, Narrow(values, scale)
    dh, again, sums = unbend(h, dout)
    scale = (size * unit * (SIGMAS / LARGEST)).clamp(min=1e-30)
    return dh, again, sums, Narrow((dh.float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale)


def turn(qkv: Float[Tensor, "B S three heads D"], cos: Float[Tensor, "S half"], sin: Float[Tensor, "S half"]) -> None:
    """Turn q and k in place, pairs (i, i + D/2) by their angles."""
    if (kernels := fast(qkv)) is not None:
        kernels.turn(qkv, cos, sin)
        return
    qkv[:, :, :2] = _turned(qkv[:, :, :2], cos, sin)


def unturn(dq: Float[Tensor, "B heads S D"], dk: Float[Tensor, "B heads S D"], dv: Float[Tensor, "B heads S D"],
           cos: Float[Tensor, "S half"], sin: Float[Tensor, "S half"]) -> Float[Tensor, "B S three heads D"]:
    """The gradients of what was turned, turned back, beside one another."""
    if (kernels := fast(dq)) is not None:
        return kernels.unturn(dq, dk, dv, cos, sin)
    together = torch.stack([dq, dk, dv], 0).permute(1, 3, 0, 2, 4)
    return torch.cat([_turned(together[:, :, :2], cos, -sin), together[:, :, 2:]], 2)


def unturn_narrow(dq: Float[Tensor, "B heads S D"], dk: Float[Tensor, "B heads S D"], dv: Float[Tensor, "B heads S D"],
                  cos: Tensor, sin: Tensor) -> tuple[Float[Tensor, "B S three heads D"], Narrow]:
    """`unturn`, and the rows of all positions in float8, too."""
    if (kernels := fast(dq)) is not None:
        out, values, scale = kernels.unturn(dq, dk, dv, cos, sin, narrow=True)
        return out, Narrow(values, scale)
    out = unturn(dq, dk, dv, cos, sin)
    return out, _narrowed(wide(out).flatten(2).flatten(0, 1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = wide(x).chunk(2, dim=-1)
    cos, sin = (t[:, None, None, :].to(left.dtype) for t in (cos, sin))
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)


def outer(left: Float[Tensor, "N a"], right: Float[Tensor, "N b"]) -> Float[Tensor, "a b"]:
    """left^T right, the gradient of a matrix: narrow products are summed and kept wide where the device can."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.T, right, out_dtype=torch.float32)
    return left.T @ right
