"""Cross-entropy over children for positions that lie sorted by parent, with the lengths of the groups known to the processor.

The tied head scores child k of parent u by the row of that child in the embedding. Positions of one parent are neighbours, so
a height of the tree is one grouped matrix product with the children's rows, its softmax one sweep that leaves the gradient of
the logits in their place, and the way back two more grouped products. Every node is the child of one parent: the gradient
of the embedding is a placing of rows, with nothing to add up.
"""
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from . import rows
from .grouped import Bundle, Groups
from .passes import outer


def sorted_cross_entropy(hidden: Float[Tensor, "M d"], weight: Float[Tensor, "rows d"], bias: Float[Tensor, "rows"] | None,
                         slot: Int[Tensor, "M"], share: Float[Tensor, "M"], group: Int[Tensor, "M"], ends: Int[Tensor, "G"],
                         bounds: list[int], groups: Groups) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """(sum of share x nll, which is differentiated; nll). `group` (rank of the parent, rising) and `ends` (where each group ends)
    lie on the device; `bounds` (where each bundle of parents ends) is known to the processor."""
    return _Sorted.apply(hidden, weight, bias, slot, share, group, ends, bounds, groups)  # type: ignore[no-any-return]


class _Sorted(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, slot: Tensor, share: Tensor,  # type: ignore[override]
                group: Tensor, ends: Tensor, bounds: list[int], groups: Groups) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        states, table = hidden.detach().to(dtype), weight.detach()
        assert bounds[-1] == len(states), "positions without a group have no answer here"
        nll = torch.empty(len(states), device=states.device, dtype=torch.promote_types(dtype, torch.float32))
        matrices, slopes = [], []
        with torch.autocast(device, enabled=False):
            for bundle, part in _parts(groups, bounds):
                matrix = rows.gather(table, bundle.table, dtype)
                logits = _product(states[part], matrix.transpose(1, 2), _ends(ends, bundle, part))
                offset = None if bias is None else bias.detach()[bundle.table].to(nll.dtype)
                nll[part] = rows.choose(logits, offset, group[part] - bundle.first, bundle.limit, slot[part], share[part])
                matrices.append(matrix)
                slopes.append(logits)
        context.save_for_backward(states, group, ends, *matrices, *slopes)
        context.groups, context.bounds = groups, bounds
        context.like = (hidden.dtype, weight.dtype, weight.shape, None if bias is None else bias.dtype)
        context.mark_non_differentiable(nll)
        return (nll * share.to(nll.dtype)).sum(), nll

    @staticmethod
    def backward(context: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, group, ends, *saved = context.saved_tensors
        hidden_kind, weight_kind, shape, bias_kind = context.like
        groups, bundles = context.groups, len(saved) // 2
        dhidden = torch.empty_like(states)
        dweight = torch.zeros(shape, dtype=weight_kind, device=states.device)
        dbias = None if bias_kind is None else torch.zeros(shape[0], dtype=bias_kind, device=states.device)
        for (bundle, part), matrix, slope in zip(_parts(groups, context.bounds), saved[:bundles], saved[bundles:]):
            slope, limits = slope * scale.to(slope.dtype), _ends(ends, bundle, part)
            dhidden[part] = _product(slope, matrix, limits)
            blocks = _outer(slope, states[part], limits)
            rows.place(blocks.view(-1, shape[1]), bundle.place, bundle.child, dweight)
            if dbias is not None:
                sums = torch.zeros(bundle.table.shape, dtype=torch.promote_types(slope.dtype, torch.float32), device=slope.device)
                rows.add_runs(slope, group[part] - bundle.first, sums)
                dbias[bundle.child] = sums.flatten()[bundle.place].to(bias_kind)
        return dhidden.to(hidden_kind), dweight, dbias, None, None, None, None, None, None


def _parts(groups: Groups, bounds: list[int]) -> list[tuple[Bundle, slice]]:
    """The bundles that have positions, and where these lie."""
    starts = [0, *bounds[:-1]]
    return [(bundle, slice(a, b)) for bundle, a, b in zip(groups.bundles, starts, bounds, strict=True) if b > a]


def _ends(ends: Tensor, bundle: Bundle, part: slice) -> Tensor:
    """Where the groups of a bundle end, counted from its first position."""
    return ends[bundle.first: bundle.first + len(bundle.table)] - part.start


def _product(left: Float[Tensor, "M a"], right: Float[Tensor, "G a b"], ends: Int[Tensor, "G"]) -> Float[Tensor, "M b"]:
    if len(right) == 1:
        return left @ right[0]
    return torch._grouped_mm(left, right, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def _outer(left: Float[Tensor, "M a"], right: Float[Tensor, "M b"], ends: Int[Tensor, "G"]) -> Float[Tensor, "G a b"]:
    if len(ends) == 1:
        return outer(left, right)[None]
    return torch._grouped_mm(left.T, right, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def limited_cross_entropy(hidden: Float[Tensor, "M d"], weight: Float[Tensor, "n d"], bias: Float[Tensor, "n"],
                          parent: Int[Tensor, "M"], limit: Int[Tensor, "N"], slot: Int[Tensor, "M"],
                          share: Float[Tensor, "M"]) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
    """The same with one matrix for all parents, of which parent u uses the first limit[u] rows."""
    return _Limited.apply(hidden, weight, bias, parent, limit, slot, share)  # type: ignore[no-any-return]


class _Limited(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, bias: Tensor, parent: Tensor, limit: Tensor,  # type: ignore[override]
                slot: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        states, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
        with torch.autocast(device, enabled=False):
            logits = torch.addmm(bias.detach().to(dtype), states, matrix.T)
            nll = rows.choose(logits, None, parent, limit, slot, share)
        context.save_for_backward(states, matrix, logits)
        context.kinds = (hidden.dtype, weight.dtype, bias.dtype)
        context.mark_non_differentiable(nll)
        return (nll * share.to(nll.dtype)).sum(), nll

    @staticmethod
    def backward(context: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, matrix, slope = context.saved_tensors
        hidden_kind, weight_kind, bias_kind = context.kinds
        slope = slope * scale.to(slope.dtype)
        dweight = outer(slope, states)
        return ((slope @ matrix).to(hidden_kind), dweight.to(weight_kind),
                slope.sum(0, dtype=torch.promote_types(slope.dtype, torch.float32)).to(bias_kind), None, None, None, None)
