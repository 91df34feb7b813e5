"""What all samplers share: how one outcome is chosen from a distribution, which tokens are given, what comes back.

Samplers decide on the processor, on numbers drawn there, whatever does not need the network (who falls, who stays), and send
the device lists of places: the processor never waits for the device and is always ahead of it.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import SampleError
from ..rng import Draws

LIMIT = 2**25
"""Entries of one table of distributions; more positions are asked for in parts."""
WIDE = 4096
"""From so many outcomes on a plain distribution keeps the network's precision, and only its sums are float64."""
STRETCH = 256
"""Outcomes that are summed up first when a wide distribution is inverted."""


@dataclass(frozen=True)
class Choice:
    """How a child is chosen from the predicted distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise SampleError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise SampleError(f"top-p must lie in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise SampleError(f"min-p must lie in [0, 1], got {self.min_p}")

    @property
    def plain(self) -> bool:
        """Whether the distribution stays as it is."""
        return self == Choice()

    def probabilities(self, log_probs: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
        """Temperature, then min-p (at least this share of the best), then the smallest set that holds top-p; float64, unless
        there is nothing to do to a wide row. Raw logits will do as well."""
        if self.plain and log_probs.shape[1] >= WIDE:
            return log_probs.softmax(-1)
        log_probs = log_probs.double()
        if self.temperature == 0:
            return torch.nn.functional.one_hot(log_probs.argmax(-1), log_probs.shape[-1]).double()
        p = (log_probs / self.temperature).softmax(-1)
        if self.min_p:
            p = p.where(p >= self.min_p * p.amax(-1, keepdim=True), 0.0)
            p = p / p.sum(-1, keepdim=True)
        if self.top_p < 1:
            ordered, order = torch.sort(p, dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            p = torch.zeros_like(p).scatter(-1, order, ordered.where(before < self.top_p, 0.0))
            p = p / p.sum(-1, keepdim=True)
        return p


@dataclass(frozen=True)
class Frame:
    """One moment of the first sequence's way down: for display."""

    time: float
    evaluations: int
    heights: list[int]
    nodes: list[int]


class Film:
    """Frames at the start and after every step that moved the first sequence, which need not be in step with the others."""

    def __init__(self, frame: Callable[[float], Frame], grid: Sequence[float], wanted: bool):
        self.frame, self.grid, self.frames = frame, grid, [frame(1.0)] if wanted else []
        self.step: int | None = None

    def begins(self, step: int | None) -> None:
        """The first sequence is about to move in this step (none: it does not move now)."""
        if step is not None and step != self.step:
            self.ends()
            self.step = step

    def ends(self) -> None:
        if self.frames and self.step is not None:
            now, last = self.frame(self.grid[self.step + 1]), self.frames[-1]
            if (now.heights, now.nodes) != (last.heights, last.nodes):
                self.frames.append(now)


@dataclass(frozen=True)
class Sampled:
    tokens: Int[Tensor, "B S"]
    evaluations: Int[Tensor, "B"]
    """Network evaluations each sequence took."""
    calls: int
    """Batched calls of the network."""
    steps: int
    frames: list[Frame] = field(default_factory=list)
    together: Int[Tensor, "B"] | None = None
    """The most choices that were made independently of one another from a single evaluation, by sequence: where it is 1,
    every choice was made with all earlier ones in sight."""


def invert(probabilities: Float[Tensor, "M K"], uniform: Float[Tensor, "M"]) -> Int[Tensor, "M"]:
    """The child whose stretch of the cumulative distribution holds `uniform`; rounding never picks an impossible one."""
    if probabilities.shape[1] >= WIDE:
        return _invert_wide(probabilities, uniform)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    return _first_above(cumulative, uniform * cumulative[:, -1], probabilities > 0)


def _first_above(cumulative: Float[Tensor, "M n"], goal: Float[Tensor, "M"], possible: Tensor) -> Int[Tensor, "M"]:
    slot = (goal[:, None] >= cumulative).sum(-1)
    last = possible.long().mul(torch.arange(possible.shape[1], device=possible.device)).amax(-1)
    return torch.minimum(slot, last)


def _invert_wide(p: Float[Tensor, "M V"], uniform: Float[Tensor, "M"]) -> Int[Tensor, "M"]:
    """First which stretch, from the sums of all stretches, then which outcome in it: one pass over `p`."""
    whole = p.shape[1] // STRETCH * STRETCH
    sums = p[:, :whole].unflatten(1, (-1, STRETCH)).sum(-1, dtype=torch.float64)
    if whole < p.shape[1]:
        sums = torch.cat([sums, p[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], 1)
    cumulative = sums.cumsum(-1)
    goal = uniform * cumulative[:, -1]
    stretch = _first_above(cumulative, goal, sums > 0)[:, None]
    goal = goal - (cumulative - sums).gather(1, stretch)[:, 0]
    place = stretch * STRETCH + torch.arange(STRETCH, device=p.device)
    inside = p.gather(1, place.clamp(max=p.shape[1] - 1)).double().masked_fill(place >= p.shape[1], 0)
    return place[:, 0] + _first_above(inside.cumsum(-1), goal, inside > 0)


def in_parts(act: Callable[[slice], Tensor], count: int, width: int) -> Tensor:
    """`act` on some of `count` rows at a time, so that a table over `width` outcomes has at most LIMIT entries."""
    rows = max(1, LIMIT // width)
    return act(slice(0, count)) if count <= rows else torch.cat([act(slice(i, i + rows)) for i in range(0, count, rows)])


def at_home(draws: Draws) -> Draws:
    """The same numbers, on the processor."""
    return Draws(*draws.parts, draws.rows.cpu(), draws.total)


def fixed_tokens(shape: tuple[int, int], prefix: Tensor | None, given: Tensor | None, size: int,
                 device: torch.device) -> Int[Tensor, "B S"]:
    """The tokens that are given (B, S), -1 where text is to be made."""
    fixed = torch.full(shape, -1, dtype=torch.int64, device=device) if given is None else given.to(device).clone()
    if fixed.shape != shape:
        raise SampleError(f"given tokens must have the shape {shape} of the samples, got {tuple(fixed.shape)}")
    if prefix is not None:
        prefix = prefix.to(device).expand(shape[0], -1) if prefix.dim() == 1 else prefix.to(device)
        if prefix.shape[1] > shape[1]:
            raise SampleError(f"the prompt has {prefix.shape[1]} tokens, more than the length {shape[1]}; "
                              "shorten it or ask for a longer --length")
        fixed[:, : prefix.shape[1]] = prefix
    if bool((fixed >= size).any()):
        raise SampleError(f"given token {int(fixed.max())} lies outside the vocabulary 0..{size - 1}")
    return fixed
