"""A constant condition, put into the modulations of a DiT: W c + b becomes their bias, and W says nothing any more.

With that a network that was told the time can lend its weights to one that is told something else or nothing. Where the
condition really was constant (MDLM is always told time 0) the function stays the same; otherwise c is its mean, over
all times or over all levels, and the network that results is the best constant stand-in for the old one.
"""
from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from .transformer import TimeCondition

CONDITION = "backbone.condition."
TIMES = 1000


def time_condition(tensors: dict[str, Tensor], time: Float[Tensor, "B"]) -> Float[Tensor, "B c"]:
    """What the time condition among these tensors answers."""
    own = {name.removeprefix(CONDITION): value for name, value in tensors.items() if name.startswith(CONDITION)}
    module = TimeCondition(len(own["outer.bias"]))
    module.load_state_dict(own)
    with torch.no_grad():
        return module(time, None)


def mean_condition(tensors: dict[str, Tensor], width: int) -> Float[Tensor, "c"]:
    """The mean condition over t in (0, 1), or over the levels; zero for a network that is told nothing."""
    if f"{CONDITION}rows.weight" in tensors:
        return F.silu(tensors[f"{CONDITION}rows.weight"]).mean(0)
    if f"{CONDITION}outer.bias" in tensors:
        return time_condition(tensors, (torch.arange(TIMES) + 0.5) / TIMES).mean(0)
    return torch.zeros(width)


def fold_condition(tensors: dict[str, Tensor], condition: Float[Tensor, "c"]) -> dict[str, Tensor]:
    """The same tensors without a condition: every modulation has the bias W c + b and W = 0."""
    folded = {name: value for name, value in tensors.items() if not name.startswith(CONDITION)}
    for name in [name for name in folded if name.endswith("modulation.weight")]:
        bias = name.removesuffix("weight") + "bias"
        folded[bias] = (folded[name].double() @ condition.double() + folded[bias].double()).float()
        folded[name] = torch.zeros_like(folded[name])
    return folded
