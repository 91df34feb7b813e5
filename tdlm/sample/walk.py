"""The way down, shared by all samplers on a tree: where every position stands, what the network is asked, who falls.

A *unit* is what climbs and falls as one: a single position, or a whole neighbourhood for the method that corrupts
neighbourhoods as units. Who falls next is the sampler's business, the child is the reader's: `Alone` draws every position
by itself, another reader may draw positions together.

Given tokens (a prompt, the surroundings of a gap) stand at their ancestors, at the height that a position which has already
moved would show; tokens to be *shown* stand as tokens at all times. In a unit that holds both given and missing positions
the given ones fall along with the unit, to children that are known.

Heights never depend on the network, so they live on the processor, with everything that follows from them: who falls, which
rows the network is asked about, which positions reach the head. Only nodes live on the device. Where the nodes of one
height differ in whether they leave a choice (single children, padded paths), the processor must look at the nodes first.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..errors import SampleError
from ..model.model import Network, autocast
from ..process import Process
from ..rng import sent
from ..tree.tree import Tree
from .draw import Choice, Frame, in_parts, invert
from .plan import Round
from .replay import Replay


@dataclass(frozen=True)
class View:
    """What a reader is asked about some rows of a batch. The nodes are on the device, the rest is on the processor."""

    nodes: Int[Tensor, "R S"]
    draw: Bool[Tensor, "R S"]
    """The positions whose child is drawn now."""
    open: Bool[Tensor, "R S"]
    """Positions that fall later in this stretch: they may still become any child."""
    forced: Int[Tensor, "R S"]
    """The slot of a given token that falls now, -1 elsewhere."""
    branching: int
    """The most children a node has."""

    def part(self, rows: Int[Tensor, "rows"]) -> View:
        nodes = self.nodes if len(rows) == len(self.nodes) else self.nodes[sent(rows, self.nodes.device)]
        return replace(self, nodes=nodes, draw=self.draw[rows], open=self.open[rows], forced=self.forced[rows])

    @cached_property
    def places(self) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"]]:
        """Row and column of what is drawn, in order."""
        row, column = self.draw.nonzero(as_tuple=True)
        return row, column

    def on(self, device: torch.device) -> View:
        """All of it in one place, for a reader that needs nodes and masks together."""
        return replace(self, draw=sent(self.draw, device), open=sent(self.open, device), forced=sent(self.forced, device))


@runtime_checkable
class Reader(Protocol):
    """How hidden states become children."""

    unit: int
    """Positions that climb and fall as one."""
    neighbourhood: int
    """Positions whose children are drawn together."""

    def outlook(self, head: Any, hidden: Float[Tensor, "R S d"], view: View,
                choice: Choice) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M 2"]]:
        """Row, unit and `certainty` of every unit that has something to draw, each by itself."""
        ...

    def draw(self, head: Any, hidden: Float[Tensor, "R S d"], view: View, uniform: Float[Tensor, "R U"],
             choice: Choice) -> Int[Tensor, "M"]:
        """Slots at the positions of `view.draw`, in order. `uniform` is on the processor."""
        ...


def certainty(log_probs: Float[Tensor, "M outcomes"], choice: Choice) -> Float[Tensor, "M 2"]:
    """The log-probability of the best outcome: the network's own, and what `choice` makes of it."""
    return torch.stack([log_probs.amax(-1).double(), choice.probabilities(log_probs).amax(-1).double().log()], 1)


class Alone:
    """Every position by itself."""

    unit = neighbourhood = 1

    def outlook(self, head: Any, hidden: Float[Tensor, "R S d"], view: View,
                choice: Choice) -> tuple[Int[Tensor, "M"], Int[Tensor, "M"], Float[Tensor, "M 2"]]:
        state, node = self._active(hidden, view)
        best = in_parts(lambda part: certainty(head.log_probs(state[part], node[part]), choice), len(node), view.branching)
        return *view.places, best

    def draw(self, head: Any, hidden: Float[Tensor, "R S d"], view: View, uniform: Float[Tensor, "R S"],
             choice: Choice) -> Int[Tensor, "M"]:
        return children(head, *self._active(hidden, view), sent(uniform[view.places], hidden.device), choice, view.branching)

    @staticmethod
    def _active(hidden: Float[Tensor, "R S d"], view: View) -> tuple[Float[Tensor, "M d"], Int[Tensor, "M"]]:
        row, column = view.places
        at = sent(row * view.draw.shape[1] + column, hidden.device)
        return hidden.flatten(0, 1)[at], view.nodes.flatten()[at]


