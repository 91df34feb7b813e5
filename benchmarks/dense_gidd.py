"""GIDD's step when every position is asked about: a rival for `benchmarks.sampling`, as fast as it can be made.

The head's logits (bfloat16, some positions at a time, the matrix padded to a round width) are read once: one kernel leaves the
sum of exponentials of every stretch of 256 tokens. Which stretch and which token in it is then a matter of few numbers.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tdlm.sample import Choice
from tdlm.sample.draw import _first_above
from tdlm.sample.flat import Looking, Plan, Posterior, _step, mixture

STRETCH, ALIGNED = 256, 4096
ROWS = 8192
"""Positions whose logits are made at a time: 0.8 GB."""


@dataclass(frozen=True)
class Everywhere(Posterior):
    """The rule of `Posterior` for whom every position may change."""

    def plan(self, free: Tensor) -> Plan:
        return Looking(free, lambda state: torch.ones(state.shape, dtype=torch.bool))

    def outcome(self, head: Any, hidden: Tensor, state: Tensor, uniform: Tensor, later: float, earlier: float,
                choice: Choice) -> Tensor:
        matrix, offset = padded(head)
        logits = torch.addmm(offset, hidden.to(matrix.dtype), matrix.T)
        size, step = self.process.size, _step(self.process, later, earlier)
        return mixture(size, state, uniform, step, *drawing(logits, state.clamp(max=size - 1)))


@functools.lru_cache(maxsize=1)
def padded(head: Any) -> tuple[Tensor, Tensor]:
    """The head's matrix and bias with rows that are never chosen behind the last token; narrow once for all steps."""
    weight, bias, classes = head.wide()
    classes = weight.shape[0] if classes is None else classes
    dtype = torch.bfloat16
    matrix = torch.zeros(-(-classes // ALIGNED) * ALIGNED, weight.shape[1], device=weight.device, dtype=dtype)
    matrix[:classes] = weight.detach()[:classes]
    offset = torch.full_like(matrix[:, 0], -torch.inf)
    offset[:classes] = 0 if bias is None else bias.detach()[:classes]
    return matrix, offset


def drawing(logits: Tensor, own: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The probability of `own`, and the token at a place (0, 1) of the cumulative distribution."""
    top, sums = stretches(logits)
    most = top.amax(1, keepdim=True)
    sums = sums.double() * (top - most).double().exp()
    cumulative = sums.cumsum(1)
    share = (logits.gather(1, own[:, None]).float() - most).double().exp()[:, 0] / cumulative[:, -1]

    def token(uniform: Tensor) -> Tensor:
        goal = uniform * cumulative[:, -1]
        stretch = _first_above(cumulative, goal, sums > 0)[:, None]
        goal = goal - (cumulative - sums).gather(1, stretch)[:, 0]
        place = stretch * STRETCH + torch.arange(STRETCH, device=logits.device)
        inside = (logits.gather(1, place).float() - most).double().exp()
        return place[:, 0] + _first_above(inside.cumsum(1), goal, inside > 0)

    return share, token


def stretches(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every stretch and the sum of exp(logit - largest)."""
    if not logits.is_cuda:
        parts = logits.float().unflatten(1, (-1, STRETCH))
        top = parts.amax(2)
        return top, torch.nan_to_num((parts - top[:, :, None]).exp()).sum(2)
    kernel = _kernel()
    top = torch.empty(len(logits), logits.shape[1] // STRETCH, device=logits.device)
    sums = torch.empty_like(top)
    kernel[(len(logits), logits.shape[1] // ALIGNED)](logits, top, sums, logits.shape[1], STRETCH=STRETCH,
                                                      COUNT=ALIGNED // STRETCH)
    return top, sums


@functools.cache
def _kernel() -> Any:
    from .dense_gidd_triton import stretch_sums

    return stretch_sums
