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
from .draw import Choice, Film, Sampled, at_home, fixed_tokens
from .grid import times_for
from .plan import Descent, Rounds, Segment, segments, targets
from .walk import Alone, Reader, Walk


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
    film = Film(walk.frame, grid, trace)
    with walk.autocast():
        if walk.choices is not None and type(walk.reader) is Alone:
            source = Descent(process, walk.moving, walk.choices, draws)
            for turn in Rounds(source, parts, shape, walk.nodes.device):
                film.begins(turn.first)
                walk.take(turn)
                told(turn.step, len(grid) - 1)
            told(len(grid) - 1, len(grid) - 1)
        else:
            for step, group in itertools.groupby(parts, lambda part: part.step):
                film.begins(step)
                for part in group:
                    _descend(walk, draws, part)
                told(step + 1, len(grid) - 1)
        film.ends()
    return Sampled(walk.finish(), walk.evaluations, walk.calls, len(grid) - 1, film.frames, walk.together)


def _descend(walk: Walk, draws: Draws, part: Segment) -> None:
    """One segment: draw all targets, then go down level by level until everybody has arrived."""
    process, H, (B, U) = walk.process, walk.tree.height, walk.heights.shape
    walk.clamp(part.floor)
    target = targets(process.reverse(part.later, part.earlier, H), walk.heights, draws.uniform(f"height {part.tag}", U))
    target = torch.where(walk.moving, target, walk.heights)
    time = torch.full((B,), part.later, dtype=torch.float64)
    level = torch.full((B,), part.level)
    rounds = 0
    while bool((going := walk.heights > target).any()):
        walk.step(going, draws.uniform(f"child {part.tag} {rounds}", U), time, level)
        rounds += 1