def children(head: Any, state: Float[Tensor, "M d"], node: Int[Tensor, "M"], uniform: Float[Tensor, "M"], choice: Choice,
             branching: int) -> Int[Tensor, "M"]:
    """Slots that are drawn one by one."""
    def some(part: slice) -> Tensor:
        return invert(choice.probabilities(head.log_probs(state[part], node[part])), uniform[part])

    return in_parts(some, len(node), branching)


def in_units(values: Tensor, length: int) -> Tensor:
    """(B, S, ...) to (B, U, length, ...); a last shorter unit is filled up with zeros."""
    missing = -values.shape[1] % length
    padded = F.pad(values, (0, 0) * (values.dim() - 2) + (0, missing)) if missing else values
    return padded.unflatten(1, (-1, length))


def from_units(values: Tensor, length: int, positions: int) -> Tensor:
    """(B, U) to (B, S): every position takes its unit's value."""
    return values if length == 1 else values.repeat_interleave(length, 1)[:, :positions]


def choices_by_height(tree: Tree) -> Bool[Tensor, "heights"] | None:
    """Whether the nodes of a height leave a choice of children; None where nodes of one height differ."""
    choices = tree.num_children[tree.ancestor] > 1
    return choices[:, 0] if bool((choices == choices[:, :1]).all()) else None


