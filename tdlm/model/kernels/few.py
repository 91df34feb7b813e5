"""The tied head's logits at a few positions whose parents only the device knows: what a sampler asks for.

In training the processor knows where every position stands and sorts positions by parent (`sorted_ce`). A sampler's parents
were drawn a moment ago, on the device, and to look at them is to wait for it. But few positions move in a step: each of them
gathers the rows of its own children, K x d numbers, which costs less than waiting. A bundle with one parent (the root) is a
plain product.
"""
from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import rows
from .grouped import Groups

LIMIT = 2**28
"""Entries of the gathered rows; more positions are done in parts."""


def few_logits(hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], weight: Float[Tensor, "rows d"],
               bias: Float[Tensor, "rows"] | None, groups: Groups, branching: int) -> Float[Tensor, "M K"]:
    """h . E[child] + b[child], at least float32; anything at slots that the parent does not have."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    states, rank = hidden.to(dtype), groups.rank[parent]
    logits = torch.zeros(len(states), branching, device=states.device, dtype=torch.promote_types(dtype, torch.float32))
    with torch.autocast(device, enabled=False):
        for bundle in groups.bundles:
            group = rank - bundle.first
            inside = (group >= 0) & (group < len(bundle.table))
            kids = bundle.table[group.clamp(0, len(bundle.table) - 1)][:, :branching]
            if len(bundle.table) == 1:
                products = states @ rows.gather(weight, bundle.table[0, :branching], dtype).T
            else:
                products = _gathered(states, kids, weight)
            scores = products.to(logits.dtype) if bias is None else products + bias[kids].to(logits.dtype)
            logits[:, : kids.shape[1]] = torch.where(inside[:, None], scores, logits[:, : kids.shape[1]])
    return logits


def _gathered(states: Float[Tensor, "M d"], kids: Int[Tensor, "M n"], weight: Float[Tensor, "rows d"]) -> Float[Tensor, "M n"]:
    part = max(1, LIMIT // (kids.shape[1] * states.shape[1]))
    pieces = [torch.bmm(rows.gather(weight, some, states.dtype), state[:, :, None])[:, :, 0]
              for state, some in zip(states.split(part), kids.split(part))]
    return torch.cat(pieces)
