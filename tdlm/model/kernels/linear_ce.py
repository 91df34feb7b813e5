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

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .rows import choose_wide

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
        return (nll * share.to(nll.dtype)).sum(), nll
    return _LinearCrossEntropy.apply(hidden, weight, bias, target, share, classes, until)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, share: Tensor,  # type: ignore[override]
                classes: int | None, until: Tensor | None) -> tuple[Tensor, Tensor]:
        nll, *gradients = _blocks(hidden, weight, bias, target, share, classes, until)
        context.save_for_backward(*gradients)
        context.mark_non_differentiable(nll)
        return (nll * share.to(nll.dtype)).sum(), nll

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
    wide = _rounded(real)
    rows = max(1, BLOCK_BYTES // (wide * dtype.itemsize) // ALIGNED * ALIGNED)
    rows = min(rows, _rounded(-(-count // max(1, -(-count // rows)))) or 1)  # equal blocks, no small one left at the end
    h = hidden.detach().to(dtype)
    nll = torch.empty(count, device=h.device, dtype=torch.promote_types(torch.float32, dtype))
    matrix, offset = torch.zeros(wide, h.shape[1], device=h.device, dtype=dtype), torch.zeros_like(nll[:1]).repeat(wide)
    matrix[:real] = weight.detach()
    if bias is not None:
        offset[:real] = bias.detach()
    offset[real if classes is None else classes:] = -torch.inf
    grads = None if share is None else (torch.empty_like(h), torch.zeros_like(matrix, dtype=nll.dtype), torch.zeros_like(offset))
    room = torch.empty(min(rows, count), wide, device=h.device, dtype=dtype)
    with torch.autocast(device, enabled=False), torch.no_grad():
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits = torch.mm(h[part], matrix.T, out=room[:min(rows, count - start)])
            nll[part] = choose_wide(logits, offset, target[part], None if share is None else share[part],
                                    None if until is None else until[part])
            if grads is not None:  # the logits' gradient lies in their place now
                grads[0][part] = logits @ matrix
                grads[1].add_(logits.T @ h[part])
                grads[2].add_(logits.sum(0, dtype=offset.dtype))
    if grads is None:
        return nll, None, None, None
    return (nll, grads[0].to(hidden.dtype), grads[1][:real].to(weight.dtype),
            None if bias is None else grads[2][:real].to(bias.dtype))


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
