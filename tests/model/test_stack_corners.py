"""The fused blocks in corners: odd sizes through the GPU's kernels (in Triton's interpreter), frozen and shared parameters."""
from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.config import BackboneConfig
from tdlm.model.kernels import passes, rows
from tdlm.model.transformer import Backbone

NODES, LEVELS = 23, 2


def backbone(conditioning: Any = "level", width: int = 24, heads: int = 2, dtype: torch.dtype = torch.float32) -> Backbone:
    config = BackboneConfig(blocks=2, width=width, heads=heads, conditioning=conditioning, condition_width=8)
    made = Backbone(config, NODES, LEVELS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(dtype)


def found(model: Backbone, fused: str | None, count: int = 2, length: int = 9, device: str = "cpu") -> dict[str, Tensor]:
    """Hidden states and all gradients."""
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randint(0, NODES, (count, length), generator=generator).to(device)
    time = torch.rand(count, generator=generator).to(device)
    level = torch.randint(0, LEVELS, (count,), generator=generator).to(device)
    model.fused = fused  # type: ignore[assignment]
    model.zero_grad(set_to_none=True)
    hidden = model(nodes, time, level)
    aim = torch.randn(hidden.shape, generator=generator).to(hidden)
    (hidden * aim).sum().backward()
    some = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    return {"hidden": hidden.detach(), **some}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        error = float((value - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-6))
        assert error < tolerance, f"{name}: {error}"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the GPU's kernels can run."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1")
    from tdlm.model.kernels import passes_triton, rows_triton

    monkeypatch.setattr(passes, "fast", lambda x: passes_triton)
    monkeypatch.setattr(rows, "fast", lambda x: rows_triton)
    return "cpu"


@pytest.mark.parametrize(("count", "length", "width", "heads"), [
    (1, 1, 24, 2), (2, 1, 24, 2), (1, 65, 20, 2), (3, 9, 6, 3), (2, 33, 36, 1)])
def test_odd_sizes(count: int, length: int, width: int, heads: int, device: str) -> None:
    """One position, one sequence; lengths beside the tiles' sizes; widths, heads' widths and their pairs no powers of two."""
    model = backbone("none" if count == 1 else "time", width, heads)
    plain = found(model, None, count, length)
    model.to(device)
    close({name: value.cpu() for name, value in found(model, "fast", count, length, device).items()}, plain)


@pytest.mark.parametrize("frozen", ["embedding", "blocks.0", "blocks.1.qkv", "norm", "modulation", "all but one"])
def test_frozen_parameters_take_no_gradient_and_the_others_their_own(frozen: str) -> None:
    model = backbone(dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "final_norm.weight" if frozen == "all but one" else frozen not in name)
    plain, ours = found(model, None), found(model, "fast")
    close(ours, plain, 1e-5)
    assert len(ours) > 1 and not any(frozen in name for name in ours)


def test_blocks_that_share_their_weights_add_their_gradients_up() -> None:
    model = backbone(dtype=torch.float64)
    model.blocks[1].qkv = model.blocks[0].qkv
    model.blocks[1].mlp_norm = model.blocks[0].attention_norm
    close(found(model, "fast"), found(model, None), 1e-5)


def test_one_position_and_one_sequence() -> None:
    for conditioning in ("time", "level", "none"):
        for count, length in ((1, 1), (1, 5), (4, 1)):
            model = backbone(conditioning, dtype=torch.float64)
            close(found(model, "fast", count, length), found(model, None, count, length), 1e-5)


def test_gradients_have_the_dtype_of_their_weights() -> None:
    model = backbone()
    ours = found(model, "fast")
    assert {value.dtype for value in ours.values()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = found(model, "fast")
    assert narrow.pop("hidden").dtype == torch.bfloat16 and {value.dtype for value in narrow.values()} == {torch.float32}
