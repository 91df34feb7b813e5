"""Ancestral sampling down the tree, with prompts, infilling and a trace for display.

A step from t to s first draws where every position will stand (its height at s, exactly, from the process: this does
not depend on the network) and then descends one level at a time, asking the network which child only for sequences in
which some position has a choice to make. So N steps are at most N evaluations when no step crosses a level threshold,
a step across m thresholds is m + 1, and steps in which nothing moves are free; evaluations are counted per sequence.

Given tokens (a prompt, the surroundings of a gap) stand at their ancestors: at the height that a position which has
already moved would show. Draws are float64 inversions of the cumulative distribution over at most K children, and a
pure function of (seed, sample number, step), so a sample does not depend on the batch it was drawn in.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import SampleError
from ..model.model import Network, autocast
from ..process import Process
from ..rng import Draws
from ..tree.tree import Tree
from .grid import times_for


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


def invert(probabilities: Float[Tensor, "M K"], uniform: Float[Tensor, "M"]) -> Int[Tensor, "M"]:
    """The child whose stretch of the cumulative distribution holds `uniform`; rounding never picks an impossible one."""
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1:]
    slot = (uniform[:, None] * total >= cumulative).sum(-1)
    last = (probabilities > 0).long().mul(torch.arange(probabilities.shape[1], device=probabilities.device)).amax(-1)
    return torch.minimum(slot, last)


@torch.no_grad()
def generate(model: Network, process: Process, tree: Tree, shape: tuple[int, int], *, steps: int, draws: Draws,
             prefix: Tensor | None = None, given: Tensor | None = None, shown: Tensor | None = None,
             per_level: Sequence[int] | None = None, times: Sequence[float] | None = None, choice: Choice = Choice(),
             dtype: str = "float32", trace: bool = False, progress: Callable[[int, int], None] | None = None) -> Sampled:
    """Draw `shape` = (B, S) tokens.

    `prefix` (P,) or (B, P) are the first tokens; `given` (B, S) fixes any positions (-1: to be made); `shown` (B, S)
    marks given positions that stand as tokens at all times (PADs of a known length).
    """
    walk = _Walk(model, process, tree, _given(shape, prefix, given, tree), shown, draws, choice, dtype)
    grid = times_for(process, tree.height, steps, per_level, times)
    frames = [walk.frame(1.0)] if trace else []
    for number, (later, earlier) in enumerate(zip(grid, grid[1:])):
        moved = False
        for high, low in process.segments(later, earlier, tree.height):
            moved = walk.descend(high, low, number) or moved
        if trace and moved:
            frames.append(walk.frame(earlier))
        if progress is not None:
            progress(number + 1, len(grid) - 1)
    return Sampled(walk.finish(), walk.evaluations, walk.calls, len(grid) - 1, frames)


def _given(shape: tuple[int, int], prefix: Tensor | None, given: Tensor | None, tree: Tree) -> Int[Tensor, "B S"]:
    device = tree.ancestor.device
    fixed = torch.full(shape, -1, dtype=torch.int64, device=device) if given is None else given.to(device).clone()
    if fixed.shape != shape:
        raise SampleError(f"given tokens must have the shape {shape} of the samples, got {tuple(fixed.shape)}")
    if prefix is not None:
        prefix = prefix.to(device).expand(shape[0], -1) if prefix.dim() == 1 else prefix.to(device)
        if prefix.shape[1] > shape[1]:
            raise SampleError(f"the prompt has {prefix.shape[1]} tokens, more than the length {shape[1]}; "
                              "shorten it or ask for a longer --length")
        fixed[:, : prefix.shape[1]] = prefix
    if bool((fixed >= tree.size).any()):
        raise SampleError(f"given token {int(fixed.max())} lies outside the vocabulary 0..{tree.size - 1}")
    return fixed


class _Walk:
    """The state of a batch on its way down."""

    def __init__(self, model: Network, process: Process, tree: Tree, given: Tensor, shown: Tensor | None, draws: Draws,
                 choice: Choice, dtype: str):
        self.model, self.process, self.tree, self.draws, self.choice, self.dtype = model, process, tree, draws, choice, dtype
        self.fixed, self.given = given >= 0, given.clamp(min=0)
        self.shown = torch.zeros_like(self.fixed) if shown is None else shown.to(given.device) & self.fixed
        self.heights = torch.full_like(given, tree.height)
        self.nodes = torch.full_like(given, tree.root)
        self.evaluations = torch.zeros(len(given), dtype=torch.int64, device=given.device)
        self.calls = self.asked = 0
        self._clamp(process.clamp_height(1.0, tree.height))

    def _clamp(self, height: int) -> None:
        level = torch.where(self.shown, 0, height)
        self.heights = torch.where(self.fixed, level, self.heights)
        self.nodes = torch.where(self.fixed, self.tree.ancestor[level, self.given], self.nodes)

    def descend(self, later: float, earlier: float, step: int) -> bool:
        """One segment: draw all targets, then go down level by level until everybody has arrived."""
        H, S = self.tree.height, self.nodes.shape[1]
        self._clamp(self.process.clamp_height(later, H))
        kernel = self.process.reverse(later, earlier, H).to(self.nodes.device)
        uniform = self.draws.uniform(f"height {step} {self.asked}", S)
        target = (uniform[..., None] >= kernel.cumsum(-1)[self.heights]).sum(-1)
        target = torch.where(self.fixed, self.heights, torch.minimum(target, self.heights))
        rounds = 0
        while bool((going := self.heights > target).any()):
            slot = self._choose(going, later, f"child {step} {self.asked} {rounds}")
            inner = (self.nodes - self.tree.size).clamp(min=0)
            below = self.tree.children[inner, slot]
            self.nodes = torch.where(going & (self.nodes >= self.tree.size), below, self.nodes)
            self.heights = self.heights - going.long()
            rounds += 1
        self.asked += 1
        return rounds > 0

    def _choose(self, going: Tensor, time: float, tag: str) -> Int[Tensor, "B S"]:
        """The slot of the child for every moving position; only sequences with a real choice reach the network."""
        slot = torch.zeros_like(self.nodes)
        need = going & (self.tree.num_children[self.nodes] > 1)
        rows = need.any(1).nonzero()[:, 0]
        if not len(rows):
            return slot
        row, column = need[rows].nonzero(as_tuple=True)
        nodes = self.nodes[rows]
        when = torch.full((len(rows),), time, dtype=torch.float64, device=nodes.device)
        level = torch.full((len(rows),), self.process.level_at(time, self.tree.height), device=nodes.device)
        with autocast(nodes.device, self.dtype):
            hidden = self.model.hidden(nodes, when, level)
            log_probs = self.model.head.log_probs(hidden[row, column], nodes[row, column])
        uniform = self.draws.uniform(tag, self.nodes.shape[1])[rows][row, column]
        slot[rows[row], column] = invert(self.choice.probabilities(log_probs), uniform)
        self.evaluations[rows] += 1
        self.calls += 1
        return slot

    def frame(self, time: float) -> Frame:
        return Frame(time, int(self.evaluations[0]), self.heights[0].tolist(), self.nodes[0].tolist())

    def finish(self) -> Int[Tensor, "B S"]:
        self._clamp(0)
        assert bool((self.heights == 0).all()), "the grid ends at t = 0, where every position is a token"
        return self.nodes
