"""Sweeps over the rows of tables for the embedding and the heads: plain formulas, for any device.

On a GPU `rows_triton` does the same in one kernel each; these are their slow twins, and what a CPU runs.
"""
from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from .passes import usable


@functools.cache
def _triton() -> ModuleType | None:
    if not usable():
        return None
    from . import rows_triton

    return rows_triton


def fast(x: Tensor) -> ModuleType | None:
    """The GPU's kernels, where they can run."""
    return _triton() if x.is_cuda and x.dtype != torch.float64 else None


def gather(table: Float[Tensor, "rows d"], index: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape d"]:
    """table[index], in another dtype."""
    if (kernels := fast(table)) is not None:
        return kernels.gather(table, index, dtype)
    return table[index].to(dtype)


def place(values: Float[Tensor, "blocks d"], source: Int[Tensor, "M"], target: Int[Tensor, "M"],
          out: Float[Tensor, "rows d"]) -> None:
    """out[target] = values[source]; no target twice."""
    if (kernels := fast(values)) is not None:
        kernels.place(values, source, target, out)
    else:
        out[target] = values[source].to(out.dtype)


def add_runs(values: Float[Tensor, "M d"], key: Int[Tensor, "M"], out: Float[Tensor, "rows d"],
             order: Int[Tensor, "M"] | None = None) -> None:
    """out[key[i]] += values[order[i]] for sorted keys."""
    if (kernels := fast(values)) is not None:
        kernels.add_runs(values, key, out, order)
    else:
        out.index_add_(0, key.long(), (values if order is None else values[order]).to(out.dtype))


def choose(logits: Float[Tensor, "M n"], offset: Float[Tensor, "G n"] | None, group: Int[Tensor, "M"], limit: Int[Tensor, "G"],
           slot: Int[Tensor, "M"], share: Float[Tensor, "M"] | None) -> Float[Tensor, "M"]:
    """-log softmax(logits + offset[group])[slot] over the first limit[group] classes. With shares, the gradient of
    sum(share nll) takes the logits' place."""
    if (kernels := fast(logits)) is not None:
        return kernels.choose(logits, offset, group, limit, slot, share)
    value = logits.to(torch.promote_types(logits.dtype, torch.float32))
    value = value if offset is None else value + offset[group]
    value = value.masked_fill(torch.arange(value.shape[1], device=value.device) >= limit[group][:, None], -torch.inf)
    log_p = value.log_softmax(-1)
    if share is not None:
        onehot = torch.zeros_like(log_p).scatter_(1, slot[:, None].long(), 1.0)
        logits.copy_((log_p.exp() - onehot) * share[:, None])
    return -log_p.gather(1, slot[:, None].long())[:, 0]


def choose_wide(logits: Float[Tensor, "M n"], offset: Float[Tensor, "n"], target: Int[Tensor, "M"],
                share: Float[Tensor, "M"] | None, until: Int[Tensor, "M"] | None = None) -> Float[Tensor, "M"]:
    """-log of what softmax(logits + offset) gives class `target`, or all of target <= v < until. With shares, the gradient of
    sum(share nll) takes the logits' place: share (softmax - softmax within the stretch)."""
    if (kernels := fast(logits)) is not None:
        return kernels.choose_wide(logits, offset, target, share, until)
    value = logits.to(torch.promote_types(torch.float32, logits.dtype)) + offset
    normaliser, low = value.logsumexp(-1, keepdim=True), target[:, None]
    if until is None:
        aim = value.gather(1, low)
    else:
        classes = torch.arange(value.shape[1], device=value.device)
        within = value.masked_fill((classes < low) | (classes >= until[:, None]), -torch.inf)
        aim = within.logsumexp(-1, keepdim=True)
    if share is not None:
        slope = value.sub_(normaliser).exp_()
        slope = slope.scatter_add_(1, low, torch.full_like(aim, -1)) if until is None else slope.sub_((within - aim).exp_())
        logits.copy_(slope.mul_(share[:, None].to(slope.dtype)))
    return (normaliser - aim)[:, 0]


class Survey(NamedTuple):
    """What a loss may know of a distribution: log p of two classes and the sum of softplus(k + log p_v) over all v."""

    first: Float[Tensor, "M"]
    second: Float[Tensor, "M"]
    spread: Float[Tensor, "M"]


def survey(logits: Float[Tensor, "M n"], offset: Float[Tensor, "n"], pair: Int[Tensor, "M 2"],
           k: Float[Tensor, "M"]) -> tuple[Survey, Float[Tensor, "M"], Float[Tensor, "M"]]:
    """p = softmax(logits + offset) looked at, its normaliser, and the derivative of the spread by k."""
    if (kernels := fast(logits)) is not None:
        found, normaliser, lift = kernels.survey(logits, offset, pair, k)
        return Survey(*found), normaliser, lift
    value = logits.to(torch.promote_types(torch.float32, logits.dtype)) + offset
    normaliser = value.logsumexp(1)
    log_p = value - normaliser[:, None]
    raised = log_p + k.to(value.dtype)[:, None]
    spread = functional.softplus(raised, threshold=40.0).sum(1)
    first, second = log_p.gather(1, pair).unbind(1)
    return Survey(first, second, spread), normaliser, raised.sigmoid().sum(1)


def tilt(logits: Float[Tensor, "M n"], offset: Float[Tensor, "n"], pair: Int[Tensor, "M 2"], k: Float[Tensor, "M"],
         normaliser: Float[Tensor, "M"], lift: Float[Tensor, "M"], slope: Survey) -> None:
    """The gradient by the logits takes their place, where `slope` is that by what `survey` found:

        first [v = pair_0] + second [v = pair_1] + spread sigmoid(k + log p_v) - (first + second + spread lift) p_v."""
    if (kernels := fast(logits)) is not None:
        kernels.tilt(logits, offset, pair, k, normaliser, lift, slope)
        return
    log_p = logits.to(normaliser.dtype) + offset - normaliser[:, None]
    first, second, spread = (values[:, None] for values in slope)
    result = (log_p + k.to(log_p.dtype)[:, None]).sigmoid_().mul_(spread)
    result.sub_(log_p.exp_().mul_(first + second + spread * lift[:, None]))
    logits.copy_(result.scatter_add_(1, pair[:, :1], first).scatter_add_(1, pair[:, 1:], second))


class Embed(torch.autograd.Function):
    """Rows of the embedding as the start of the stream, in its dtype; backwards the gradients of equal nodes are added up in
    runs instead of one by one (half of all positions may show the root)."""

    @staticmethod
    def forward(context: Any, weight: Tensor, nodes: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        context.save_for_backward(nodes)
        context.table = (weight.shape, weight.dtype)
        return gather(weight.detach(), nodes, dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (nodes,), (shape, dtype) = context.saved_tensors, context.table
        key, order = nodes.flatten().sort()
        total = torch.zeros(shape, dtype=dtype, device=gradient.device)
        add_runs(gradient.reshape(-1, shape[1]), key, total, order)
        return total, None, None


class Take(torch.autograd.Function):
    """Some rows, none twice; backwards they are put back among zeros, without looking for rows that were taken twice."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, index: Tensor) -> Tensor:  # type: ignore[override]
        context.save_for_backward(index)
        context.rows = len(hidden)
        return hidden.detach().index_select(0, index)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (index,) = context.saved_tensors
        return gradient.new_zeros(context.rows, gradient.shape[1]).index_copy_(0, index, gradient), None


def embed(embedding: nn.Embedding, nodes: Int[Tensor, "B S"], dtype: torch.dtype) -> Float[Tensor, "B S d"]:
    return Embed.apply(embedding.weight, nodes, dtype)  # type: ignore[no-any-return]


def take(hidden: Float[Tensor, "N d"], index: Int[Tensor, "M"]) -> Float[Tensor, "M d"]:
    return Take.apply(hidden, index)  # type: ignore[no-any-return]


def take_parts(hidden: Float[Tensor, "N d"], index: Int[Tensor, "M"], sizes: list[int]) -> Float[Tensor, "M d"]:
    """Rows that are taken again, but not within one of the parts of these sizes."""
    return torch.cat([take(hidden, part) for part in index.split(sizes or [0])])
