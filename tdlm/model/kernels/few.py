"""The tied head's logits at a few positions whose parents only the device knows: what a sampler asks for.

In training the processor knows where every position stands and sorts positions by parent (`sorted_ce`). A sampler's parents
were drawn a moment ago, on the device, and to look at them is to wait for it. But few positions move in a step: they meet all
nodes in one product, and each picks those of its own children. For M positions of a tree over 50,000 tokens that is a product
M x 50,000 and little else, where gathering the children's rows would move K x d numbers for each position.
"""
from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

LIMIT = 2**28
"""Entries of the product; more positions are done in parts."""


def narrowed(weight: Tensor, hidden: Tensor) -> Tensor:
    """A matrix in the dtype of the hidden states. Autocast sees to that itself, once for all calls."""
    return weight if torch.is_autocast_enabled(hidden.device.type) else weight.to(hidden.dtype)


def few_logits(hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], weight: Float[Tensor, "rows d"],
               bias: Float[Tensor, "rows"] | None, children: Int[Tensor, "inner K"], tokens: int) -> Float[Tensor, "M K"]:
    """h . E[child] + b[child], at least float32; anything at slots that the parent does not have. `children` of the inner nodes,
    whose ids begin at `tokens`."""
    kids = children[(parent - tokens).clamp(min=0)].clamp(min=0)
    part = max(1, LIMIT // len(weight))
    table = narrowed(weight, hidden)
    products = torch.cat([F.linear(state, table).gather(1, some) for state, some in zip(hidden.split(part), kids.split(part))])
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    return wide if bias is None else wide + bias[kids].to(wide.dtype)
