"""What the flat jump processes (GIDD, SEDD) share: drawing noisy rows, which positions move and count under a PAD mode, and the
sheet of all that is known before the network is asked (the processor writes it while a GPU is busy)."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..model.kernels.rows import take
from ..model.model import Network
from ..process.flat import Hybrid, Mix, Uniform, corrupt
from ..rng import Draws
from .base import Pad, Places, delivered, is_pad, ordered


class Noisy(NamedTuple):
    state: Int[Tensor, "B S"]
    time: Float[Tensor, "B"]
    density: Float[Tensor, "B"]
    """Of the draw of the time."""


class Roles(NamedTuple):
    pad: Bool[Tensor, "B S"]
    moving: Bool[Tensor, "B S"]
    counted: Bool[Tensor, "B S"]
    state: Int[Tensor, "B S"]
    """What is seen: positions that do not move show their token."""


def draw_noisy(process: Hybrid | Uniform, tokens: Int[Tensor, "B S"], draws: Draws) -> Noisy:
    time, density = process.times(draws.strata("time"))
    length = tokens.shape[1]
    state = corrupt(process, time, tokens, draws.uniform("kind", length), draws.uniform("token", length))
    return Noisy(state, time, density)


def roles(tokens: Int[Tensor, "B S"], state: Int[Tensor, "B S"], pad_id: int | None, mode: Pad) -> Roles:
    pad = is_pad(tokens, pad_id)
    moving = ~pad if mode == "given-length" else torch.ones_like(pad)
    counted = torch.ones_like(pad) if mode == "count" else ~pad
    return Roles(pad, moving, counted, torch.where(moving, state, tokens))


class Sheet(NamedTuple):
    """What the network is shown and asked, and with which weights."""

    state: Int[Tensor, "B S"]
    time: Float[Tensor, "B"]
    place: Int[Tensor, "M"] | None
    """Positions that are asked about, counted through the batch; None: all, one after another."""
    row: Int[Tensor, "M"]
    token: Int[Tensor, "M"]
    seen: Int[Tensor, "M"]
    weight: Float[Tensor, "M"]
    """Of the bound."""
    share: Float[Tensor, "M"]
    mix: Mix
    """q_t(. | x) where the position stands."""
    tokens: Int[Tensor, "B"]
    """Real tokens."""
    counted: Int[Tensor, "B"]
    """Positions in the bound."""
    order: Any
    """The head's own (`head.arranged`), or None."""

    def hidden(self, model: Network) -> Float[Tensor, "M d"]:
        states = model.hidden(self.state, self.time, None).flatten(0, 1)
        return states if self.place is None else take(states, self.place)


def write(head: Any, process: Hybrid | Uniform, places: Places, tokens: Int[Tensor, "B S"], parts: Roles,
          time: Float[Tensor, "B"], weight: Float[Tensor, "B S"], share: Float[Tensor, "B S"],
          device: torch.device) -> Sheet:
    """The sheet of these positions, for `device`. `head`: the one that is asked for single tokens, if any."""
    token, seen, (row, column) = places.of(tokens), places.of(parts.state), places.index
    order = None if head is None else ordered(head, seen, token, device)  # under one root any order is sorted
    place = None if places.every else row * tokens.shape[1] + column
    mix = Mix(*(number[row] for number in process.at(time)))
    return delivered(Sheet(parts.state, time, place, row, token, seen, places.of(weight), places.of(share), mix,
                           (~parts.pad).sum(1), parts.counted.sum(1), order), device)
