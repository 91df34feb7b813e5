"""Cross-entropy of a wide linear layer without ever holding all its logits.

For M positions, V classes and weights g per position,

    total = sum_m g_m nll_m,     nll_m = logsumexp_v(h_m . W_v + b_v) - (h_m . W_c + b_c),  c the target of m

is computed some rows at a time. The gradient of a row's logits is g_m (softmax - onehot), known as soon as its logits are,
so both matrix products of the backward pass are done in the same visit and the logits are thrown away: 3 products of size
M x V x d in all, none of them twice, and memory for one block of rows. `nll` comes back detached, for the bound.

With `until` the target is a stretch of classes, all as good: nll = logsumexp over all - logsumexp over target <= v < until,
whose gradient is softmax - softmax within the stretch (a cluster that is as likely as its tokens together).

A flat model's strongest form: the efficiency of a tree is to be measured against this, not against V-wide logits.
"""
from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .rows import fast

BLOCK_BYTES = 1 << 29
"""Memory for one block of logits."""
ALIGNED = 64
"""The matrix is padded to a multiple of so many rows: odd widths take the matrix units' slow path."""


def linear_cross_entropy(hidden: Float[Tensor, "M d"], weight: Float[Tensor, "rows d"], bias: Float[Tensor, "rows"] | None,
                         target: Int[Tensor, "M"], share: Float[Tensor, "M"], classes: int | None = None,
                         until: Int[Tensor, "M"] | None = None) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """(sum of share x nll, nll without gradient). `classes`: how many rows of `weight` are real (the rest is padding)."""
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        nll = _blocks(hidden, weight, bias, target, None, classes, until)[0]
        return (nll * share).sum(), nll
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, share, classes, until)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor,  # type: ignore[override]
                classes: int | None, until: Tensor | None) -> tuple[Tensor, Tensor]:
        nll, *gradients = _blocks(hidden, weight, bias, target, share, classes, until)
        context.save_for_backward(*gradients)
        context.mark_non_differentiable(nll)
        return (nll * share).sum(), nll

    @staticmethod
    def backward(context: Any, total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias = (None if g is None else g * total.to(g.dtype) for g in context.saved_tensors)
        return hidden, weight, bias, None, None, None, None


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor | None,
            classes: int | None, until: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """nll and, where shares are given, the gradients of sum(share x nll) by hidden, weight and bias."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    count, real = len(hidden), weight.shape[0]
    wide = -(-real // ALIGNED) * ALIGNED
    rows = max(1, min(count, BLOCK_BYTES // (wide * dtype.itemsize) // ALIGNED * ALIGNED))
    h = hidden.detach().to(dtype)
    nll = torch.empty(count, device=h.device, dtype=torch.promote_types(torch.float32, dtype))
    matrix, offset = torch.zeros(wide, h.shape[1], device=h.device, dtype=dtype), torch.zeros_like(nll[:1]).repeat(wide)
    matrix[:real] = weight.detach()
    if bias is not None:
        offset[:real] = bias.detach()
    offset[real if classes is None else classes:] = -torch.inf
    grads = None if share is None else (torch.empty_like(h), torch.zeros_like(matrix, dtype=nll.dtype), torch.zeros_like(offset))
    with torch.autocast(device, enabled=False):
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits, end = h[part] @ matrix.T, None if until is None else until[part]
            if grads is None or share is None:
                nll[part] = _nll(logits, offset, target[part], end)
                continue
            nll[part], dlogits, dbias = _visit(logits, offset, target[part], share[part], end)
            grads[0][part] = dlogits @ matrix
            grads[1].add_(dlogits.T @ h[part])
            grads[2].add_(dbias)
    if grads is None:
        return nll, None, None, None
    return (nll, grads[0].to(hidden.dtype), grads[1][:real].to(weight.dtype),
            None if bias is None else grads[2][:real].to(bias.dtype))


def _nll(logits: Tensor, offset: Tensor, target: Tensor, until: Tensor | None) -> Tensor:
    values = logits.to(torch.promote_types(torch.float32, logits.dtype)) + offset
    if until is None:
        return values.logsumexp(-1) - values.gather(1, target[:, None])[:, 0]
    return values.logsumexp(-1) - values.masked_fill(~_stretch(values, target, until), -torch.inf).logsumexp(-1)


def _stretch(values: Tensor, target: Tensor, until: Tensor) -> Tensor:
    classes = torch.arange(values.shape[1], device=values.device)
    return (classes >= target[:, None]) & (classes < until[:, None])


def _visit(logits: Tensor, offset: Tensor, target: Tensor, share: Tensor, until: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """nll of some rows, the gradient of their logits (in their place where it can be) and its sum over them."""
    if until is None and (kernels := fast(logits)) is not None:
        nll = kernels.choose_wide(logits, offset, target, share)
        return nll, logits, logits.sum(0, dtype=offset.dtype)
    return (_compiled_slope() if logits.is_cuda else _slope)(logits, offset, target, share, until)


def _slope(logits: Tensor, offset: Tensor, target: Tensor, share: Tensor, until: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    values = logits.to(torch.promote_types(torch.float32, logits.dtype)) + offset
    normaliser = values.logsumexp(-1, keepdim=True)
    if until is None:
        aim = values.gather(1, target[:, None])
        wanted = (torch.arange(logits.shape[1], device=logits.device) == target[:, None]).to(values.dtype)
    else:
        inside = values.masked_fill(~_stretch(values, target, until), -torch.inf)
        aim = inside.logsumexp(-1, keepdim=True)
        wanted = (inside - aim).exp()
    dlogits = ((values - normaliser).exp() - wanted) * share[:, None].to(values.dtype)
    return (normaliser - aim)[:, 0], dlogits.to(logits.dtype), dlogits.sum(0)


@functools.cache
def _compiled_slope() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`_slope` in two passes over a block instead of ten, where a compiler for the GPU is at hand."""
    if importlib.util.find_spec("triton") is None:
        return _slope
    return torch.compile(_slope, dynamic=None)
