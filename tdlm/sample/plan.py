"""The whole way down, planned before the network is asked: who falls when, in rounds of full batches.

Where a position stands at which time does not depend on the network. Where nodes of one height agree on whether they leave a
choice, it is known as well which *falls* (a position goes down by one height) the network is asked about, so a sequence's
evaluations are a list: its *events*, each with its own time and level. Sequences have nothing to do with one another, so they
need not wait for one another: round k is the k-th event of every sequence. The batches are full until the first sequence has
arrived, whereas in step with one another some would stand still in every step; the network's work is the same, in fewer calls
of one size. The numbers, and with them the samples, are those of the steps.

A plan is made some segments ahead, as far as every sequence knows its next event, and lies on the device as lists of places.
It also says which columns of a sequence are asked about: of the network's last block nothing else is needed.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..process import Process
from ..rng import Draws, sent

AHEAD = 16
"""Segments that are planned at once, while the device is busy with what was planned before."""
FEW = 8
"""Columns of a sequence that are asked about are filled up to this, or a power of two above."""


class Segment(NamedTuple):
    """A part of a step on which the network is told one time and one level."""

    step: int
    tag: str
    """What its random numbers are called."""
    later: float
    earlier: float
    level: int
    floor: int
    """The lowest height that can be seen."""


class Falls(NamedTuple):
    """Who falls in some segments, sorted by row, segment, turn and column; all on the processor."""

    row: Int[Tensor, "n"]
    segment: Int[Tensor, "n"]
    turn: Int[Tensor, "n"]
    """Which evaluation of the segment."""
    column: Int[Tensor, "n"]
    choice: Bool[Tensor, "n"]
    """Whether the network is asked; the others go to their only child."""
    chance: Float[Tensor, "n *numbers"]
    """The numbers that decide."""


@runtime_checkable
class Source(Protocol):
    def falls(self, parts: Sequence[Segment]) -> Falls:
        """Of the next segments."""
        ...

    def under_way(self) -> Bool[Tensor, "B"]:
        """The sequences in which somebody may yet fall."""
        ...


@dataclass(frozen=True)
class Round:
    """An event of each of some sequences. `fallen`, `rows`, `count` and `floor` are on the processor, the rest on the device."""

    step: int
    """The least step of its events."""
    first: int | None
    """The step of the first sequence's event, if it has one."""
    fallen: Int[Tensor, "falls"]
    """Places (row x length + column) of everybody who falls."""
    rows: Int[Tensor, "R"]
    """The sequences that ask the network."""
    count: Int[Tensor, "R"]
    """How many choices each has to make."""
    floor: Int[Tensor, "R"]
    asked: Int[Tensor, "R"]
    """The same sequences."""
    level: Int[Tensor, "R"]
    time: Float[Tensor, "R"]
    columns: Int[Tensor, "R few"] | None
    """Where their choices are, filled up; None if that were half of them."""
    place: Int[Tensor, "M"]
    """Of those who have a choice."""
    local: Int[Tensor, "M"]
    """Their places among `columns` (or all columns) of the sequences that ask."""
    part: Int[Tensor, "M"]
    """Their segments."""
    chance: Float[Tensor, "M *numbers"]
    free: Int[Tensor, "falls-M"]
    """Places of the others."""


