"""A matrix in float8, straight and transposed, in one sweep."""
# pyright: reportIndexIssue=false, reportMissingImports=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(weight, scale, straight, turned, O, I, LARGEST: tl.constexpr):  # noqa: E741 - the matrix's rows and columns
    o, i = tl.program_id(0) * 64 + tl.arange(0, 64), tl.program_id(1) * 64 + tl.arange(0, 64)
    at, inside = o[:, None] * I + i[None, :], (o < O)[:, None] & (i < I)[None, :]
    value = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) / tl.load(scale)
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
    tl.store(straight + at, value.to(straight.dtype.element_ty), mask=inside)
    at, inside = i[:, None] * O + o[None, :], (i < I)[:, None] & (o < O)[None, :]
    tl.store(turned + at, tl.trans(value).to(turned.dtype.element_ty), mask=inside)
