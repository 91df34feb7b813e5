"""Two overlapping levels, the lower one gamma times as fast: the forward process of the hierarchical baseline.

    lambda_0 = gamma / (1 - t)  (token -> cluster),     lambda_1 = 1 / (1 - t)  (cluster -> root)

In s = -log(1 - t) the waits are Exp(gamma) and Exp(1). With psi(s) = (1 - e^{-(gamma - 1) s}) / (gamma - 1), which is s
at gamma = 1,

    w_0 = e^{-gamma s},     w_1 = gamma e^{-s} psi(s),     w_2 = P(Exp(gamma) + Exp(1) <= s),
    weights in t:   lambda_0 w_0 / w_1 = e^{(2 - gamma) s} / psi(s),     lambda_1 w_1 / w_2 = gamma psi(s) / w_2.

At gamma = 1 this is the overlapping process on a tree of height 2. The original's mask weight lacks the 1 / (gamma - 1)
inside psi, which is right at gamma = 2 only, and floors w_1 and w_2 at 1e-4; here nothing is floored.

The reverse of a step from s_b to s_a < s_b is Bayes' rule on the chain: with d = s_b - s_a

    stay at a cluster  psi(a) / psi(b);       root -> root  w_2(a) / w_2(b),
    root -> cluster  w_1(a) (1 - e^-d) / w_2(b),       root -> token  w_0(a) w_2(d) / w_2(b).

`step="marginal"` is the original's step instead: root -> cluster with 1 - w_2(a) / w_2(b), cluster -> token with
min(1, (w_0(a) - w_0(b)) / w_1(b)). It keeps the marginals, one level a step; it is not the chain's reverse, to which it
agrees to first order in the step. (What still hides at t = 0 goes down all the way in the last step.)
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ConfigError
from ..registry import register
from .base import Moment

FAR = 700.0
"""Stands for s = infinity: beyond it e^-s leaves float64, and products with it would be 0 x infinity."""


def _psi(s: Tensor, gamma: float) -> Tensor:
    return s if gamma == 1 else -torch.expm1(-(gamma - 1) * s) / (gamma - 1)


def _both(s: Tensor, gamma: float) -> Tensor:
    """P(Exp(gamma) + Exp(1) <= s) = (gamma (1 - e^-s) - (1 - e^{-gamma s})) / (gamma - 1), without cancellation.

    With f(x) = (1 - e^-x) / x it is -gamma s^2 times the difference quotient of f between s and gamma s. Where the two
    are near one another that is the mean of -f'(x) = P(Gamma(2, 1) <= x) / x^2 between them, by three Gauss points.
    """
    span = (gamma - 1) * s
    mean = torch.zeros_like(s)
    for place, share in ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18)):
        x = (s + place * span).clamp(min=torch.finfo(s.dtype).tiny)
        mean = mean + share * torch.special.gammainc(torch.full_like(x, 2.0), x) * (s / x) ** 2
    if gamma == 1:
        return mean
    apart = (torch.expm1(-gamma * s) - gamma * torch.expm1(-s)) / (gamma - 1)
    return torch.where(span.abs() < 0.1, gamma * mean, apart)


@register("hierarchical")
@dataclass(frozen=True)
class Hierarchical:
    """Token, cluster, root: for trees of height 2."""

    gamma: float = 1.0
    step: Literal["exact", "marginal"] = "exact"
    role = "process"
    knows_level = False

    def __post_init__(self) -> None:
        if not (self.gamma > 0 and math.isfinite(self.gamma)):
            raise ConfigError(f"hierarchical.gamma must be positive, got {self.gamma}")

    def _in_s(self, s: Tensor, height: int) -> Tensor:
        if height != 2:
            raise ConfigError(f"the hierarchical process needs a tree of height 2, got {height}; build one with "
                              "tdlm tree build --height 2, or take process=overlapping")
        s = s.clamp(max=FAR)
        return torch.stack([torch.exp(-self.gamma * s), self.gamma * torch.exp(-s) * _psi(s, self.gamma),
                            _both(s, self.gamma)], dim=-1)

    def moment(self, u: Float[Tensor, "B"], height: int, clip: float | None = None) -> Moment:
        """t uniform."""
        s = -torch.log1p(-u)
        occupancy, psi = self._in_s(s, height), _psi(s, self.gamma)
        weight = torch.stack([torch.exp((2 - self.gamma) * s) / psi, self.gamma * psi / occupancy[:, 2]], 1)
        return Moment(time=u, level=None, occupancy=occupancy, weight=weight,
                      train_weight=weight if clip is None else weight.clamp(max=clip))

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
        waits = -uniform.log() / torch.tensor([self.gamma, 1.0], dtype=uniform.dtype, device=uniform.device)
        s = waits.cumsum(-1)
        return s, -torch.expm1(-s)

    def grid(self, steps: list[int], height: int) -> list[float]:
        count = sum(steps)
        return [1 - step / count for step in range(count)] + [0.0]

    def reverse(self, later: float, earlier: float, height: int) -> Float[Tensor, "heights heights"]:
        a, b = times = -torch.log1p(-torch.tensor([earlier, later], dtype=torch.float64))
        before, after = self._in_s(times, height)
        matrix = torch.zeros(3, 3, dtype=torch.float64)
        matrix[0, 0] = 1
        if self.step == "marginal":
            matrix[1, 0] = ((before[0] - after[0]) / after[1]).clamp(max=1)
            matrix[2, 2] = before[2] / after[2]
            matrix[2, 0 if earlier == 0 else 1] = 1 - matrix[2, 2]
        else:
            matrix[1, 0] = 1 - _psi(a, self.gamma) / _psi(b, self.gamma)
            matrix[2] = before * torch.stack([_both((b - a).clamp(max=FAR), self.gamma), -torch.expm1(a - b),
                                              torch.ones_like(a)]) / after[2]
        matrix[1, 1] = 1 - matrix[1, 0]
        return matrix
