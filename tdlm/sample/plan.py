"""The whole way down, planned before the network is asked: who falls when, in rounds of full batches.

Where a position stands at which time does not depend on the network. Where nodes of one height agree on whether they leave a
choice, it is known as well which *falls* (a position goes down by one height) the network is asked about, so a sequence's
evaluations are a list: its *events*, each with its own time and level. Sequences have nothing to do with one another, so they
need not wait for one another: round k is the k-th event of every sequence. The batches are full until the first sequence has
arrived, whereas in step with one another some would stand still in every step; the network's work is the same, in fewer calls
of one size. The numbers, and with them the samples, are those of the steps.

A plan is made some segments ahead, as far as every sequence knows its next event, and lies on the device as lists of places.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..process import Process
from ..rng import Draws, sent

AHEAD = 16
"""Segments that are planned at once, while the device is busy with what was planned before."""


class Segment(NamedTuple):
    """A part of a step on which the network is told one time and one level."""

    step: int
    tag: str
    """What its random numbers are called."""
    later: float
    earlier: float


@dataclass(frozen=True)
class Round:
    """An event of each of some sequences. `fallen`, `rows`, `floor` and `count` are on the processor, the rest on the device."""

    step: int
    """The least step of its events."""
    first: int | None
    """The step of the first sequence's event, if it has one."""
    fallen: Int[Tensor, "falls"]
    """Places (row x length + column) of everybody who falls."""
    rows: Int[Tensor, "R"]
    """The sequences that ask the network."""
    floor: Int[Tensor, "R"]
    """The lowest height that can be seen."""
    count: Int[Tensor, "R"]
    """How many choices."""
    asked: Int[Tensor, "R"]
    """The same sequences."""
    time: Float[Tensor, "R"]
    level: Int[Tensor, "R"]
    place: Int[Tensor, "M"]
    """Of those who have a choice."""
    local: Int[Tensor, "M"]
    """Their places among the sequences that ask."""
    uniform: Float[Tensor, "M"]
    free: Int[Tensor, "falls-M"]
    """Places of the others, who go to their only child."""


def segments(process: Process, grid: Sequence[float], height: int) -> list[Segment]:
    pieces = [(step, later, earlier) for step, (high, low) in enumerate(zip(grid, grid[1:]))
              for later, earlier in process.segments(high, low, height)]
    return [Segment(step, f"{step} {number}", later, earlier) for number, (step, later, earlier) in enumerate(pieces)]


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


