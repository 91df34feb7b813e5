"""What every process on a tree has in common.

A position climbs from its leaf (height 0) to the root (height H) as a pure-birth chain with rate lambda_l(t) from height
l to l+1; w_h(t) is the probability to be at height h, its *occupancy*. For any such process

    -log p(x) <= sum_i sum_l Int dt lambda_l(t) w_l(t) E[ CE_{i,l} | z_i at height l+1, the others ~ q_t ],

so a draw of t is scored by the weight lambda_l w_l / w_{l+1} at each position that is active at height l+1, divided by
the density of t. Heights of positions are independent given t, and one t serves a whole sequence.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..rng import sent


@dataclass(frozen=True)
class Moment:
    """A time drawn for each sequence of a batch, with everything that the loss and the network need of it."""

    time: Float[Tensor, "B"]
    """t in [0, 1]: what a time-conditioned network is told."""
    level: Int[Tensor, "B"] | None
    """The level a sequence is in; None where positions of several levels stand side by side."""
    occupancy: Float[Tensor, "B heights"]
    weight: Float[Tensor, "B H"]
    """lambda_l w_l / w_{l+1} over the density of the draw: the bound's weight of a position active at height l+1."""
    train_weight: Float[Tensor, "B H"]
    """The same with clipping: only for the gradient."""

    def to(self, device: torch.device) -> Moment:
        level = None if self.level is None else sent(self.level, device)
        return Moment(sent(self.time, device), level, sent(self.occupancy, device), sent(self.weight, device),
                      sent(self.train_weight, device))


@runtime_checkable
class Process(Protocol):
    """One member of the family. Times t run from 0 (data) to 1 (all root); H is passed in, so a process is a value."""

    role = "process"
    knows_level: bool
    """Whether a sequence is in one level at a time, so that a network can be told the level."""

    def moment(self, u: Float[Tensor, "B"], height: int, clip: float | None = None) -> Moment:
        """Turn uniforms into times: u stratified over a batch gives stratified times."""
        ...

    def occupancy(self, t: Float[Tensor, "*batch"], height: int) -> Float[Tensor, "*batch heights"]:
        """w_0(t) .. w_H(t)."""
        ...

    def reverse(self, later: float, earlier: float, height: int) -> Float[Tensor, "heights heights"]:
        """P(height at `earlier` = column | height at `later` = row), within one segment."""
        ...

    def segments(self, later: float, earlier: float, height: int) -> list[tuple[float, float]]:
        """The step cut at the times where the network must be asked again (level thresholds)."""
        ...

    def grid(self, steps: list[int], height: int) -> list[float]:
        """Times from 1 down to 0 with steps[l] steps in level l (a process without levels takes their sum)."""
        ...

    def level_at(self, later: float, height: int) -> int:
        """The level of a segment that begins at `later`; without levels the top one."""
        ...

    def clamp_height(self, later: float, height: int) -> int:
        """The lowest height a position can show in a segment that begins at `later`: where given tokens stand."""
        ...

    def arrivals(self, uniform: Float[Tensor, "*batch H"],
                 height: int) -> tuple[Float[Tensor, "*batch H"], Float[Tensor, "*batch H"]]:
        """When a position climbs from height l to l+1, for l = 0..H-1, from uniforms of its own: a clock and the time t.

        The clock rises with t and orders jumps even where float64 rounds different t to the same number (t -> 1).
        """
        ...


def draw_heights(probabilities: Float[Tensor, "B heights"], uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """Heights by inversion of the cumulative distribution of each row; the last non-zero height takes the rounding."""
    cumulative = probabilities.cumsum(-1)
    last = (probabilities.shape[-1] - 1) - probabilities.flip(-1).gt(0).to(torch.int8).argmax(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative, uniform, right=True), last)


def corrupt(moment: Moment, uniform: Float[Tensor, "B S"]) -> Int[Tensor, "B S"]:
    """The height of every position at its sequence's time."""
    return draw_heights(moment.occupancy, uniform)
