"""The device that was asked for, or a sentence that says why it cannot be had."""
from __future__ import annotations

import torch

from .errors import ConfigError


def choose_device(name: str | None) -> torch.device:
    """cpu, cuda or cuda:N; without a wish the GPU if there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}; use cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch finds no GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} was asked for, but there are {torch.cuda.device_count()} GPUs, counted from 0")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and graphs go to the current one
    return device
