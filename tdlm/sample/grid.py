"""Which times a sampler visits: steps shared out over levels, or any grid of times from 1 to 0."""
from __future__ import annotations

from collections.abc import Sequence

from ..errors import SampleError
from ..process import Process


def allocate(steps: int, height: int, per_level: Sequence[int] | None = None) -> list[int]:
    """Steps by level, leaf level first. `per_level` is given top level first, as in the paper's table (256/256)."""
    if per_level is not None:
        if len(per_level) != height:
            raise SampleError(f"steps per level: the tree has {height} levels, got {len(per_level)} numbers")
        if min(per_level) < 1:
            raise SampleError(f"steps per level: every level needs at least 1 step, got {'/'.join(map(str, per_level))}")
        return list(reversed(per_level))
    if steps < height:
        raise SampleError(f"{steps} steps cannot cross the {height} levels of the tree; ask for at least {height}")
    each, rest = divmod(steps, height)
    return [each + (level < rest) for level in range(height)]


def times_for(process: Process, height: int, steps: int, per_level: Sequence[int] | None = None,
              times: Sequence[float] | None = None) -> list[float]:
    """The grid, from 1 down to 0. A grid that is given may ignore the level thresholds: steps across one are split."""
    if times is None:
        return process.grid(allocate(steps, height, per_level), height)
    grid = [float(t) for t in times]
    if len(grid) < 2 or grid[0] != 1.0 or grid[-1] != 0.0 or any(a <= b for a, b in zip(grid, grid[1:])):
        raise SampleError(f"a time grid falls strictly from 1 to 0, got {grid[:4]}{'...' if len(grid) > 4 else ''}")
    return grid
