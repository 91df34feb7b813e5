"""The fused blocks against the plain ones: values and every gradient."""
from __future__ import annotations

from typing import Any

import pytest
import torch

from tdlm.config import BackboneConfig
from tdlm.model.transformer import Backbone

NODES, LEVELS, ROWS, LENGTH = 23, 2, 3, 10


def backbone(conditioning: str, dtype: torch.dtype = torch.float64) -> Backbone:
    """Random everywhere: modulations begin at zero, where most gradients would be zero, too."""
    made = Backbone(BackboneConfig(blocks=3, width=24, heads=2, conditioning=conditioning, condition_width=8), NODES, LEVELS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.to(dtype)


def run(model: Backbone, fused: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randint(0, NODES, (ROWS, LENGTH), generator=generator)
    time = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    level = torch.randint(0, LEVELS, (ROWS,), generator=generator)
    aim = torch.randn(ROWS, LENGTH, model.width, generator=generator, dtype=torch.float64)
    model.fused = fused
    model.zero_grad(set_to_none=True)
    hidden = model(nodes, time, level)
    (hidden.double() * aim).sum().backward()
    return hidden.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("fused", ["fast", "lean"])
@pytest.mark.parametrize("conditioning", ["time", "level", "none"])
def test_fused_blocks_are_the_blocks(conditioning: str, fused: str) -> None:
    """In float64. (A network that is told nothing leaves the modulations' matrices alone: their gradient is zero.)"""
    model = backbone(conditioning)
    plain, slow = run(model, None)
    hidden, quick = run(model, fused)
    assert torch.allclose(hidden, plain, atol=1e-6)  # the plain norms are made in float32
    unused = {name for name, gradient in slow.items() if not gradient.any()}
    assert set(slow) - unused <= set(quick) and all("modulation.weight" in name for name in unused)
    for name, gradient in quick.items():
        assert torch.allclose(gradient, slow[name], atol=2e-5 * (1 + float(slow[name].abs().max()))), name


def test_gradients_are_the_slopes() -> None:
    """Against finite differences, in float64 throughout: no precision of the plain path is assumed."""
    model = backbone("level")
    _, gradients = run(model, "fast")
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randint(0, NODES, (ROWS, LENGTH), generator=generator)
    time = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    level = torch.randint(0, LEVELS, (ROWS,), generator=generator)
    aim = torch.randn(ROWS, LENGTH, model.width, generator=generator, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        along = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(along, alpha=step)
                values.append(float((model(nodes, time, level) * aim).sum()))
                parameter.sub_(along, alpha=step)
        slope = (values[0] - values[1]) / 2e-5
        assert slope == pytest.approx(float((gradients[name] * along).sum()), rel=1e-5, abs=1e-5), name


def test_bfloat16_is_near() -> None:
    """As training runs: products and stream in bfloat16, weights in float32."""
    model = backbone("time", torch.float32)
    _, exact = run(model, None)
    model.stream = torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, quick = run(model, "fast")
        _, slow = run(model, None)
    assert hidden.dtype == torch.bfloat16
    for name, gradient in quick.items():
        def error(other: torch.Tensor, truth: torch.Tensor = exact[name]) -> float:
            return float((other - truth).norm() / truth.norm().clamp(min=1e-9))
        assert error(gradient) < 1.5 * error(slow[name]) + 0.01, name


@pytest.mark.parametrize("fused", ["fast", "lean"])
def test_products_in_eight_bits_are_near(fused: str) -> None:
    """Gradients point the same way: what is lost is noise, not direction."""
    model = backbone("level", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    _, exact = run(model, None)
    model.float8 = True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, quick = run(model, fused)
        model.float8 = False
        plain, _ = run(model, "fast")
    assert not torch.equal(hidden, plain) and float((hidden - plain).float().norm() / plain.float().norm()) < 0.05
    for name, gradient in quick.items():
        along = torch.nn.functional.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
        assert float(along) > 0.97, name


def test_nothing_is_kept_without_gradients_and_the_way_back_is_made_once() -> None:
    model = backbone("level")
    model.fused = "fast"
    nodes, level = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        quiet = model(nodes, torch.zeros(1), level)
    hidden = model(nodes, torch.zeros(1), level)
    assert torch.equal(hidden, quiet) and not quiet.requires_grad
    hidden.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        hidden.sum().backward()


@pytest.mark.parametrize("blocks", [1, 3])
def test_some_columns_are_the_same_as_in_the_whole(blocks: int) -> None:
    model = backbone("level")
    model.fused, model.blocks = "fast", model.blocks[:blocks]
    nodes = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % NODES
    columns = torch.tensor([[0, 9, 3, 0], [5, 5, 5, 5], [9, 8, 7, 0]])
    time, level = torch.zeros(ROWS), torch.tensor([0, 1, 1])
    with torch.no_grad():
        whole, some = model(nodes, time, level), model(nodes, time, level, columns)
    assert torch.allclose(some, whole.take_along_dim(columns[..., None], 1), rtol=0, atol=1e-12)


def test_narrow_weights_are_kept_until_they_change() -> None:
    """Whatever happens to the weights, the answer is that of a network that keeps nothing; training leaves nothing behind."""
    model: Any = backbone("level", torch.float32)
    model.fused = "fast"
    nodes, time, level = torch.arange(8).view(2, 4), torch.zeros(2), torch.tensor([0, 1])

    def asked(keeps: bool) -> torch.Tensor:
        model.kept, before = (model.kept if keeps else None), model.kept
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            answer = model(nodes, time, level)
        model.kept = before
        return answer

    def in_place() -> None:
        with torch.no_grad():
            model.blocks[1].mlp_in.bias.add_(1.0)

    def optimizer() -> None:
        model(nodes, time, level).sum().backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()

    def loaded() -> None:
        model.load_state_dict({name: value + 0.5 for name, value in model.state_dict().items()})

    def replaced() -> None:
        model.blocks[0].qkv.weight.data = model.blocks[0].qkv.weight.data * 2

    def exchanged() -> None:
        model.blocks[0].qkv.weight = torch.nn.Parameter(model.blocks[0].qkv.weight.detach() * 2)

    before = asked(True)
    for change in (in_place, optimizer, loaded, replaced, exchanged):
        kept = model.kept.blocks
        assert torch.equal(asked(True), before) and model.kept.blocks is kept and kept
        change()
        before, plain = asked(True), asked(False)
        assert torch.equal(before, plain) and model.kept.blocks is not kept, change.__name__
    model(nodes, time, level)
    assert model.kept.blocks == []
