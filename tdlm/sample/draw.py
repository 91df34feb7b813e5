"""What all samplers share: how one outcome is chosen from a distribution, which tokens are given, what comes back."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import SampleError


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

    def probabilities(self, log_probs: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
        """Temperature, then min-p (at least this share of the best), then the smallest set that holds top-p; float64."""
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
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    slot = (uniform[:, None] * total >= cumulative).sum(-1)
    last = (probabilities > 0).long().mul(torch.arange(probabilities.shape[1], device=probabilities.device)).amax(-1)
    return torch.minimum(slot, last)


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