class Plan:
    def __init__(self, process: Process, height: int, moving: Bool[Tensor, "B S"], choices: Bool[Tensor, "heights"],
                 parts: Sequence[Segment], draws: Draws, device: torch.device):
        self.process, self.height, self.moving, self.choices = process, height, moving, choices
        self.parts, self.draws, self.device = parts, draws, device
        self.heights = torch.where(moving, height, 0)
        self.events = torch.zeros(len(moving), dtype=torch.int64)
        """Events of each sequence that are known."""
        self.step = torch.tensor([part.step for part in parts])
        self.time = torch.tensor([part.later for part in parts], dtype=torch.float64)
        self.level = torch.tensor([process.level_at(part.later, height) for part in parts])
        self.floor = torch.tensor([process.clamp_height(part.later, height) for part in parts])

    def rounds(self) -> Iterator[Round]:
        waiting = torch.empty(5, 0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
        for begin in range(0, len(self.parts), AHEAD):
            falls = [torch.cat(each, -1) for each in zip(waiting, self._falls(begin), strict=True)]
            under_way = (self.heights > 0).any(1)
            ready = falls[0][0] < (self.events[under_way].min() if bool(under_way.any()) else self.events.max() + 1)
            waiting = falls[0][:, ~ready], falls[1][~ready]
            yield from self._arranged(falls[0][:, ready], falls[1][ready])

    def _falls(self, begin: int) -> tuple[Int[Tensor, "5 n"], Float[Tensor, "n"]]:
        """Of the next segments: event, row, column, segment and whether there is a choice; and the number that decides it."""
        parts, (_, S), H = self.parts[begin:begin + AHEAD], self.moving.shape, self.height
        uniform, before = self.draws.uniforms([f"height {part.tag}" for part in parts], S), []
        for part, numbers in zip(parts, uniform):
            before.append(self.heights)
            goal = targets(self.process.reverse(part.later, part.earlier, H), self.heights, numbers)
            self.heights = torch.where(self.moving, goal, self.heights)
        stand = torch.stack([*before, self.heights]).transpose(0, 1)  # (B, segments + 1, S)
        drop = stand[:, :-1] - stand[:, 1:]
        row, segment, column = drop.nonzero(as_tuple=True)
        if int(drop.max()) > 1:  # several heights at once: one event each
            count = drop[row, segment, column]
            row, segment, column = (each.repeat_interleave(count) for each in (row, segment, column))
            turn = torch.arange(len(count)).new_ones(len(row)).cumsum(0) - 1 - (count.cumsum(0) - count).repeat_interleave(count)
            order = ((row * len(parts) + segment) * H + turn).argsort(stable=True)
            row, segment, column, turn = (each[order] for each in (row, segment, column, turn))
        else:
            turn = torch.zeros_like(row)
        _, which = torch.unique_consecutive((row * len(parts) + segment) * H + turn, return_inverse=True)
        events = torch.zeros_like(self.events).scatter_reduce(0, row, which + 1, "amax")
        begins = torch.cat([events.new_zeros(1), events.cummax(0).values[:-1]])
        event = self.events[row] + which - begins[row]
        self.events = self.events + (events - begins).clamp(min=0)
        choice = self.choices[stand[row, segment, column] - turn]
        tags = [f"child {part.tag} {number}" for part in parts for number in range(H)]
        chance = self.draws.single(tags, segment * H + turn, row, column)
        return torch.stack([event, row, column, segment + begin, choice.long()]), chance

    def _arranged(self, falls: Int[Tensor, "5 n"], chance: Float[Tensor, "n"]) -> list[Round]:
        """Falls event by event, within an event row by row."""
        if not falls.shape[1]:
            return []
        B, S = self.moving.shape
        order = ((falls[0] * B + falls[1]) * S + falls[2]).argsort()
        event, row, column, segment, choice = falls[:, order]
        place, real, first, span = row * S + column, choice.bool(), int(event[0]), int(event[-1] - event[0]) + 1

        def sizes(numbers: Tensor) -> list[int]:
            return torch.bincount(numbers - first, minlength=span).tolist()

        asks, which, count = torch.unique_consecutive(event[real] * B + row[real], return_inverse=True, return_counts=True)
        rows, at, of = asks % B, segment[real][count.cumsum(0) - count], sizes(asks // B)
        begin = (torch.tensor(of).cumsum(0) - torch.tensor(of))[event[real] - first]
        told = sent(torch.stack([rows, self.level[at]]), self.device)
        places = sent(torch.stack([place[real], (which - begin) * S + column[real]]), self.device)
        here = [each.split(of) for each in (rows, self.floor[at], count, told[0], sent(self.time[at], self.device), told[1])]
        drawn = [each.split(sizes(event[real])) for each in (*places, sent(chance[order][real], self.device))]
        free, fallen = sent(place[~real], self.device).split(sizes(event[~real])), place.split(sizes(event))
        step = self.step[segment]
        least = torch.full((span,), len(self.parts)).scatter_reduce(0, event - first, step, "amin").tolist()
        own = dict(zip(event[row == 0].tolist(), step[row == 0].tolist()))
        return [Round(least[i], own.get(first + i), fallen[i], *asked, *now, free[i])
                for i, (asked, now) in enumerate(zip(zip(*here), zip(*drawn)))]
