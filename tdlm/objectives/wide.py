"""Sums over the vocabulary at every position, without ever holding all of it: some positions at a time, done again backwards.

A method that scores visible positions too needs V numbers at each of B x S positions, several times over. `in_parts` cuts the
positions so that one such tensor has at most LIMIT entries and lets the backward pass compute it anew.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LIMIT = 2**26


def undivided(count: int, width: int) -> bool:
    """Whether so many positions are few enough: nothing is computed twice."""
    return count <= max(1, LIMIT // width)


def in_parts(function: Callable[..., Tensor], width: int, *columns: Tensor) -> Tensor:
    """function(*columns), whose results per position are few but whose inside is `width` wide; columns share their length."""
    if undivided(len(columns[0]), width):
        return function(*columns)
    parts = zip(*(column.split(max(1, LIMIT // width)) for column in columns))
    return torch.cat([checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])
