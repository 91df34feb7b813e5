"""Overlapping levels: all rates are 1 / (1 - t), so in s = -log(1 - t) a position climbs as a Poisson chain.

    w_l = e^-s s^l / l!  for l < H,      w_H = P(Poisson(s) >= H),      weight in s:  w_l / w_{l+1}

Positions of several levels stand side by side at all times. For H = 2 this is the forward process of the hierarchical
baseline (gamma = 1, xi = 1). Per-level numbers of this process and of the cascade are not comparable; their sums are.

Drawing: t uniform is fine for H <= 2 (density e^-s in s). In deeper trees the weights explode (for a uniform predictor and
H = 3 a row's estimate scatters 7 times as much), so s is drawn from the mixture (1/H) sum_l Gamma(l+1, 1), whose density
is P(Poisson(s) < H) / H.

The reverse of a step from s_b to s_a < s_b is exact: from height h < H the new height is Binomial(h, s_a / s_b); the
root stays with w_H(a) / w_H(b), else it lands on h' < H with w_{h'}(a) P(Poisson(s_b - s_a) >= H - h') / w_H(b).

Near s = 0 both w_{H-1} and w_H leave float64 in a high tree, while their ratio is a number like any other. So nothing small is
divided: with M(n, s) = P(Poisson(s) >= n) / P(Poisson(s) = n) = 1 + s/(n+1) + s^2/((n+1)(n+2)) + ..., and d = s_b - s_a,

    w_{H-1} / w_H  =  H / (s M(H, s)),       root -> h' < H:  C(H, h') (a/b)^h' (d/b)^(H-h') M(H-h', d) / M(H, b).
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..registry import register
from .base import Moment


def _tail(count: int, s: Tensor) -> Tensor:
    """P(Poisson(s) >= count) as a tail (the regularised incomplete gamma function), never as 1 minus a sum."""
    if count <= 0:
        return torch.ones_like(s)
    tail = torch.special.gammainc(torch.full_like(s, float(count)), s)
    return torch.where(torch.isinf(s), torch.ones_like(s), tail)


def _density(count: int, s: Tensor) -> Tensor:
    """P(Poisson(s) = count) = s^count e^-s / count!."""
    value = torch.exp(torch.xlogy(torch.full_like(s, float(count)), s) - s - math.lgamma(count + 1))
    return torch.where(torch.isinf(s), torch.zeros_like(s), value)


def _beyond(count: Tensor, s: Tensor) -> Tensor:
    """M(count, s), count >= 1 and s finite: the series where its terms halve at least, else the quotient it stands for."""
    count, s = torch.broadcast_tensors(count, s)
    near, far = s.clamp(max=count / 2), s.clamp(min=count / 2)
    steps = torch.arange(1, 54, dtype=s.dtype, device=s.device)
    series = 1 + (near[..., None] / (count[..., None] + steps)).cumprod(-1).sum(-1)
    quotient = torch.special.gammainc(count, far) / torch.exp(count * far.log() - far - torch.lgamma(count + 1))
    return torch.where(s < count / 2, series, quotient)


@register("overlapping")
@dataclass(frozen=True)
class Overlapping:
    """All levels at once: the Poisson member of the family."""

    role = "process"
    knows_level = False

    def moment(self, u: Float[Tensor, "B"], height: int, clip: float | None = None) -> Moment:
        if height <= 2:
            s = -torch.log1p(-u)
            density = torch.exp(-s)
        else:
            s = self._mixture_quantile(u, height)
            density = torch.special.gammaincc(torch.full_like(s, float(height)), s) / height
        occupancy = self._in_s(s, height)
        ratio = torch.empty(len(u), height, dtype=torch.float64, device=u.device)
        for level in range(height - 1):
            ratio[:, level] = (level + 1) / s
        ratio[:, height - 1] = height / (s * _beyond(torch.full_like(s, float(height)), s))
        in_t = ratio * torch.exp(s)[:, None]  # lambda_l w_l / w_{l+1} with lambda_l = 1 / (1 - t)
        clipped = in_t if clip is None else in_t.clamp(max=clip)
        return Moment(time=-torch.expm1(-s), level=None, occupancy=occupancy, weight=ratio / density[:, None],
                      train_weight=clipped * (torch.exp(-s) / density)[:, None])

    @staticmethod
    def _mixture_quantile(u: Tensor, height: int) -> Tensor:
        """s with (1/H) sum_l P(Gamma(l+1) <= s) = u, by bisection in float64 (the batch is small). With N ~ Poisson(s) the sum
        is E min(N, H) = s P(N < H - 1) + H P(N >= H)."""
        low, high = torch.zeros_like(u), torch.full_like(u, 40.0 + 4.0 * height)
        for _ in range(64):
            middle = (low + high) / 2
            few = torch.special.gammaincc(torch.full_like(u, height - 1.0), middle)
            below = middle / height * few + _tail(height, middle) < u
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return ((low + high) / 2).clamp(min=torch.finfo(torch.float64).tiny)

    @staticmethod
    def _in_s(s: Tensor, height: int) -> Tensor:
        return torch.stack([_density(level, s) for level in range(height)] + [_tail(height, s)], dim=-1)

    def occupancy(self, t: Float[Tensor, "*batch"], height: int) -> Float[Tensor, "*batch heights"]:
        return self._in_s(-torch.log1p(-t), height)

    def level_at(self, later: float, height: int) -> int:
        return height - 1

    def clamp_height(self, later: float, height: int) -> int:
        return 0

    def segments(self, later: float, earlier: float, height: int) -> list[tuple[float, float]]:
        return [(later, earlier)]

    def arrivals(self, uniform: Float[Tensor, "*batch H"],
                 height: int) -> tuple[Float[Tensor, "*batch H"], Float[Tensor, "*batch H"]]:
        """In s the waits between jumps are Exp(1); s is the clock, since t = 1 - e^-s rounds to 1 from s = 37 on."""
        s = -uniform.log().cumsum(-1)
        return s, -torch.expm1(-s)

    def grid(self, steps: list[int], height: int) -> list[float]:
        count = sum(steps)
        return [1 - step / count for step in range(count)] + [0.0]

    def reverse(self, later: float, earlier: float, height: int) -> Float[Tensor, "heights heights"]:
        a, b = -torch.log1p(-torch.tensor([earlier, later], dtype=torch.float64))
        matrix = torch.zeros(height + 1, height + 1, dtype=torch.float64)
        stay = torch.zeros((), dtype=torch.float64) if torch.isinf(b) else a / b
        for h in range(height):
            for new in range(h + 1):
                matrix[h, new] = math.comb(h, new) * stay**new * (1 - stay) ** (h - new)
        if torch.isinf(b):  # everything is at the root, and goes where the levels are at a
            matrix[height] = self._in_s(a, height)
            return matrix
        count = torch.arange(height + 1, dtype=torch.float64)
        beyond, whole = _beyond(count[1:], b - a).flip(0), _beyond(count[height], b)  # of H - h' from h' = 0 on
        ways = torch.tensor([math.comb(height, new) for new in range(height)], dtype=torch.float64)
        matrix[height, :height] = ways * stay ** count[:height] * (1 - stay) ** (height - count[:height]) * beyond / whole
        matrix[height, height] = stay**height * torch.exp(b - a) * _beyond(count[height], a) / whole
        return matrix
