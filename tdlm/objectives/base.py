"""The one interface of all methods, and the few lines that they share.

A method (`Method`, a frozen dataclass in the run's configuration) says what is chosen; with a tree it becomes an
objective (`Objective`), which knows how to train, to bound and to sample. A *flat* method needs no tree of its own:
it works on the star tree, in which every token is a child of the root. There the root's id is V: the MASK of masked
diffusion.
"""
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..errors import SampleError
from ..model.head import arranged
from ..model.model import Network
from ..registry import suggest
from ..rng import Draws, sent
from ..tree.tree import Tree

Pad = Literal["count", "given-length", "drop"]
Estimator = Callable[..., "Loss"]
"""(model, tokens, *, draws) -> Loss: one unbiased estimate of the bound."""


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
    knows_level: bool
    """Whether a network can be told the level (a sequence is in one level at a time)."""
    tree: Tree
    pad_id: int | None
    pad: Pad
    samplers: tuple[str, ...]
    """Names for `sample(sampler=...)`, the default first."""

    @property
    def is_bound(self) -> bool:
        """Whether `bound` bounds -log p under this PAD mode."""
        ...

    def loss(self, model: Network, tokens: Tensor, *, draws: Draws) -> Loss:
        ...

    def estimators(self, model: Network) -> dict[str, Estimator]:
        """The estimators of the bound that are valid for this network, the most precise first."""
        ...

    def with_pad(self, pad: Pad) -> Objective:
        """The same under another PAD mode."""
        ...

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               **options: Any) -> Any:
        ...


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass, registered under the method's name."""

    role: str
    flat: bool
    """Whether it works on the star tree over the vocabulary instead of a tree that was built."""
    causal: bool
    head: Any
    """What `build(tree, embedding, mass)` makes the head of."""

    def objective(self, tree: Tree, pad_id: int | None) -> Objective:
        ...


@runtime_checkable
class _Padded(Protocol):
    pad: Pad


_Some = TypeVar("_Some", bound=_Padded)


def in_pad_mode(objective: _Some, pad: Pad) -> _Some:
    """The same objective under another PAD mode (evaluation may ask for any; training for those of the method)."""
    other = copy.copy(objective)
    other.pad = pad
    return other


def is_pad(tokens: Tensor, pad_id: int | None) -> Tensor:
    return tokens == pad_id if pad_id is not None else torch.zeros_like(tokens, dtype=torch.bool)


def beside(draws: Draws, tokens: Tensor) -> Draws:
    """The numbers where the tokens are: the processor makes its part of the loss where it has them."""
    return draws if tokens.device.type == draws.device.type else draws.here()


def sorts(values: Tensor, device: torch.device) -> bool:
    """Whether positions are put in the head's order beforehand: the processor does it while a GPU is busy."""
    return device.type == "cuda" and not values.is_cuda


def ordered(head: Any, parent: Tensor, slot: Tensor, device: torch.device) -> Any:
    """The order in which the head wants these questions, where the processor may put them so (`head.arranged`)."""
    return arranged(head, parent, slot) if sorts(parent, device) else None


_Sheet = TypeVar("_Sheet", bound=tuple)


def delivered(sheet: _Sheet, device: torch.device) -> _Sheet:
    """A named tuple with all its tensors on `device`, without waiting; parts that know what a GPU needs of them are asked."""
    def send(part: Any) -> Any:
        if isinstance(part, Tensor):
            return sent(part, device)
        if hasattr(part, "to"):
            return part.to(device)
        return delivered(part, device) if hasattr(part, "_fields") else part

    return type(sheet)(*map(send, sheet))


def by_row(row: Tensor, values: Tensor, rows: int) -> Tensor:
    """Sums (rows,) of values at single positions, in float64 and detached: how bounds are added up."""
    empty = torch.zeros(rows, dtype=torch.float64, device=values.device)
    return empty.index_add(0, row, values.detach().double())


def everywhere(tokens: Tensor) -> tuple[Tensor, ...]:
    """Row and column (of more axes: one index each) of all positions, in order."""
    rest, index = torch.arange(tokens.numel(), device=tokens.device), []
    for size in reversed(tokens.shape):
        index.append(rest % size)
        rest = rest // size
    return tuple(reversed(index))


class Places:
    """The positions that are scored: those of a mask, or all of them. All are not looked up: the processor would wait for the
    GPU to count them, and the backward pass of a gather sorts."""

    def __init__(self, mask: Tensor, *, every: bool):
        self.every, self.index = every, everywhere(mask) if every else mask.nonzero(as_tuple=True)

    def of(self, values: Tensor) -> Tensor:
        """What stands there: (B, S, ...) -> (M, ...)."""
        return values.flatten(0, len(self.index) - 1) if self.every else values[self.index]

    def sort(self, order: Tensor) -> None:
        self.every, self.index = False, tuple(index[order] for index in self.index)


def choose_sampler(samplers: tuple[str, ...], name: str | None) -> str:
    """The sampler that was asked for, if the method has it; without a wish the first."""
    if name is None:
        return samplers[0]
    if name not in samplers:
        raise SampleError(f"this method has no sampler {name!r}{suggest(name, samplers)}")
    return name
