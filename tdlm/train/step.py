"""One update of the weights, and the running sums a progress line needs.

Nothing here waits for the device: losses, norms and the flag for numbers that are not finite stay there until
`Trainer.read` asks for them all at once.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import TrainConfig
from ..errors import ConfigError, RunError
from ..model.kernels.passes import usable
from ..model.kernels.recording import Recording
from ..model.model import Model, autocast
from ..objectives.base import Loss, Objective
from ..rng import Draws
from .checkpoint import Checkpoint, fill, model_tensors
from .optimizer import (
    MovingAverage,
    clip_gradients,
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)

_HEAD = 5  # steps, loss, gradient norm, bound, tokens; then the levels


@dataclass(frozen=True)
class Sums:
    """Means over the updates since the last reading."""

    updates: int
    loss: float
    grad_norm: float
    bound: float
    tokens: int
    levels: list[float]


class Trainer:
    """Model, optimizer and averaged weights, moved forward one update at a time."""

    def __init__(self, model: Model, objective: Objective, config: TrainConfig, device: torch.device):
        self.model, self.objective, self.config, self.device = model, objective, config, device
        self.optimizer = make_optimizer(model, config)
        self.average = None if config.ema is None else MovingAverage(model, config.ema)
        self.done = 0
        """Updates made so far."""
        self.sums = torch.zeros(_HEAD + int(objective.levels), dtype=torch.float64, device=device)
        self.bad = torch.full((), -1.0, dtype=torch.float64, device=device)
        if device.type == "cuda" and getattr(model.backbone, "fused", None) is not None:
            model.backbone.recording = Recording(copies=self.micros > 1)

    @property
    def micros(self) -> int:
        return self.config.batch // (self.config.micro_batch or self.config.batch)

    def update(self, batches: Iterable[Any]) -> None:
        """One update from the step's micro-batches; each row's noise depends on its number in the step alone."""
        step = self.done
        self.optimizer.zero_grad(set_to_none=True)  # of an update that was broken off
        set_learning_rate(self.optimizer, learning_rate(step, self.config))
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        for batch in batches:
            with autocast(self.device, self.config.dtype):
                loss = self.loss(batch, step)
            share = len(batch.tokens) / self.config.batch
            (loss.train * share).backward()
            finite &= torch.isfinite(loss.train.detach())
            self._add(loss, share)
        norm = clip_gradients(self.optimizer, self.config.grad_clip)
        finite &= torch.isfinite(norm)
        self.sums[0] += 1
        self.sums[2] += norm
        self.bad = torch.where(finite | (self.bad >= 0), self.bad, float(step + 1))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done = step + 1
        if self.average is not None:
            self.average.update(self.done)

    def loss(self, batch: Any, step: int) -> Loss:
        if self.prepare is None:
            return self.objective.loss(self.model, batch.tokens.to(self.device, non_blocking=True), draws=self.draws(batch, step))
        prepared = getattr(batch, "prepared", None) or self.prepare(batch, step)
        return self.objective.complete(self.model, prepared)  # type: ignore[attr-defined]

    def draws(self, batch: Any, step: int) -> Draws:
        return Draws(self.config.seed, step, "train", batch.rows.cpu(), self.config.batch, self.device)

    @property
    def prepare(self) -> Callable[[Any, int], Any] | None:
        """The processor's part of a batch's loss, which a thread may make beforehand; None where there is nothing to gain."""
        make = getattr(self.objective, "prepare", None) if getattr(self.objective, "prepares", False) else None
        if make is None or self.device.type != "cuda":
            return None
        return lambda batch, step: make(self.model.head, batch.tokens, self.draws(batch, step))

    @torch.no_grad()
    def _add(self, loss: Loss, share: float) -> None:
        self.sums[1] += loss.train.detach().double() * share
        self.sums[3] += loss.bound.detach().double().sum()
        self.sums[4] += loss.parts["tokens"].double().sum()
        self.sums[_HEAD:] += loss.parts["levels"].detach().double().sum(0)

    def check(self) -> None:
        """Stop before anything bad is written. Waits for the device."""
        if (bad := int(self.bad)) >= 0:
            raise RunError(f"step {bad}: the loss or the gradient is not finite; nothing after the last checkpoint was "
                           "saved. Train into a new folder with a lower --set train.lr, or --set train.dtype=float32")

    def read(self) -> Sums:
        """The means since the last reading, which starts anew. Waits for the device once."""
        updates, loss, norm, bound, tokens, *levels = self.sums.tolist()
        self.sums.zero_()
        self.check()
        return Sums(int(updates), loss / updates, norm / updates, bound / tokens if tokens else math.nan, int(tokens),
                    [level / tokens if tokens else math.nan for level in levels])

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint must hold for a bit-identical continuation."""
        parts = {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self.optimizer, self.model)}
        return parts if self.average is None else {**parts, "ema": self.average.weights}

    def state(self) -> dict[str, Any]:
        """The numbers beside the tensors; a checkpoint may fall between two progress lines."""
        return {"sums": self.sums.tolist()}

    def restore(self, checkpoint: Checkpoint) -> None:
        fill(self.model, checkpoint.tensors("model"), checkpoint.path)
        restore_optimizer(self.optimizer, self.model, checkpoint.tensors("optimizer"))
        if self.average is not None:
            self.average.restore(checkpoint.tensors("ema"))
        self.sums.copy_(torch.tensor(checkpoint.state["sums"], dtype=torch.float64))
        self.done = checkpoint.step


