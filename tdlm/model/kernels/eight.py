"""Matrix products in eight bits: float8 inputs, sums in float32, results in bfloat16.

Of a block's twelve products six are made so: q k v, into and out of the MLP, there and back. On an H200 they take 0.5 to 0.65
of the time, and their inputs come out of sweeps that are made anyway (`passes`). Gradients of weights stay in bfloat16: they
would need both of their inputs transposed. A matrix has one scale, from its largest entry; gradients have one for each
position, norms and activations a fixed gain.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .passes import FLOAT8, GAIN, LARGEST, Narrow


class Matrix(NamedTuple):
    """A weight W (o, i) in float8, W = there x scale, and the same transposed for the way back."""

    there: Tensor
    back: Tensor
    scale: Float[Tensor, ""]
    unit: Float[Tensor, ""]
    """Root mean square of the entries."""


def narrowed(weights: Sequence[Tensor]) -> list[Matrix]:
    if not weights:
        return []
    largest = torch._foreach_norm(list(weights), float("inf"))  # pyright: ignore[reportPrivateImportUsage]
    scales = (torch.stack(largest).float() / LARGEST).clamp(min=1e-30)
    scales = scales[:, None].repeat(1, 4)[:, 0]  # 16 bytes apart, as the library wants addresses
    lengths = torch._foreach_norm(list(weights))  # pyright: ignore[reportPrivateImportUsage]
    return [_narrow(weight, scale, length / weight.numel() ** 0.5) for weight, scale, length in zip(weights, scales, lengths)]


def there(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias of x in float8 with the fixed gain."""
    if not x.is_cuda:
        return _slow(x, torch.full((1, 1), 1 / GAIN), matrix.there, matrix.scale, bias)
    return _scaled(x, matrix.there.T, _gain(x.device), matrix.scale, bias)


def back(x: Narrow, matrix: Matrix) -> Tensor:
    """x W of rows with scales of their own."""
    if not x.values.is_cuda:
        return _slow(x.values, x.scale, matrix.back, matrix.scale, None)
    scale = matrix.scale.expand(1, len(matrix.back)).contiguous()
    return _scaled(x.values, matrix.back.T, x.scale, scale, None)


def _scaled(left: Tensor, right: Tensor, scale: Tensor, unit: Tensor, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(left, right, scale, unit, bias=bias, out_dtype=torch.bfloat16,  # pyright: ignore[reportPrivateImportUsage]
                            use_fast_accum=True)


def _slow(x: Tensor, scale: Tensor, matrix: Tensor, unit: Tensor, bias: Tensor | None) -> Tensor:
    out = (x.float() * scale) @ (matrix.float() * unit).T
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


def _narrow(weight: Tensor, scale: Tensor, unit: Tensor) -> Matrix:
    values = (weight / scale).to(FLOAT8)
    return Matrix(values, values.view(torch.uint8).T.contiguous().view(FLOAT8), scale, unit)  # every device can transpose bytes


@functools.cache
def _gain(device: torch.device) -> Tensor:
    return torch.tensor(1 / GAIN, device=device)
