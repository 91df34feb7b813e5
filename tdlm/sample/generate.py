"""Ancestral sampling down the tree, with prompts, infilling and a trace for display.

A step from t to s first draws where every position will stand (its height at s, exactly, from the process: this does
not depend on the network) and then descends one level at a time, asking the network which child only for sequences in
which some position has a choice to make. So N steps are at most N evaluations when no step crosses a level threshold,
a step across m thresholds is m + 1, and steps in which nothing moves are free; evaluations are counted per sequence.

Who falls when does not depend on the network: where it is known beforehand which falls it is asked about, all sequences proceed
at their own pace, in full batches (`plan.py`); else they go step by step together.

Draws are float64 inversions of the cumulative distribution over at most K children, and a pure function of (seed, sample
number, step), so a sample does not depend on the batch it was drawn in.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..model.model import Network
from ..process import Process
from ..rng import Draws
from ..tree.tree import Tree
from .draw import Choice, Frame, Sampled, at_home, fixed_tokens
from .grid import times_for
from .plan import Plan, Segment, segments, targets
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
    parts, told = segments(process, grid, tree.height), progress or (lambda done, total: None)
    walk.clamp(process.clamp_height(1.0, tree.height))
    frames = [walk.frame(1.0)] if trace else []
    with walk.autocast():
        if walk.foreseen:
            _each_by_itself(walk, parts, grid, draws, frames, told)
        else:
            _together(walk, parts, grid, draws, frames, told)
    return Sampled(walk.finish(), walk.evaluations, walk.calls, len(grid) - 1, frames, walk.together)


def _each_by_itself(walk: Walk, parts: list[Segment], grid: Sequence[float], draws: Draws, frames: list[Frame],
                    told: Callable[[int, int], None]) -> None:
    """Round after round. Frames show the first sequence after every step that moved it."""
    assert walk.choices is not None
    plan = Plan(walk.process, walk.tree.height, walk.moving, walk.choices, parts, draws, walk.nodes.device)
    total, shown = len(grid) - 1, None
    for turn in plan.rounds():
        if frames and turn.first is not None:
            if shown not in (None, turn.first):
                frames.append(walk.frame(grid[shown + 1]))
            shown = turn.first
        walk.take(turn)
        told(turn.step, total)
    if frames and shown is not None:
        frames.append(walk.frame(grid[shown + 1]))
    told(total, total)


def _together(walk: Walk, parts: list[Segment], grid: Sequence[float], draws: Draws, frames: list[Frame],
              told: Callable[[int, int], None]) -> None:
    """Step after step."""
    total = len(grid) - 1
    for step, group in itertools.groupby(parts, lambda part: part.step):
        moved = [_descend(walk, draws, part) for part in group]
        if frames and any(moved):
            frames.append(walk.frame(grid[step + 1]))
        told(step + 1, total)


def _descend(walk: Walk, draws: Draws, part: Segment) -> bool:
    """One segment: draw all targets, then go down level by level until everybody has arrived."""
    process, H, (B, U) = walk.process, walk.tree.height, walk.heights.shape
    walk.clamp(process.clamp_height(part.later, H))
    target = targets(process.reverse(part.later, part.earlier, H), walk.heights, draws.uniform(f"height {part.tag}", U))
    target = torch.where(walk.moving, target, walk.heights)
    time = torch.full((B,), part.later, dtype=torch.float64)
    level = torch.full((B,), process.level_at(part.later, H))
    rounds = 0
    while bool((going := walk.heights > target).any()):
        walk.step(going, draws.uniform(f"child {part.tag} {rounds}", U), time, level)
        rounds += 1
    return rounds > 0
