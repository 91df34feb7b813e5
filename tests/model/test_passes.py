"""The fused sweeps: what they compute, and that the GPU's kernels compute the same (in Triton's interpreter without a GPU)."""
from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import pytest
import torch

from tdlm.model.kernels import passes
from tdlm.model.kernels.passes import Modulation

B, S, D, HEADS, WIDTH = 3, 37, 24, 3, 8


def make(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def norm(rows: int, device: str = "cpu") -> Modulation:
    # slices of one table, as the blocks have them: rows are far apart
    table = make(rows, 3, D, seed=1, device=device)
    return Modulation(make(D, seed=2, device=device), table[:, 0], table[:, 1])


@pytest.fixture(scope="module")
def kernels() -> tuple[ModuleType, str]:
    pytest.importorskip("triton")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from tdlm.model.kernels import passes_triton

    return passes_triton, "cuda" if torch.cuda.is_available() else "cpu"


def same(fast: Any, slow: Any) -> None:
    for a, b in zip(fast, slow, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and torch.allclose(a.cpu(), b, atol=2e-4, rtol=1e-4)


def near(ours: Any, theirs: Any) -> None:
    """Rows in float8: equal but for a last digit here and there. (Triton's interpreter halves what should be rounded up to a
    power of two.)"""
    assert torch.allclose(ours[1].cpu(), theirs[1], rtol=1e-4)
    one, other = ours[0].cpu().float(), theirs[0].float()
    far = (one - other).abs() > 0.13 * other.abs() + 2e-3
    assert float((one != other).float().mean()) < 0.04 and not bool(far.any() if ours[0].is_cuda else far.float().mean() > 0.04)


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("first", [False, True])
def test_enter(kernels: tuple[ModuleType, str], rows: int, first: bool) -> None:
    fast, device = kernels
    x, branch, gate = make(B, S, D), None if first else make(B, S, D, seed=3), None if first else make(rows, D, seed=4)

    def on(where: str) -> list[Any]:
        return [x.to(where), None if branch is None else branch.to(where), None if gate is None else gate.to(where)]

    same(fast.enter(*on(device), *norm(rows, device), torch.float32), passes.enter(*on("cpu"), norm(rows), torch.float32))


@pytest.mark.parametrize("rows", [1, B])
@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(("first", "before", "again", "last"), [(True, False, True, False), (False, True, True, False),
                                                                (False, False, True, False), (False, False, False, True)])
def test_leave(kernels: tuple[ModuleType, str], rows: int, first: bool, before: bool, again: bool, last: bool,
               narrow: bool) -> None:
    fast, device = kernels
    x, branch, gate = make(B, S, D), None if first else make(B, S, D, seed=3), None if first else make(rows, D, seed=4)
    entered = passes.enter(x, branch if before else None, gate if before else None, norm(rows), torch.float32)

    def on(where: str) -> list[Any]:
        values = [None if last else make(B, S, D, seed=5), make(B, S, D, seed=6), x, branch, gate]
        return [None if value is None else value.clone().to(where) for value in values]

    statistics = (entered.mean.to(device), entered.rstd.to(device))
    narrow = narrow and not first
    *ours, mine = fast.leave(*on(device), *norm(rows, device), *statistics, before, again, narrow)
    *theirs, truth = passes.leave(*on("cpu"), norm(rows), entered.mean, entered.rstd, before=before, again=again, narrow=narrow)
    same(ours, theirs)
    assert (mine is None) == (truth is None) == (not narrow)
    if mine is not None:
        near(mine, truth)
        assert torch.allclose(mine[2].cpu(), truth.size, rtol=1e-4)


def test_bend(kernels: tuple[ModuleType, str]) -> None:
    fast, device = kernels
    h, dout = make(70, 40) * 3, make(70, 40, seed=1)
    assert torch.allclose(fast.bend(h.to(device)).cpu(), passes.bend(h), atol=1e-5)
    same(fast.unbend(h.clone().to(device), dout.clone().to(device)), passes.unbend(h.clone(), dout.clone()))


def test_rows_in_float8(kernels: tuple[ModuleType, str]) -> None:
    """What products in eight bits are fed with."""
    fast, device = kernels
    x, h = make(B, S, D) * 30, make(70, 40) * 30
    one = torch.ones(70, 1)
    ours = fast.enter(x.to(device), None, None, *norm(B, device), passes.FLOAT8)[1]
    near((ours, one), (passes.enter(x, None, None, norm(B), passes.FLOAT8).out, one))
    for mine, truth in zip(fast.bend_narrow(h.to(device)), passes.bend_narrow(h), strict=True):
        assert truth.float().abs().max() == passes.LARGEST, "nothing was cut"
        near((mine, one), (truth, one))
    kept = passes.bend_narrow(make(70, 40))[1]
    same(fast.unbend(kept.to(device), h.clone().to(device)), passes.unbend(kept, h.clone()))
    size, unit = torch.rand(70, 1), torch.tensor(0.3)
    *mine, values, scale = fast.unbend(kept.to(device), h.clone().to(device), size.to(device), unit.to(device))
    *truth, rows = passes.unbend_narrow(kept, h.clone(), size, unit)
    same(mine, truth)
    near((values, scale), rows)
    angle, gradients = make(S, WIDTH // 2, seed=1), [make(B, HEADS, S, WIDTH, seed=seed) for seed in (2, 3, 4)]
    out, *mine = fast.unturn(*(g.to(device) for g in gradients), angle.cos().to(device), angle.sin().to(device), narrow=True)
    wide, truth = passes.unturn_narrow(*gradients, angle.cos(), angle.sin())
    assert torch.allclose(out.cpu(), wide, atol=1e-5)
    near(mine, truth)


def test_turn(kernels: tuple[ModuleType, str]) -> None:
    fast, device = kernels
    qkv, angle = make(B, S, 3, HEADS, WIDTH), make(S, WIDTH // 2, seed=1)
    ours, theirs = qkv.clone().to(device), qkv.clone()
    fast.turn(ours, angle.cos().to(device), angle.sin().to(device))
    passes.turn(theirs, angle.cos(), angle.sin())
    assert torch.allclose(ours.cpu(), theirs, atol=1e-5)
    gradients = [make(B, HEADS, S, WIDTH, seed=seed) for seed in (2, 3)] + [make(B, S, HEADS, WIDTH, seed=4).transpose(1, 2)]
    back = fast.unturn(*(g.to(device) for g in gradients), angle.cos().to(device), angle.sin().to(device))
    assert torch.allclose(back.cpu(), passes.unturn(*gradients, angle.cos(), angle.sin()), atol=1e-5)


def test_unbend_is_the_derivative() -> None:
    h = (make(9, 5) * 3).double().requires_grad_()
    out, dout = passes.bend(h), make(9, 5, seed=1).double()
    (slope,) = torch.autograd.grad(out, h, dout)
    dh, again, total = passes.unbend(h.detach().clone(), dout.clone())
    assert torch.allclose(dh, slope) and torch.allclose(again, out) and torch.allclose(total, slope.sum(0))


def test_turning_back_is_the_transpose() -> None:
    """<turn x, y> = <x, unturn y>: a rotation."""
    x, y, angle = make(B, S, 3, HEADS, WIDTH), make(B, S, 3, HEADS, WIDTH, seed=1), make(S, WIDTH // 2, seed=2)
    turned = x.clone()
    passes.turn(turned, angle.cos(), angle.sin())
    back = passes.unturn(*(part.transpose(1, 2) for part in y.unbind(2)), angle.cos(), angle.sin())
    assert float((turned * y).sum()) == pytest.approx(float((x * back).sum()), rel=1e-4)
