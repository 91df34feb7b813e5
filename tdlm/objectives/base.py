"""The one interface of all methods."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..model.model import Network
from ..rng import Draws


@dataclass(frozen=True)
class Loss:
    """`train` is what is differentiated; `bound` is what is published. Reweighting never leaks from one to the other."""

    train: Tensor
    """A scalar: the mean over the B x S positions."""
    bound: Tensor
    """Nats per sequence (B,): an unbiased estimate of the bound."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """`levels` (B, H): the bound by level; `tokens` (B,): how many real tokens it is about."""


@runtime_checkable
class Objective(Protocol):
    num_states: int
    """Rows of the input embedding."""
    levels: int
    """Columns of `parts['levels']`."""
    causal: bool
    """Which attention the network must use."""

    def loss(self, model: Network, tokens: Tensor, *, draws: Draws) -> Loss:
        ...

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               **options: Any) -> Any:
        ...
