"""Cross-entropy of a wide linear layer without ever holding all its logits.

For M positions, V classes and weights g per position,

    total = sum_m g_m nll_m,     nll_m = logsumexp_v(h_m . W_v + b_v) - (h_m . W_c + b_c),  c the target of m

is computed some rows at a time. The gradient of a row's logits is g_m (softmax - onehot), known as soon as its logits are,
so both matrix products of the backward pass are done in the same visit and the logits are thrown away: 3 products of size
M x V x d in all, none of them twice, and memory for one block of rows. `nll` comes back detached, for the bound.

With `until` the target is a stretch of classes, all as good: nll = logsumexp over all - logsumexp over target <= v < until,
whose gradient is softmax - softmax within the stretch (a cluster that is as likely as its tokens together).

`survey_loss` does the same for a loss that needs more of a distribution than one probability (GIDD's at every position).

A flat model's strongest form: the efficiency of a tree is to be measured against this, not against V-wide logits.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .rows import Survey, choose_wide, survey, tilt

BLOCK_BYTES = 1 << 29
"""Memory for one block of logits."""
ALIGNED = 64
"""The matrix is padded to a multiple of so many rows: odd widths take the matrix units' slow path."""
Visit = Callable[[Tensor, Tensor, slice, bool], Tensor]
"""(logits, offset of each class, which positions, whether the gradient by the logits shall take their place) -> a number for each
position; the gradient is that of sum(share x number)."""


def linear_cross_entropy(hidden: Float[Tensor, "M d"], weight: Float[Tensor, "rows d"], bias: Float[Tensor, "rows"] | None,
                         target: Int[Tensor, "M"], share: Float[Tensor, "M"], classes: int | None = None,
                         until: Int[Tensor, "M"] | None = None) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """(sum of share x nll, nll without gradient). `classes`: how many rows of `weight` are real (the rest is padding)."""
    def visit(logits: Tensor, offset: Tensor, part: slice, gradient: bool) -> Tensor:
        end = None if until is None else until[part]
        return choose_wide(logits, offset, target[part], share[part] if gradient else None, end)

    return _in_blocks(hidden, weight, bias, share, classes, visit)


def survey_loss(hidden: Float[Tensor, "M d"], weight: Float[Tensor, "rows d"], bias: Float[Tensor, "rows"] | None,
                pair: Int[Tensor, "M 2"], k: Float[Tensor, "M"], share: Float[Tensor, "M"],
                loss: Callable[[Survey, slice], Tensor],
                classes: int | None = None) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """(sum of share x loss, loss without gradient) for a loss that is a function of log p of two classes and of
    sum over v of softplus(k + log p_v)."""
    def visit(logits: Tensor, offset: Tensor, part: slice, gradient: bool) -> Tensor:
        found, normaliser, lift = survey(logits, offset, pair[part], k[part])
        with torch.enable_grad():
            known = Survey(*(values.double().requires_grad_(gradient) for values in found))
            cost = loss(known, part)
            slopes = torch.autograd.grad((cost * share[part]).sum(), known) if gradient else None
        if slopes is not None:
            tilt(logits, offset, pair[part], k[part], normaliser, lift, Survey(*(slope.to(lift.dtype) for slope in slopes)))
        return cost.detach()

    return _in_blocks(hidden, weight, bias, share, classes, visit)


def _in_blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor, classes: int | None,
               visit: Visit) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        values = _blocks(hidden, weight, bias, classes, visit, False)[0]
        return (values * share.to(values.dtype)).sum(), values
    return _InBlocks.apply(hidden, weight, bias, share, classes, visit)  # type: ignore[no-any-return]


class _InBlocks(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor,  # type: ignore[override]
                classes: int | None, visit: Visit) -> tuple[Tensor, Tensor]:
        values, *gradients = _blocks(hidden, weight, bias, classes, visit, True)
        context.save_for_backward(*gradients)
        context.mark_non_differentiable(values)
        return (values * share.to(values.dtype)).sum(), values

    @staticmethod
    def backward(context: Any, total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias = (None if g is None else g * total.to(g.dtype) for g in context.saved_tensors)
        return hidden, weight, bias, None, None, None


def _blocks(hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: int | None, visit: Visit,
            gradient: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The number of every position and, where wanted, the gradients of sum(share x number) by hidden, weight and bias."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    single = torch.promote_types(torch.float32, dtype)
    count, real = len(hidden), weight.shape[0]
    wide = _rounded(real)
    rows = max(1, BLOCK_BYTES // (wide * dtype.itemsize) // ALIGNED * ALIGNED)
    rows = min(rows, _rounded(-(-count // max(1, -(-count // rows)))) or 1)  # equal blocks, no small one left at the end
    h = hidden.detach().to(dtype)
    matrix = torch.zeros(wide, h.shape[1], device=h.device, dtype=dtype)
    offset = torch.zeros(wide, device=h.device, dtype=single)
    matrix[:real] = weight.detach()
    if bias is not None:
        offset[:real] = bias.detach()
    offset[real if classes is None else classes:] = -torch.inf
    grads = (torch.empty_like(h), torch.zeros_like(matrix, dtype=single), torch.zeros_like(offset)) if gradient else None
    room, values = torch.empty(min(rows, count), wide, device=h.device, dtype=dtype), []
    with torch.autocast(device, enabled=False), torch.no_grad():
        for start in range(0, count, rows) if count else (0,):
            part = slice(start, start + rows)
            logits = torch.mm(h[part], matrix.T, out=room[:count - start])
            values.append(visit(logits, offset, part, gradient))
            if grads is not None:  # the logits' gradient lies in their place now
                grads[0][part] = logits @ matrix
                grads[1].add_(logits.T @ h[part])
                grads[2].add_(logits.sum(0, dtype=single))
    if grads is None:
        return torch.cat(values), None, None, None
    return (torch.cat(values), grads[0].to(hidden.dtype), grads[1][:real].to(weight.dtype),
            None if bias is None else grads[2][:real].to(bias.dtype))


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
