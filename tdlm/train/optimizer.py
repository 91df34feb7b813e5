"""AdamW with the paper's recipe, its learning-rate schedule, gradient clipping and the moving average of the weights.

Every parameter decays, embeddings, norms and biases too, as in the paper's code. The schedule at update i = 0, 1, ...
of N, with peak L, final ratio r and W warm-up updates, is

    lr(i) = L i / W                                              i < W    (update 0 changes nothing but the moments)
    lr(i) = L (r + (1 - r) (1 + cos(pi p)) / 2),  p = (i - W) / (N - W)   i >= W;  W = 0 starts at the peak.

The moving average after n updates is e <- d e + (1 - d) w with d = min(decay, (1 + n) / (10 + n)): the first updates
are not drowned by the initial weights.
"""
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ..config import TrainConfig
from ..errors import RunError

FUSED_DEVICES = ("cuda", "cpu")
STATE = ("step", "exp_avg", "exp_avg_sq")


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of update `step` (0-based), see the formula above."""
    if step < config.warmup:
        return config.lr * step / config.warmup
    progress = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """One parameter group: the recipe exempts nothing from weight decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(parameter.device.type in FUSED_DEVICES for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=config.lr, betas=config.betas, eps=config.eps,
                             weight_decay=config.weight_decay, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(optimizer: torch.optim.Optimizer, limit: float | None) -> Tensor:
    """The norm of all gradients before clipping; stays on the device, so nothing waits for it.

    A fused optimizer divides by a scale while it reads the gradients, which saves a pass over them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if limit is None:
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        return norm
    if optimizer.defaults["fused"]:
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # type: ignore[attr-defined]
    else:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as named tensors: no pickle, and independent of the parameters' order."""
    return {f"{kind}.{name}": optimizer.state[parameter][kind]
            for name, parameter in model.named_parameters() if parameter in optimizer.state for kind in STATE}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` gave."""
    known = {f"{kind}.{name}" for name, _ in model.named_parameters() for kind in STATE}
    if strange := sorted(set(tensors) - known):
        raise RunError(f"the checkpoint's optimizer state names {strange[0]!r}, which this model does not have; "
                       "it was written by another version of the model")
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        if f"step.{name}" in tensors:
            state = {kind: tensors[f"{kind}.{name}"] for kind in STATE}
            if state["exp_avg"].shape != parameter.shape:
                raise RunError(f"the checkpoint's optimizer state of {name!r} has shape "
                               f"{tuple(state['exp_avg'].shape)}, the model's is {tuple(parameter.shape)}")
            # the step count stays where the fused kernel wants it, the moments lie beside their parameter
            optimizer.state[parameter] = {kind: value.to(parameter.device, copy=True) for kind, value in state.items()}


class MovingAverage:
    """The exponential moving average of the weights (float32 like the weights themselves)."""

    def __init__(self, model: nn.Module, decay: float):
        self.model = model
        self.decay = decay
        self.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, updates: int) -> None:
        """Blend the current weights in; `updates` counts the optimizer's updates, this one included."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        current = [parameter.detach() for _, parameter in self.model.named_parameters()]
        get_ema_multi_avg_fn(decay)(list(self.weights.values()), current, updates)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, value in self.weights.items():
            if name not in tensors or tensors[name].shape != value.shape:
                raise RunError(f"the checkpoint has no averaged weights for {name!r} of shape {tuple(value.shape)}")
            value.copy_(tensors[name])

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model with the averaged weights inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self.model.named_parameters():
            kept = parameter.clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(kept)
