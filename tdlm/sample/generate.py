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

import torch
from jaxtyping import Int
from torch import Tensor

from ..model.model import Network, autocast
from ..process import Process
from ..rng import Draws
from ..tree.tree import Tree
from .draw import Choice, Frame, Sampled, fixed_tokens, invert
from .grid import times_for


@torch.no_grad()
def generate(model: Network, process: Process, tree: Tree, shape: tuple[int, int], *, steps: int, draws: Draws,
             prefix: Tensor | None = None, given: Tensor | None = None, shown: Tensor | None = None,
             per_level: Sequence[int] | None = None, times: Sequence[float] | None = None, choice: Choice = Choice(),  # noqa: B008 - frozen
             dtype: str = "float32", trace: bool = False, progress: Callable[[int, int], None] | None = None) -> Sampled:
    """Draw `shape` = (B, S) tokens.

    `prefix` (P,) or (B, P) are the first tokens; `given` (B, S) fixes any positions (-1: to be made); `shown` (B, S)
    marks given positions that stand as tokens at all times (PADs of a known length).
    """
    fixed = fixed_tokens(shape, prefix, given, tree.size, tree.ancestor.device)
    walk = _Walk(model, process, tree, fixed, shown, draws, choice, dtype)
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