class Rounds:
    def __init__(self, source: Source, parts: Sequence[Segment], shape: tuple[int, int], device: torch.device):
        self.source, self.parts, self.shape, self.device = source, parts, shape, device
        self.events = torch.zeros(shape[0], dtype=torch.int64)
        """Events of each sequence that are known."""
        self.step, self.level, self.floor = torch.tensor([[part.step, part.level, part.floor] for part in parts]).T
        self.time = torch.tensor([part.later for part in parts], dtype=torch.float64)

    def __iter__(self) -> Iterator[Round]:
        waiting: tuple[Tensor, Falls] | None = None
        for begin in range(0, len(self.parts), AHEAD):
            event, falls = self._next(begin)
            if waiting is not None:
                event = torch.cat([waiting[0], event])
                falls = Falls(*(torch.cat(each) for each in zip(waiting[1], falls)))
            going = self.source.under_way() & (begin + AHEAD < len(self.parts))
            ready = event < (self.events[going].min() if bool(going.any()) else self.events.max() + 1)
            waiting = event[~ready], Falls(*(each[~ready] for each in falls))
            yield from self._arranged(event[ready], Falls(*(each[ready] for each in falls)))

    def _next(self, begin: int) -> tuple[Int[Tensor, "n"], Falls]:
        """The falls of the next segments, and which event of its sequence each belongs to."""
        falls = self.source.falls(self.parts[begin:begin + AHEAD])
        groups = torch.stack([falls.row, falls.segment, falls.turn])
        _, which = torch.unique_consecutive(groups, dim=1, return_inverse=True)
        last = torch.zeros_like(self.events).scatter_reduce(0, falls.row, which + 1, "amax").cummax(0).values
        before = torch.cat([last.new_zeros(1), last[:-1]])
        event = self.events[falls.row] + which - before[falls.row]
        self.events = self.events + last - before
        return event, falls._replace(segment=falls.segment + begin)

    def _arranged(self, event: Int[Tensor, "n"], falls: Falls) -> Iterator[Round]:
        """Event by event, within an event row by row."""
        if not len(event):
            return
        B, S = self.shape
        order = ((event * B + falls.row) * S + falls.column).argsort()
        event, (row, segment, _, column, real, chance) = event[order], (each[order] for each in falls)
        place, first, span = row * S + column, int(event[0]), int(event[-1] - event[0]) + 1

        def sizes(numbers: Tensor) -> list[int]:
            return torch.bincount(numbers - first, minlength=span).tolist()

        step = self.step[segment]
        least = torch.full((span,), len(self.parts)).scatter_reduce(0, event - first, step, "amin").tolist()
        own = dict(zip(event[row == 0].tolist(), step[row == 0].tolist()))
        fallen, free = place.split(sizes(event)), sent(place[~real], self.device).split(sizes(event[~real]))
        event, row, column, segment, place, chance = (each[real] for each in (event, row, column, segment, place, chance))
        asks, which, count = torch.unique_consecutive(event * B + row, return_inverse=True, return_counts=True)
        begins, turn = count.cumsum(0) - count, asks // B - first
        many, width = sizes(asks // B), torch.full((span,), FEW).scatter_reduce(0, turn, count, "amax")
        width = 2 ** (width - 1).double().log2().floor().add(1).long()
        width = torch.where(2 * width <= S, width, S)
        room = torch.tensor(many) * width
        local = (which - (torch.tensor(many).cumsum(0) - torch.tensor(many))[turn][which]) * width[turn][which]
        inside = torch.where(width[turn][which] < S, torch.arange(len(which)) - begins[which], column)
        columns = torch.zeros(int(room.sum()), dtype=torch.int64)
        columns[(room.cumsum(0) - room)[turn][which] + local + inside] = column
        tables = sent(columns, self.device).split(room.tolist())
        rows, part = asks % B, segment[begins]
        there = sent(torch.stack([rows, self.level[part]]), self.device)
        by_row = (rows, count, self.floor[part], *there, sent(self.time[part], self.device))
        asking, choices, floor, asked, level, time = (each.split(many) for each in by_row)
        told = sent(torch.stack([place, local + inside, segment]), self.device)
        at, local, part, chance = (each.split(sizes(event)) for each in (*told, sent(chance, self.device)))
        for i, wide in enumerate(width.tolist()):
            yield Round(step=least[i], first=own.get(first + i), fallen=fallen[i], free=free[i], rows=asking[i], count=choices[i],
                        floor=floor[i], asked=asked[i], level=level[i], time=time[i], place=at[i], local=local[i], part=part[i],
                        chance=chance[i], columns=tables[i].view(-1, wide) if wide < S else None)


def segments(process: Process, grid: Sequence[float], height: int) -> list[Segment]:
    pieces = [(step, *piece) for step, pair in enumerate(zip(grid, grid[1:])) for piece in process.segments(*pair, height)]
    return [Segment(step, f"{step} {number}", later, earlier, process.level_at(later, height),
                    process.clamp_height(later, height)) for number, (step, later, earlier) in enumerate(pieces)]


def targets(kernel: Float[Tensor, "heights heights"], heights: Int[Tensor, "B U"],
            uniform: Float[Tensor, "B U"]) -> Int[Tensor, "B U"]:
    """Where everybody stands after the step: the inverse of the cumulative kernel, for the heights that can be left."""
    target = heights
    for height, reach in enumerate(kernel.cumsum(-1).tolist()):
        edges = reach[:height]
        if any(edge > 0 for edge in edges):
            passed = sum(uniform >= edge for edge in edges if edge > 0) + sum(edge <= 0 for edge in edges)
            target = torch.where(heights == height, passed, target)
    return target


class Descent:
    """The falls of a process on a tree: by one height at a time, everybody of a sequence who has not arrived together."""

    def __init__(self, process: Process, moving: Bool[Tensor, "B S"], choices: Bool[Tensor, "heights"], draws: Draws):
        self.process, self.moving, self.choices, self.draws = process, moving, choices, draws
        self.heights = torch.where(moving, len(choices) - 1, 0)

    def under_way(self) -> Bool[Tensor, "B"]:
        return (self.heights > 0).any(1)

    def falls(self, parts: Sequence[Segment]) -> Falls:
        H, before = len(self.choices) - 1, []
        uniform = self.draws.uniforms([f"height {part.tag}" for part in parts], self.moving.shape[1])
        for part, numbers in zip(parts, uniform):
            before.append(self.heights)
            goal = targets(self.process.reverse(part.later, part.earlier, H), self.heights, numbers)
            self.heights = torch.where(self.moving, goal, self.heights)
        stand = torch.stack([*before, self.heights], 1)  # (B, segments + 1, S)
        drop = stand[:, :-1] - stand[:, 1:]
        row, segment, column = drop.nonzero(as_tuple=True)
        height, turn = stand[row, segment, column], torch.zeros_like(row)
        if int(drop.max()) > 1:  # somebody falls several times in a segment
            count = drop[row, segment, column]
            row, segment, column, height = (each.repeat_interleave(count) for each in (row, segment, column, height))
            turn = torch.arange(len(row)) - (count.cumsum(0) - count).repeat_interleave(count)
            order = ((row * len(parts) + segment) * H + turn).argsort(stable=True)
            row, segment, column, height, turn = (each[order] for each in (row, segment, column, height, turn))
        tags = [f"child {part.tag} {number}" for part in parts for number in range(H)]
        chance = self.draws.single(tags, segment * H + turn, row, column)
        return Falls(row, segment, turn, column, self.choices[height - turn], chance)
