"""Samplers that choose who falls next: first-hitting, which is exact, and by confidence, which is not.

The reverse path jumps when the forward path does: the height of a unit climbs without regard to the token, so the times of
its jumps can be drawn in advance (`Process.arrivals`), and followed from the last to the first

    t(1) > t(2) > ...                    one time for each of H x (units to be made) jumps of a sequence,

only the child of a jump has to be asked for. *First-hitting* lets the unit whose time has come fall, with one evaluation a
jump: an exact draw from the continuous-time model, whether the network is told the time or not, with at most S evaluations
on the star tree and H x S on any tree. Jumps at nodes with one child are free. With fewer `steps` than jumps it is
*grouped*: each evaluation serves ceil(jumps left / steps left) jumps, of different units, as if they were independent;
`Sampled.together` says how many there were at most (1: exact).

*By confidence* the same clock ticks, but the units fall whose best child is the most probable (after `Choice`; ties, as at
temperature 0, by the network's own probability, then from left to right); the child itself is drawn. Probabilities within
a thousandth of one another are ties: positions that look alike, as all do at the start, differ by rounding only, which must
not decide. The order depends on what is seen, so this is no exact sampler of the model, whatever the number of steps. Free
jumps are made at once.

In the cascade every level is finished before the next begins, and `steps` are shared out over the levels. Everything is drawn
by sequence, unit and level, so a sample does not depend on its batch; sequences proceed at their own pace, and those with
nothing left do not reach the network.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import SampleError
from ..model.model import Network
from ..process import Process
from ..rng import Draws
from ..tree.tree import Tree
from .draw import Choice, Sampled, at_home, fixed_tokens
from .grid import allocate
from .walk import Reader, Walk, in_units


@dataclass(frozen=True)
class _Turn:
    """What one evaluation may do, by sequence."""

    candidates: Bool[Tensor, "B U"]
    must: Bool[Tensor, "B U"]
    """Units with as many jumps to make as there are evaluations left."""
    count: Int[Tensor, "B"]
    """How many jumps this evaluation serves."""
    clock: Float[Tensor, "B U"]
    """When each unit falls next by the process."""
    uniform: Float[Tensor, "B U"]
    """For the child of that jump."""
    time: Float[Tensor, "B"]
    level: Int[Tensor, "B"]


def first_hitting(model: Network, process: Process, tree: Tree, shape: tuple[int, int], **options: Any) -> Sampled:
    """Draw `shape` = (B, S) tokens, exactly when there are as many steps as jumps. The options are those of `generate`."""
    return _in_order(_as_times_come, model, process, tree, shape, **options)


def confidence(model: Network, process: Process, tree: Tree, shape: tuple[int, int], **options: Any) -> Sampled:
    """Draw `shape` = (B, S) tokens, the most certain ones first. The options are those of `generate`."""
    return _in_order(_most_certain, model, process, tree, shape, **options)


@torch.no_grad()
def _in_order(act: Callable[[Walk, _Turn], None], model: Network, process: Process, tree: Tree, shape: tuple[int, int], *,
              steps: int, draws: Draws, prefix: Tensor | None = None, given: Tensor | None = None,
              shown: Tensor | None = None, per_level: Sequence[int] | None = None, times: Sequence[float] | None = None,
              choice: Choice = Choice(), dtype: str = "float32", trace: bool = False,  # noqa: B008 - frozen
              progress: Callable[[int, int], None] | None = None, reader: Reader | None = None) -> Sampled:
    if times is not None:
        raise SampleError("this sampler draws the times of its jumps; leave out the grid of times, or use sampler ancestral")
    fixed = fixed_tokens(shape, prefix, given, tree.size, torch.device("cpu"))
    walk = Walk(model, process, tree, fixed, shown, choice, dtype, reader)
    schedule = _Schedule(walk, allocate(steps, tree.height, per_level), at_home(draws))
    frames = []
    with walk.autocast():
        while (now := schedule.turn(walk)) is not None:
            if trace and (not frames or bool(now.candidates[0].any())):
                frames.append(walk.frame(float(now.time[0]) if frames else 1.0))
            before = walk.evaluations.clone()
            act(walk, now)
            schedule.used.scatter_add_(1, now.level[:, None], (walk.evaluations - before)[:, None])
            if progress is not None:
                progress(schedule.total - int(schedule.left(walk).max()), schedule.total)
    tokens = walk.finish()
    if trace:
        frames.append(walk.frame(0.0))
    return Sampled(tokens, walk.evaluations, walk.calls, sum(schedule.steps), frames, walk.together)


class _Schedule:
    """The drawn times of all jumps, and how many evaluations each level may take."""

    def __init__(self, walk: Walk, steps: list[int], draws: Draws):
        (B, U), H = walk.heights.shape, walk.tree.height
        self.steps, self.one_level, self.height = steps, walk.process.knows_level, H
        self.room = torch.tensor(steps if self.one_level else [sum(steps)] * H)
        self.used = torch.zeros(B, H, dtype=torch.int64)
        self.clock, time = walk.process.arrivals(draws.uniform("arrival", U, H), H)
        self.child = draws.uniform("child", U, H)
        falling = self.clock.masked_fill(~walk.moving[..., None], -torch.inf).flatten(1)
        self.time = time.flatten(1).gather(1, falling.argsort(dim=1, descending=True, stable=True))
        self.total = H * int(walk.moving.sum(1).max())

    @staticmethod
    def left(walk: Walk) -> Int[Tensor, "B"]:
        """Jumps left, free ones included."""
        return walk.heights.masked_fill(~walk.moving, 0).sum(1)

    def turn(self, walk: Walk) -> _Turn | None:
        """The next evaluation of every sequence; None when all have arrived."""
        heights, left = walk.heights.masked_fill(~walk.moving, 0), self.left(walk)
        floor = (heights.amax(1) - 1).clamp(min=0) if self.one_level else torch.zeros_like(left)
        walk.clamp(floor)
        if not bool(left.any()):
            return None
        level = floor if self.one_level else torch.full_like(floor, self.height - 1)
        jumps = (heights - floor[:, None]).clamp(min=0)
        room = (self.room[level] - self.used.gather(1, level[:, None])[:, 0]).clamp(min=1)
        done = self.height * walk.moving.sum(1) - left
        next_jump = (heights - 1).clamp(min=0)[..., None]
        return _Turn(candidates=jumps > 0, must=jumps >= room[:, None], count=-(-jumps.sum(1) // room),
                     clock=self.clock.gather(2, next_jump)[..., 0], uniform=self.child.gather(2, next_jump)[..., 0],
                     time=self.time.gather(1, done.clamp(max=self.time.shape[1] - 1)[:, None])[:, 0], level=level)


def _as_times_come(walk: Walk, now: _Turn) -> None:
    going = _foremost([now.clock.masked_fill(~now.candidates, -torch.inf)], now.count)
    walk.step((going | now.must) & now.candidates, now.uniform, now.time, now.level)


def _most_certain(walk: Walk, now: _Turn) -> None:
    """Sequences with free jumps make them; the others ask the network about all candidates and let the best fall."""
    view, drawn = walk.view(now.candidates), None
    real = in_units(view.draw, walk.reader.unit).any(-1)
    going = now.candidates & ~real
    rows = (real.any(1) & ~going.any(1)).nonzero()[:, 0]
    if len(rows):
        part, hidden = walk.look(view, rows, now.time, now.level)
        row, unit, best = walk.reader.outlook(walk.model.head, hidden, part, walk.choice)
        keys = torch.full((2, *real[rows].shape), -torch.inf, dtype=torch.float64)
        keys[:, row.cpu(), unit.cpu()] = best.cpu().round(decimals=3).T
        going[rows] = (_foremost(list(keys), now.count[rows]) | now.must[rows]) & real[rows]
        view = walk.view(going)
        drawn = walk.pick(view.part(rows), rows, hidden, now.uniform)
    walk.fall(going, view, drawn)


def _foremost(keys: Sequence[Float[Tensor, "R U"]], count: Int[Tensor, "R"]) -> Bool[Tensor, "R U"]:
    """The first `count` units of each row, by the last key, then by the one before it, then from left to right."""
    order = torch.arange(keys[0].shape[1], device=count.device).expand(keys[0].shape)
    for key in keys:
        order = order.gather(1, key.gather(1, order).argsort(dim=1, descending=True, stable=True))
    chosen = torch.arange(order.shape[1], device=count.device) < count[:, None]
    return torch.zeros_like(chosen).scatter(1, order, chosen)
