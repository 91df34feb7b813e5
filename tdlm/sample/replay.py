"""The network's answer to small batches of one shape, recorded once as a CUDA graph and replayed.

A small batch spends its time launching kernels: a transformer of 12 blocks is some hundreds of them, each a few microseconds
of the device's time. A replay launches all of them at once. The first calls of a shape are made as usual, which also tunes
kernels and narrows weights (both are to be done before a recording); then one is recorded, and the recording is kept if its
first replay says what the network said. Where recording is not possible calls go on as usual.

A replay answers in the same memory every time: use it up before the next call. It also reads the weights that autocast has
narrowed, so a `Replay` lives within one autocast region.
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..model.model import Network

TOKENS = 4096
"""Positions of the largest batch that is recorded; larger ones keep the device busy by themselves."""
BEFORE = 4
"""Calls of a shape before it is recorded, which costs as much as some calls."""
CLOSE = 1e-2
"""How far, relative to its norm, the first replay may lie from the answer it stands for (bfloat16 rounds by 4e-3)."""


class Replay:
    """`hidden` of a network."""

    def __init__(self, model: Network):
        self.model, self.asked, self.works = model, Counter[Any](), True
        self.recorded: dict[Any, Callable[..., Tensor]] = {}

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        if not (self.works and recordable(nodes)):
            return self.model.hidden(nodes, time, level)
        shape = (*nodes.shape, level is None)
        self.asked[shape] += 1
        if shape in self.recorded:
            return self.recorded[shape](nodes, time, level)
        answer = self.model.hidden(nodes, time, level)
        if self.asked[shape] > BEFORE:
            self._record(shape, answer, nodes, time, level)
        return answer

    def _record(self, shape: Any, answer: Tensor, nodes: Tensor, time: Tensor, level: Tensor | None) -> None:
        try:
            replay = record(self.model.hidden, nodes, time, level)
            again = replay(nodes, time, level)
            self.works = bool((again - answer).norm() <= CLOSE * answer.norm())
        except RuntimeError as error:
            warnings.warn(f"sampling goes on without CUDA graphs: {str(error).splitlines()[0]}", RuntimeWarning, stacklevel=2)
            self.works = False
        else:
            if self.works:
                self.recorded[shape] = replay


def recordable(nodes: Tensor) -> bool:
    return nodes.is_cuda and nodes.numel() <= TOKENS


def record(call: Callable[..., Tensor], *inputs: Tensor | None) -> Callable[..., Tensor]:
    """A function of new inputs of the same shapes that replays the kernels of `call`."""
    held = [None if value is None else value.clone() for value in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads go on
        answer = call(*held)

    def replay(*values: Tensor | None) -> Tensor:
        for room, value in zip(held, values):
            if room is not None and value is not None:
                room.copy_(value)
        graph.replay()
        return answer

    return replay
