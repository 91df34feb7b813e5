"""What the flat jump processes (GIDD, SEDD) share: drawing noisy rows, and which positions move and count under a PAD mode."""
from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..process.flat import Hybrid, Uniform, corrupt
from ..rng import Draws
from .base import Pad, is_pad


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