MEMORY: dict[str, dict[str, Any]] = {
    "fast": {},
    "balanced": {"ban_recompute_materialized_backward": False, "recompute_views": True},
    "lean": {"aggressive_recomputation": True},
}
"""What a compiler may compute again in the backward pass instead of keeping it (switches of its partitioner):

    fast       its own choice: about 46 bytes a position, channel and block
    balanced   element-wise results that a product of the backward pass needs (activations, norms): about 32
    lean       everything but the results of products and attention: about 23

The DiT backbone on a GPU needs no compiler: its blocks are fused by hand (`model/kernels/stack.py`) and keep 22 bytes (fast,
balanced) or 14 (lean).
"""


def compile_backbone(model: Model, device: torch.device, wanted: bool | None, memory: str = "fast", float8: bool = False,
                     available: Callable[[], bool] | None = None) -> bool:
    """Make the backbone fast in place when asked, or when nobody asked and the device is a GPU with Triton: with its own fused
    blocks where it has them, else by compiling it."""
    gpu = device.type == "cuda"
    if float8:
        check_float8(model, device, wanted)
    if wanted is None:
        wanted = gpu and (available or usable)()
    if not wanted:
        if memory != "fast":
            raise ConfigError(f"train.memory={memory} is a choice of the compiler's, and this run is not compiled: use "
                              "--compile True, or --set train.memory=fast with a smaller train.micro_batch")
    elif gpu and hasattr(model.backbone, "fused"):
        model.backbone.fused, model.backbone.float8 = "lean" if memory == "lean" else "fast", float8
    else:
        model.backbone.compile(dynamic=False, backend=_keeping(memory))
    return bool(wanted)


def check_float8(model: Model, device: torch.device, wanted: bool | None) -> None:
    """Products in eight bits need fused blocks and a GPU with units for them."""
    where = "use --set train.float8=false"
    if not hasattr(model.backbone, "fused") or wanted is False:
        raise ConfigError(f"train.float8 needs the DiT backbone with its fused blocks; {where}")
    if model.backbone.width % 16:
        raise ConfigError(f"train.float8 needs a backbone.width that is a multiple of 16, got {model.backbone.width}; {where}")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        raise ConfigError(f"train.float8 needs a GPU that multiplies in eight bits (Ada, Hopper or newer); {where}")


def _keeping(memory: str) -> Callable[..., Any]:
    """The compiler with these switches, set while it works and not beyond."""
    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(**MEMORY[memory]):
            return compile_fx(graph, inputs)

    return compiler

