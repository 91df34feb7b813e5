"""The way down, shared by all samplers on a tree: where every position stands, what the network is asked, who falls.

A *unit* is what climbs and falls as one: a single position, or a whole neighbourhood for the method that corrupts
neighbourhoods as units. Who falls next is the sampler's business, the child is the reader's: `Alone` draws every position
by itself, another reader may draw positions together.

Given tokens (a prompt, the surroundings of a gap) stand at their ancestors, at the height that a position which has already
moved would show; tokens to be *shown* stand as tokens at all times. In a unit that holds both given and missing positions
the given ones fall along with the unit, to children that are known.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..errors import SampleError
from ..model.model import Network, autocast
from ..process import Process
from ..tree.tree import Tree
from .draw import Choice, Frame, invert


@dataclass(frozen=True)
class View:
    """What a reader is asked about some rows of a batch."""

    nodes: Int[Tensor, "R S"]
    draw: Bool[Tensor, "R S"]
    """The positions whose child is drawn now."""
    open: Bool[Tensor, "R S"]
    """Positions that fall later in this stretch: they may still become any child."""
    forced: Int[Tensor, "R S"]
    """The slot of a given token that falls now, -1 elsewhere."""

    def part(self, rows: Int[Tensor, "rows"]) -> View:
        return View(self.nodes[rows], self.draw[rows], self.open[rows], self.forced[rows])


@runtime_checkable
class Reader(Protocol):
    """How hidden states become children."""

    unit: int
    """Positions that climb and fall as one."""
    neighbourhood: int
    """Positions whose children are drawn together."""

    def outlook(self, head: Any, hidden: Float[Tensor, "R S d"],
                view: View) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M outcomes"]]:
        """Row, unit and log-probabilities of every unit that has something to draw, each by itself."""
        ...

    def draw(self, head: Any, hidden: Float[Tensor, "R S d"], view: View, uniform: Float[Tensor, "R U"],
             choice: Choice) -> Int[Tensor, "R S"]:
        """Slots at the positions of `view.draw`; anything elsewhere."""
        ...


class Alone:
    """Every position by itself."""

    unit = neighbourhood = 1

    def outlook(self, head: Any, hidden: Float[Tensor, "R S d"],
                view: View) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M K"]]:
        row, column = view.draw.nonzero(as_tuple=True)
        return row, column, head.log_probs(hidden[row, column], view.nodes[row, column])

    def draw(self, head: Any, hidden: Float[Tensor, "R S d"], view: View, uniform: Float[Tensor, "R S"],
             choice: Choice) -> Int[Tensor, "R S"]:
        row, column, log_probs = self.outlook(head, hidden, view)
        slot = torch.zeros_like(view.nodes)
        slot[row, column] = invert(choice.probabilities(log_probs), uniform[row, column])
        return slot


def in_units(values: Tensor, length: int) -> Tensor:
    """(B, S, ...) to (B, U, length, ...); a last shorter unit is filled up with zeros."""
    missing = -values.shape[1] % length
    padded = F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing)) if missing else values
    return padded.unflatten(1, (-1, length))


def from_units(values: Tensor, length: int, positions: int) -> Tensor:
    """(B, U) to (B, S): every position takes its unit's value."""
    return values if length == 1 else values.repeat_interleave(length, 1)[:, :positions]


