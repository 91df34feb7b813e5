"""The fused blocks as two CUDA graphs, one there and one back: two launches a step instead of five hundred.

A processor needs longer to launch the kernels of a step one by one than a fast GPU to run them. What is recorded runs on fixed
addresses: inputs are copied in, results are handed out where they lie, and are overwritten by the next pass. So a pass is
replayed only while nobody waits for the way back of the one before and no gradients are left of it; those that must outlive the
next pass (several micro-batches) are handed out as copies. Shapes that were not recorded, and the first passes, run as they
are, and so does everything where a recording fails.
"""
from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

WARM = 3
"""Passes of one kind before it is recorded: kernels are compiled and libraries choose their algorithms."""
Gradients = tuple[Tensor, Tensor, Tensor, list[Tensor]]


class Pass(Protocol):
    def forward(self, x: Tensor, keep: bool) -> Tensor:
        ...

    def backward(self, dout: Tensor) -> Gradients:
        ...


class Ticket:
    """A pass whose way back is not made yet; gone when that is made or given up."""


class Recording:
    def __init__(self, copies: bool = False):
        self.copies = copies
        """Whether gradients are handed out as copies."""
        self.kind: Hashable = None
        self.seen = 0
        self.failed = False
        self.there: torch.cuda.CUDAGraph | None = None
        self.waiting: Callable[[], Ticket | None] = lambda: None

    def __reduce__(self) -> tuple[type[Recording], tuple[bool]]:
        return Recording, (self.copies,)  # graphs belong to their process; a copy begins anew

    def ready(self, kind: Hashable, weights: Sequence[Tensor]) -> bool:
        """Whether a pass of this kind can be replayed (or recorded) now."""
        if self.failed or self.waiting() is not None:
            return False
        if not self.copies and any(weight.grad is not None for weight in weights):
            return False
        if self.there is None and kind != self.kind:
            self.kind, self.seen = kind, 0
        self.seen += 1
        return kind == self.kind and self.seen > WARM

    def forward(self, x: Tensor, modulations: Tensor, make: Callable[[Tensor], Pass]) -> tuple[Tensor, Ticket] | None:
        """The hidden states, which the next pass will overwrite; None where nothing can be recorded. `make` begins a pass with
        given modulations."""
        if self.there is None:
            try:
                self._record(x, modulations, make)
            except RuntimeError as error:  # out of memory is one
                self.failed = True
                warnings.warn(f"the blocks could not be recorded and are launched one by one: {str(error).splitlines()[0]}",
                              stacklevel=2)
        if self.there is None:
            return None
        self.x.copy_(x)
        self.modulations.copy_(modulations)
        self.there.replay()
        ticket = Ticket()
        self.waiting = weakref.ref(ticket)
        return self.out.detach(), ticket

    def backward(self, dout: Tensor) -> Gradients:
        self.dout.copy_(dout)
        self.back.replay()
        dx, dmodulations, dfinal, dweights = self.gradients
        # new tensors on the same memory: autograd takes them as gradients without a copy of its own
        hand = torch.clone if self.copies else torch.detach
        return dx.detach(), hand(dmodulations), hand(dfinal), [hand(gradient) for gradient in dweights]

    def _record(self, x: Tensor, modulations: Tensor, make: Callable[[Tensor], Pass]) -> None:
        self.x, self.modulations = x.clone(), modulations.clone()
        pool = torch.cuda.graph_pool_handle()
        there, self.back = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}  # other threads go on, the loader's too
        with torch.cuda.graph(there, **how):
            self.run = make(self.modulations)  # holds what the graphs read: rotary tables, weights
            self.out = self.run.forward(self.x, True)
        self.dout = torch.zeros_like(self.out)
        with torch.cuda.graph(self.back, **how):
            self.gradients = self.run.backward(self.dout)
        self.there = there
