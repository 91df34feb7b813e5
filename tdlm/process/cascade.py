"""The paper's process: one level at a time.

Level l is the interval [t_l, t_{l+1}] (default t_l = l/H). With local time u = (t - t_l) / (t_{l+1} - t_l)

    q(z_t = ancestor[l, x]) = alpha(u),      q(z_t = ancestor[l+1, x]) = 1 - alpha(u),

and with s <= t in one level a position stays in the child state with alpha_t / alpha_s, else it moves to the parent,
which absorbs. The weight is -alpha'(u) / (1 - alpha(u)) in *local* time; with t drawn over all levels it is divided
by t_{l+1} - t_l, which is what the derivative in global time amounts to. (Printed with both a mean over the
sub-interval and the global derivative, as in the paper, level l would be over-counted by 1 / (t_{l+1} - t_l).)
"""
from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import ConfigError
from ..registry import register
from .base import Moment
from .schedule import Linear, Schedule


@register("cascade")
@dataclass(frozen=True)
class Cascade:
    """Levels one after another; `thresholds` (t_1 .. t_{H-1}) may shift time between them."""

    alpha: Schedule = field(default_factory=Linear)
    thresholds: tuple[float, ...] | None = None
    role = "process"
    knows_level = True

    def __post_init__(self) -> None:
        if isinstance(self.thresholds, list):  # from Python: a value that is looked up by itself must not change
            object.__setattr__(self, "thresholds", tuple(self.thresholds))
        inner = (0.0, *(self.thresholds or ()), 1.0)
        if any(a >= b for a, b in zip(inner, inner[1:])):
            raise ConfigError(f"cascade.thresholds must rise strictly inside (0, 1), got {self.thresholds}")

    def edges(self, height: int) -> list[float]:
        """t_0 = 0 .. t_H = 1."""
        if self.thresholds is None:
            return [level / height for level in range(height)] + [1.0]
        if len(self.thresholds) != height - 1:
            raise ConfigError(f"cascade.thresholds needs {height - 1} values for a tree of height {height}, "
                              f"got {len(self.thresholds)}")
        return [0.0, *self.thresholds, 1.0]

    def moment(self, u: Float[Tensor, "B"], height: int, clip: float | None = None) -> Moment:
        edges = _on(self, height, u.device)
        level = torch.searchsorted(edges[1:-1], u, right=True)
        span = edges[level + 1] - edges[level]
        local = ((u - edges[level]) / span).clamp(0, 1)
        moved = self.alpha.moved(local)
        weight = self.alpha.rate(local) / moved
        column = level[:, None]
        empty = torch.zeros(len(u), height, dtype=torch.float64, device=u.device)
        clipped = weight if clip is None else weight.clamp(max=clip)
        return Moment(time=u, level=level, occupancy=self._two(level, moved, height),
                      weight=empty.scatter(1, column, (weight / span)[:, None]),
                      train_weight=empty.scatter(1, column, (clipped / span)[:, None]))

    @staticmethod
    def _two(level: Tensor, moved: Tensor, height: int) -> Tensor:
        occupancy = torch.zeros(*level.shape, height + 1, dtype=torch.float64, device=level.device)
        occupancy.scatter_(-1, level[..., None], (1 - moved)[..., None])
        return occupancy.scatter_(-1, level[..., None] + 1, moved[..., None])

    def occupancy(self, t: Float[Tensor, "*batch"], height: int) -> Float[Tensor, "*batch heights"]:
        edges = _on(self, height, t.device)
        level = torch.searchsorted(edges[1:-1], t.contiguous(), right=True)
        local = ((t - edges[level]) / (edges[level + 1] - edges[level])).clamp(0, 1)
        return self._two(level, self.alpha.moved(local), height)

    def level_at(self, later: float, height: int) -> int:
        return max(0, bisect.bisect_left(self.edges(height), later) - 1)

    def clamp_height(self, later: float, height: int) -> int:
        return self.level_at(later, height)

    def arrivals(self, uniform: Float[Tensor, "*batch H"],
                 height: int) -> tuple[Float[Tensor, "*batch H"], Float[Tensor, "*batch H"]]:
        """t_l + (t_{l+1} - t_l) u with u the inverse of 1 - alpha, the distribution function of the jump."""
        edges = _on(self, height, uniform.device)
        time = edges[:-1] + (edges[1:] - edges[:-1]) * self.alpha.inverse(uniform)
        return time, time

    def reverse(self, later: float, earlier: float, height: int) -> Float[Tensor, "heights heights"]:
        """From the parent state of the level to the child state with (alpha_s - alpha_t) / (1 - alpha_t).

        Written with 1 - alpha: 1 - moved_s / moved_t. A segment that ends at its level's threshold moves everything.
        """
        level = self.level_at(later, height)
        edges = self.edges(height)
        assert edges[level] <= earlier <= later <= edges[level + 1], "a segment lies within one level"
        local = (torch.tensor([earlier, later], dtype=torch.float64) - edges[level]) / (edges[level + 1] - edges[level])
        moved_s, moved_t = self.alpha.moved(local)
        stay = moved_s / moved_t
        matrix = torch.eye(height + 1, dtype=torch.float64)
        matrix[level + 1, level + 1], matrix[level + 1, level] = stay, 1 - stay
        return matrix

    def segments(self, later: float, earlier: float, height: int) -> list[tuple[float, float]]:
        inner = [edge for edge in reversed(self.edges(height)) if earlier < edge < later]
        points = [later, *inner, earlier]
        return list(zip(points, points[1:]))

    def grid(self, steps: list[int], height: int) -> list[float]:
        edges = self.edges(height)
        times = [1.0]
        for level in range(height - 1, -1, -1):
            low, high, count = edges[level], edges[level + 1], steps[level]
            times += [low + (high - low) * (j / count) for j in range(count - 1, 0, -1)] + [low]
        return times


@functools.lru_cache(maxsize=64)
def _on(process: Cascade, height: int, device: torch.device) -> Tensor:
    """The thresholds on a device, copied once: a step that copies a few numbers waits for everything before it."""
    return torch.tensor(process.edges(height), dtype=torch.float64, device=device)