class Walk:
    """The state of a batch on its way down."""

    def __init__(self, model: Network, process: Process, tree: Tree, fixed: Int[Tensor, "B S"], shown: Tensor | None,
                 choice: Choice, dtype: str, reader: Reader | None = None):
        self.model, self.process, self.tree, self.choice, self.dtype = model, process, tree, choice, dtype
        self.reader = reader or Alone()
        self.is_given, self.given = fixed >= 0, fixed.clamp(min=0)
        if shown is not None and shown.shape != fixed.shape:
            raise SampleError(f"the mark of shown tokens must have the shape {tuple(fixed.shape)} of the samples, "
                              f"got {tuple(shown.shape)}")
        self.shown = torch.zeros_like(self.is_given) if shown is None else shown.to(fixed.device) & self.is_given
        self.moving = in_units(~self.is_given, self.reader.unit).any(-1)
        self.heights = torch.full_like(self.moving, tree.height, dtype=torch.int64)
        self.nodes = torch.where(self.shown, self.given, tree.root)
        self.evaluations = torch.zeros(len(fixed), dtype=torch.int64, device=fixed.device)
        self.together = torch.zeros_like(self.evaluations)
        self.calls = 0

    def spread(self, values: Tensor) -> Tensor:
        return from_units(values, self.reader.unit, self.nodes.shape[1])

    def clamp(self, floor: Int[Tensor, "B"] | int) -> None:
        """Units that are wholly given stand at the lowest height that can be seen now."""
        floor = torch.as_tensor(floor, device=self.nodes.device).expand(len(self.nodes))[:, None]
        self.heights = torch.where(self.moving, self.heights, floor)
        held = ~self.spread(self.moving) & ~self.shown
        self.nodes = torch.where(held, self.tree.ancestor[floor, self.given], self.nodes)

    def view(self, going: Bool[Tensor, "B U"], floor: Int[Tensor, "B"] | int) -> View:
        """The question when the units of `going` fall and the others that stand above `floor` stay."""
        floor = torch.as_tensor(floor, device=self.nodes.device).expand(len(self.nodes))[:, None]
        here, standing = self.spread(going), self.spread(self.heights)
        choice = self.tree.num_children[self.nodes] > 1
        free = choice & ~self.is_given
        along = self.tree.slot[(standing - 1).clamp(min=0), self.given]
        return View(self.nodes, here & free, ~here & free & (standing > floor),
                    along.where(here & choice & self.is_given, -1))

    def look(self, view: View, rows: Int[Tensor, "rows"], time: Float[Tensor, "B"],
             level: Int[Tensor, "B"]) -> Float[Tensor, "rows S d"]:
        """One evaluation of the network for some rows."""
        self.evaluations[rows] += 1
        self.calls += 1
        return self.model.hidden(view.nodes[rows], time[rows], level[rows])

    def pick(self, view: View, rows: Int[Tensor, "rows"], hidden: Float[Tensor, "rows S d"],
             uniform: Float[Tensor, "B U"]) -> Int[Tensor, "B S"]:
        """The slots of all positions: drawn in `rows`, forced where a given token falls along."""
        slot, part = view.forced.clamp(min=0), view.part(rows)
        drawn = self.reader.draw(self.model.head, hidden, part, uniform[rows], self.choice)
        slot[rows] = torch.where(part.draw, drawn, slot[rows])
        groups = in_units(part.draw, self.reader.neighbourhood).any(-1).sum(1)
        self.together[rows] = torch.maximum(self.together[rows], groups)
        return slot

    def step(self, going: Bool[Tensor, "B U"], uniform: Float[Tensor, "B U"], time: Float[Tensor, "B"],
             level: Int[Tensor, "B"], floor: Int[Tensor, "B"] | int) -> None:
        """The units of `going` fall by one height; only rows with a real choice reach the network."""
        view = self.view(going, floor)
        slot = view.forced.clamp(min=0)
        rows = view.draw.any(1).nonzero()[:, 0]
        if len(rows):
            with self.autocast():
                slot = self.pick(view, rows, self.look(view, rows, time, level), uniform)
        self.fall(going, slot)

    def fall(self, going: Bool[Tensor, "B U"], slot: Int[Tensor, "B S"]) -> None:
        below = self.tree.children[(self.nodes - self.tree.size).clamp(min=0), slot]
        self.nodes = torch.where(self.spread(going) & (self.nodes >= self.tree.size), below, self.nodes)
        self.heights = self.heights - going.long()

    def autocast(self) -> torch.autocast:
        return autocast(self.nodes.device, self.dtype)

    def frame(self, time: float) -> Frame:
        heights = self.spread(self.heights).masked_fill(self.shown, 0)
        return Frame(time, int(self.evaluations[0]), heights[0].tolist(), self.nodes[0].tolist())

    def finish(self) -> Int[Tensor, "B S"]:
        self.clamp(0)
        assert bool((self.heights == 0).all()), "the way down ends where every position is a token"
        return self.nodes
