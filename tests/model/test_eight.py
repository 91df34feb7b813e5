"""Products in eight bits: as near as three bits of mantissa allow, on the processor and on a GPU that has them."""
from __future__ import annotations

import pytest
import torch

from tdlm.model.kernels import eight, passes

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    return float((ours.cpu().float() - truth).norm() / truth.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_matrices_keep_their_values_straight_and_transposed(device: str) -> None:
    """Sizes that are no multiples of a tile, very different sizes of entries, and nothing but zeros."""
    weights = [make(80, 48) * 0.02, make(144, 208, seed=1) * 300, torch.zeros(16, 32)]
    for weight, matrix in zip(weights, eight.narrowed([weight.to(device) for weight in weights]), strict=True):
        assert torch.equal(matrix.there.float().T, matrix.back.float())
        values = matrix.there.float() * matrix.scale
        assert error(values, weight) < 0.04 if bool(weight.any()) else not bool(values.any())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False])
def test_there(device: str, bias: bool) -> None:
    weight, x, offset = make(80, 48) * 0.02, make(64, 48, seed=1), make(80, seed=2)
    (matrix,) = eight.narrowed([weight.to(device)])
    out = eight.there((x * passes.GAIN).to(passes.FLOAT8).to(device), matrix, offset.bfloat16().to(device) if bias else None)
    assert out.dtype == torch.bfloat16 and error(out, x @ weight.T + (offset if bias else 0)) < 0.06


@pytest.mark.parametrize("device", DEVICES)
def test_back(device: str) -> None:
    """Rows of very different sizes lose as little as others; rows of zeros stay zero."""
    weight = make(80, 48) * 0.02
    dout = make(64, 80, seed=1) * 10.0 ** torch.linspace(-12, 3, 64)[:, None]
    dout[5] = 0
    narrow = passes._narrowed(dout)
    (matrix,) = eight.narrowed([weight.to(device)])
    out = eight.back(passes.Narrow(narrow.values.to(device), narrow.scale.to(device)), matrix).cpu().float()
    truth = dout @ weight
    assert not bool(out[5].any())
    assert all(error(ours, row) < 0.1 for i, (ours, row) in enumerate(zip(out, truth)) if i != 5)
