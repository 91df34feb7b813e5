"""How to train on a card of a given size: `tdlm train RECIPE --card 8` (GiB), or `--card auto`.

Two settings trade memory for time and change nothing else: `train.micro_batch` (gradients of several passes add up to the
same step) and `train.memory` (`lean` makes the inside of every MLP again in the backward pass, for a twelfth of the speed). From
the prediction (`memory.py`), which is to fit into ROOM of the card:

    keep everything, with the largest micro-batch that fits, if a pass still has BUSY positions (or the whole batch);
    otherwise the largest micro-batch that fits with `lean`, where that is larger.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..config import RunConfig
from ..device import choose_device
from ..errors import ConfigError
from ..model.model import Model
from .memory import Predictor, has_fused, predictor

GIB = 2**30
CARDS = (6, 8, 12, 16, 24, 80)
"""GiB of the cards that a dry run answers for."""
ROOM = 0.9
"""Share of a card that may be filled: the driver and the desktop take some, and a prediction errs."""
BUSY = 8192
"""Positions in a pass that keep a GPU busy: with fewer, starting kernels and reading weights begin to show."""


class Choice(NamedTuple):
    config: RunConfig
    memory: dict[str, Any]
    """As predicted."""


def choose(config: RunConfig, model: Model, card: float, height: int = 1, fused: bool | None = None) -> Choice | None:
    """The configuration with micro-batch and memory for a card of so many bytes; None where not even one sequence fits."""
    everything = "fast" if config.train.memory == "lean" else config.train.memory
    kinds = (everything, "lean") if has_fused(model) and fused is not False else (config.train.memory,)
    fitting: list[Choice] = []
    for kind in kinds:
        tried = replace(config, train=replace(config.train, memory=kind))
        predict = predictor(tried, model, height, fused)
        micro = largest(predict, config.train.batch, card)
        if micro is not None:
            whole = None if micro == config.train.batch else micro
            fitting.append(Choice(replace(tried, train=replace(tried.train, micro_batch=whole)), predict(micro)))
            if whole is None or micro * config.data.length >= BUSY:
                break
    return max(fitting, key=lambda choice: choice.memory["micro_batch"], default=None)  # of equals the first


def largest(predict: Predictor, batch: int, card: float) -> int | None:
    """The largest divisor of the batch that fits."""
    most = int(card // predict(2**40)["per_sequence"])  # of so many that no fixed part counts
    for micro in reversed(divisors(batch, most)):
        if predict(micro)["total"] <= ROOM * card:
            return micro
    return None


def divisors(number: int, most: int) -> list[int]:
    """Up to `most`; of a number of any size."""
    small = [i for i in range(1, min(math.isqrt(number), most) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small if number // i <= most)})


def card_bytes(text: str, device: str | None = None) -> int:
    """From what was typed: a number of GiB, or `auto` for the memory of the device."""
    if text == "auto":
        chosen = choose_device(device)
        if chosen.type != "cuda":
            raise ConfigError("--card auto asks the GPU for its memory, and there is none; name a number of GiB, or leave it out")
        return int(torch.cuda.get_device_properties(chosen).total_memory)
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise ConfigError(f"--card is a number of GiB (8, 12, 24, ...) or auto, got {text!r}")
    return int(size * GIB)