class Walk:
    """The state of a batch on its way down."""

    def __init__(self, model: Network, process: Process, tree: Tree, fixed: Int[Tensor, "B S"], shown: Tensor | None,
                 choice: Choice, dtype: str, reader: Reader | None = None):
        self.model, self.process, self.tree, self.choice, self.dtype = model, process, tree, choice, dtype
        self.reader, self.home, self.network = reader or Alone(), tree.to("cpu"), Replay(model, len(fixed))
        self.is_given, self.given = fixed >= 0, fixed.clamp(min=0)
        if shown is not None and shown.shape != fixed.shape:
            raise SampleError(f"the mark of shown tokens must have the shape {tuple(fixed.shape)} of the samples, "
                              f"got {tuple(shown.shape)}")
        self.shown = torch.zeros_like(self.is_given) if shown is None else shown.cpu() & self.is_given
        self.moving = in_units(~self.is_given, self.reader.unit).any(-1)
        self.heights = torch.full_like(self.moving, tree.height, dtype=torch.int64)
        self.floor = torch.full((len(fixed),), -1)
        self.nodes = self.sent(torch.where(self.shown, self.given, tree.root))
        self.evaluations = torch.zeros(len(fixed), dtype=torch.int64)
        self.together = torch.zeros_like(self.evaluations)
        self.calls = 0
        self.choices = choices_by_height(self.home)
        self.held = bool((~self.spread(self.moving) & ~self.shown).any())
        """Whether given tokens stand at their ancestors."""
        self.none, self.unforced = (torch.tensor([[value]]).expand(fixed.shape) for value in (False, -1))

    def sent(self, values: Tensor) -> Tensor:
        return sent(values, self.tree.ancestor.device)

    def spread(self, values: Tensor) -> Tensor:
        return from_units(values, self.reader.unit, self.given.shape[1])

    def clamp(self, floor: Int[Tensor, "B"] | int) -> None:
        """Units that are wholly given stand at the lowest height that can be seen now."""
        floor = torch.as_tensor(floor).expand(len(self.floor))
        if not torch.equal(floor, self.floor):
            self.floor, low = floor, floor[:, None]
            self.heights = torch.where(self.moving, self.heights, low)
            held = ~self.spread(self.moving) & ~self.shown
            if bool(held.any()):
                self.nodes.view(-1)[self._places(held)] = self.sent(self.home.ancestor[low, self.given][held])

    def _places(self, mask: Bool[Tensor, "B S"]) -> Int[Tensor, "M"]:
        return self.sent(mask.flatten().nonzero()[:, 0])

    def view(self, going: Bool[Tensor, "B U"]) -> View:
        """The question when the units of `going` fall and the others that stand above the floor stay."""
        here, standing = self.spread(going), self.spread(self.heights)
        if self.choices is None:
            choice = (self.tree.num_children[self.nodes] > 1).cpu()
        else:
            choice = self.choices[standing] & ~self.shown
        free = choice & ~self.is_given
        if self.reader.neighbourhood == 1:  # nobody falls along with others or waits for them
            return View(self.nodes, here & free, self.none, self.unforced, self.tree.branching)
        along = self.home.slot[(standing - 1).clamp(min=0), self.given]
        return View(self.nodes, here & free, ~here & free & (standing > self.floor[:, None]),
                    along.where(here & choice & self.is_given, -1), self.tree.branching)

    def look(self, view: View, rows: Int[Tensor, "rows"], time: Float[Tensor, "B"],
             level: Int[Tensor, "B"]) -> tuple[View, Float[Tensor, "rows S d"]]:
        """One evaluation of the network for some rows."""
        self.evaluations[rows] += 1
        self.calls += 1
        part = view.part(rows)
        return part, self.network.hidden(part.nodes, self.sent(time[rows]), self.sent(level[rows]))

    def pick(self, part: View, rows: Int[Tensor, "rows"], hidden: Float[Tensor, "rows S d"],
             uniform: Float[Tensor, "B U"]) -> Int[Tensor, "M"]:
        """The slots that are drawn in `rows`."""
        groups = in_units(part.draw, self.reader.neighbourhood).any(-1).sum(1)
        self.together[rows] = torch.maximum(self.together[rows], groups)
        return self.reader.draw(self.model.head, hidden, part, uniform[rows], self.choice)

    def step(self, going: Bool[Tensor, "B U"], uniform: Float[Tensor, "B U"], time: Float[Tensor, "B"],
             level: Int[Tensor, "B"]) -> None:
        """The units of `going` fall by one height; only rows with a real choice reach the network."""
        view = self.view(going)
        rows = view.draw.any(1).nonzero()[:, 0]
        drawn = None
        if len(rows):
            part, hidden = self.look(view, rows, time, level)
            drawn = self.pick(part, rows, hidden, uniform)
        self.fall(going, view, drawn)

    def take(self, turn: Round) -> None:
        """One round of a plan: the same for sequences that are at different places of their way."""
        flat, B = self.nodes.view(-1), len(self.nodes)
        if len(turn.rows):
            if self.held:
                self.clamp(self.floor.scatter(0, turn.rows, turn.floor))
            self.evaluations[turn.rows] += 1
            self.calls += 1
            self.together[turn.rows] = torch.maximum(self.together[turn.rows], turn.count)
            nodes = self.nodes if len(turn.rows) == B else self.nodes[turn.asked]
            hidden = self.network.hidden(nodes, turn.time, turn.level, turn.columns).flatten(0, 1)
            node = flat[turn.place]
            slot = children(self.model.head, hidden[turn.local], node, turn.chance, self.choice, self.tree.branching)
            flat[turn.place] = self.tree.children[node - self.tree.size, slot]
        if len(turn.free):
            self._down(turn.free, torch.zeros_like(turn.free))
        self.heights.view(-1)[turn.fallen] -= 1

    def fall(self, going: Bool[Tensor, "B U"], view: View, drawn: Int[Tensor, "M"] | None) -> None:
        """To the children that were drawn, or that are given or the only ones."""
        rest = self.spread(going)
        if drawn is not None:
            rest = rest & ~view.draw
            self._down(self._places(view.draw), drawn)
        if bool(rest.any()):
            self._down(self._places(rest), self.sent(view.forced.clamp(min=0)[rest]))
        self.heights = self.heights - going.long()

    def _down(self, at: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> None:
        flat = self.nodes.view(-1)
        node = flat[at]
        below = self.tree.children[(node - self.tree.size).clamp(min=0), slot]
        flat[at] = torch.where(node >= self.tree.size, below, node)

    def autocast(self) -> torch.autocast:
        """Around all steps: weights are then narrowed once."""
        return autocast(self.nodes.device, self.dtype)

    def frame(self, time: float) -> Frame:
        heights = self.spread(self.heights).masked_fill(self.shown, 0)
        return Frame(time, int(self.evaluations[0]), heights[0].tolist(), self.nodes[0].tolist())

    def finish(self) -> Int[Tensor, "B S"]:
        self.clamp(0)
        assert bool((self.heights == 0).all()), "the way down ends where every position is a token"
        return self.nodes
