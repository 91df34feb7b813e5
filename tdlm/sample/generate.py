"""Ancestral sampling down the tree, with prompts, infilling and a trace for display.

A step from t to s first draws where every position will stand (its height at s, exactly, from the process: this does
not depend on the network) and then descends one level at a time, asking the network which child only for sequences in
which some position has a choice to make. So N steps are at most N evaluations when no step crosses a level threshold,
a step across m thresholds is m + 1, and steps in which nothing moves are free; evaluations are counted per sequence.

Draws are float64 inversions of the cumulative distribution over at most K children, and a pure function of (seed, sample
number, step), so a sample does not depend on the batch it was drawn in.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..model.model import Network
from ..process import Process
from ..rng import Draws
from ..tree.tree import Tree
from .draw import Choice, Sampled, at_home, fixed_tokens
from .grid import times_for
from .walk import Reader, Walk


@torch.no_grad()
def generate(model: Network, process: Process, tree: Tree, shape: tuple[int, int], *, steps: int, draws: Draws,
             prefix: Tensor | None = None, given: Tensor | None = None, shown: Tensor | None = None,
             per_level: Sequence[int] | None = None, times: Sequence[float] | None = None, choice: Choice = Choice(),  # noqa: B008 - frozen
             dtype: str = "float32", trace: bool = False, progress: Callable[[int, int], None] | None = None,
             reader: Reader | None = None) -> Sampled:
    """Draw `shape` = (B, S) tokens.

    `prefix` (P,) or (B, P) are the first tokens; `given` (B, S) fixes any positions (-1: to be made); `shown` (B, S)
    marks given positions that stand as tokens at all times (PADs of a known length).
    """
    fixed = fixed_tokens(shape, prefix, given, tree.size, torch.device("cpu"))
    walk, draws = Walk(model, process, tree, fixed, shown, choice, dtype, reader), at_home(draws)
    grid = times_for(process, tree.height, steps, per_level, times)
    walk.clamp(process.clamp_height(1.0, tree.height))
    frames, asked = [walk.frame(1.0)] if trace else [], 0
    with walk.autocast():
        for number, (later, earlier) in enumerate(zip(grid, grid[1:])):
            moved = False
            for high, low in process.segments(later, earlier, tree.height):
                moved = _descend(walk, draws, high, low, f"{number} {asked}") or moved
                asked += 1
            if trace and moved:
                frames.append(walk.frame(earlier))
            if progress is not None:
                progress(number + 1, len(grid) - 1)
    return Sampled(walk.finish(), walk.evaluations, walk.calls, len(grid) - 1, frames, walk.together)


def _descend(walk: Walk, draws: Draws, later: float, earlier: float, tag: str) -> bool:
    """One segment: draw all targets, then go down level by level until everybody has arrived."""
    process, H, (B, U) = walk.process, walk.tree.height, walk.heights.shape
    walk.clamp(process.clamp_height(later, H))
    target = _targets(process.reverse(later, earlier, H), walk.heights, draws.uniform(f"height {tag}", U))
    target = torch.where(walk.moving, target, walk.heights)
    time = torch.full((B,), later, dtype=torch.float64)
    level = torch.full((B,), process.level_at(later, H))
    rounds = 0
    while bool((going := walk.heights > target).any()):
        walk.step(going, draws.uniform(f"child {tag} {rounds}", U), time, level)
        rounds += 1
    return rounds > 0


def _targets(kernel: Float[Tensor, "heights heights"], heights: Int[Tensor, "B U"],
             uniform: Float[Tensor, "B U"]) -> Int[Tensor, "B U"]:
    """Where everybody stands after the step: the inverse of the cumulative kernel, for the heights that can be left."""
    target = heights
    for height, reach in enumerate(kernel.cumsum(-1).tolist()):
        if any(edge > 0 for edge in reach[:height]):
            passed = torch.stack([uniform >= edge for edge in reach[:height]]).sum(0)
            target = torch.where(heights == height, passed, target)
    return target
