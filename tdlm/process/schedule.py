"""alpha(u): the probability that a position is still in the child state at local time u of its level.

alpha falls from alpha(0) = 1 to alpha(1) = 0. Each schedule states 1 - alpha and -alpha' in closed form without
cancellation, because the bound's weight is -alpha' / (1 - alpha) and 1 - alpha is small where the weight is large.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ConfigError
from ..registry import register

STEEPEST = 16.0
"""The least local time that is drawn, 1e-19 in a batch of a thousand, to this power is still a number."""


@runtime_checkable
class Schedule(Protocol):
    def moved(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """1 - alpha(u), the probability of the parent state."""
        ...

    def rate(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """-alpha'(u)."""
        ...

    def inverse(self, moved: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """The u with 1 - alpha(u) = moved."""
        ...


@register("linear")
@dataclass(frozen=True)
class Linear:
    """alpha = 1 - u."""

    role = "schedule"

    def moved(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return u

    def rate(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return torch.ones_like(u)

    def inverse(self, moved: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return moved


@register("cosine")
@dataclass(frozen=True)
class Cosine:
    """alpha = 1 - sin(pi u / 2): few positions are left unmoved for long, so early (coarse) choices get more steps."""

    role = "schedule"

    def moved(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return torch.sin(u * (math.pi / 2))

    def rate(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return (math.pi / 2) * torch.sin((1 - u) * (math.pi / 2))

    def inverse(self, moved: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return torch.asin(moved) * (2 / math.pi)


@register("polynomial")
@dataclass(frozen=True)
class Polynomial:
    """alpha = 1 - u^power."""

    power: float = 2.0
    role = "schedule"

    def __post_init__(self) -> None:
        if not 0 < self.power <= STEEPEST:
            raise ConfigError(f"polynomial.power must lie in (0, {STEEPEST:g}], got {self.power}: above, 1 - alpha "
                              "underflows early in a level")

    def moved(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return u**self.power

    def rate(self, u: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return self.power * u ** (self.power - 1)

    def inverse(self, moved: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return moved ** (1 / self.power)
