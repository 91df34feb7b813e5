"""The network's answer to small batches of one shape, recorded once as a CUDA graph and replayed.

A small batch spends its time launching kernels: a transformer of 12 blocks is some hundreds of them, each a few microseconds
of the device's time. A replay launches all of them at once. The first calls of a shape are made as usual, which also tunes
kernels and narrows weights (both are to be done before a recording); then one is recorded, and the recording is kept if its
first replay says what the network said. Where recording is not possible calls go on as usual.

Before that, batches are filled up to few sizes, on a GPU: for every size that it has not seen cuDNN's attention makes a plan,
which takes as long as a call of 64 sequences, and every recorded shape takes memory. What is filled up repeats the last
sequence, and its answer is dropped.

A replay answers in the same memory every time: use it up before the next call. It also reads the weights that autocast has
narrowed, so a `Replay` lives within one autocast region.
"""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..model.model import Network

TOKENS = 4096
"""Positions of the largest batch that is recorded; larger ones keep the device busy by themselves."""
BEFORE = 4
"""Calls of a shape before it is recorded, which costs as much as some calls."""
CLOSE = 1e-2
"""How far, relative to its norm, the first replay may lie from the answer it stands for (bfloat16 rounds by 4e-3)."""
Inputs = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Nodes, time, level and columns."""


class Replay:
    """`hidden` of a network that is asked about at most `rows` sequences at once."""

    def __init__(self, model: Network, rows: int):
        self.model, self.rows, self.asked, self.works = model, rows, Counter[Any](), True
        self.recorded: dict[Any, Callable[..., Tensor]] = {}

    def hidden(self, nodes: Int[Tensor, "B S"], time: Float[Tensor, "B"], level: Int[Tensor, "B"] | None,
               columns: Int[Tensor, "B n"] | None = None) -> Float[Tensor, "B columns d"]:
        """Of all columns, or of some of each sequence."""
        count = len(nodes)
        if rounded(nodes) and (missing := round_up(count, self.rows) - count):
            def filled(values: Tensor) -> Tensor:
                return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])

            nodes, time = filled(nodes), filled(time)
            level, columns = (None if each is None else filled(each) for each in (level, columns))
        return self._hidden((nodes, time, level, columns))[:count]

    def _hidden(self, inputs: Inputs) -> Tensor:
        if not (self.works and recordable(inputs[0])):
            return self._plain(*inputs)
        kind = tuple(None if each is None else tuple(each.shape) for each in inputs)
        self.asked[kind] += 1
        if kind in self.recorded:
            return self.recorded[kind](*inputs)
        answer = self._plain(*inputs)
        if self.asked[kind] > BEFORE:
            self._record(kind, answer, inputs)
        return answer

    def _plain(self, nodes: Tensor, time: Tensor, level: Tensor | None, columns: Tensor | None) -> Tensor:
        if columns is None:
            return self.model.hidden(nodes, time, level)
        some = getattr(self.model, "hidden_at", None)
        return self.model.hidden(nodes, time, level).take_along_dim(columns[..., None], 1) if some is None else some(
            nodes, time, level, columns)

    def _record(self, kind: Any, answer: Tensor, inputs: Inputs) -> None:
        try:
            replay = record(self._plain, *inputs)
            again = replay(*inputs)
            self.works = bool((again - answer).norm() <= CLOSE * answer.norm())
        except RuntimeError as error:
            warnings.warn(f"sampling goes on without CUDA graphs: {str(error).splitlines()[0]}", RuntimeWarning, stacklevel=2)
            self.works = False
        else:
            if self.works:
                self.recorded[kind] = replay


def round_up(count: int, most: int) -> int:
    """The next of few sizes: powers of two up to 16, multiples of 8 above; never more than `most`."""
    return min(1 << max(count - 1, 0).bit_length() if count <= 16 else -(-count // 8) * 8, most)


def rounded(nodes: Tensor) -> bool:
    return nodes.is_cuda


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
