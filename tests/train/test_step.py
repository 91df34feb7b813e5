"""One update: accumulation, precision, and numbers that are not finite."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.errors import ConfigError, RunError
from tdlm.model.causal import Causal
from tdlm.objectives.tree import TreeMethod
from tdlm.train.plan import complete_tree
from tdlm.train.step import Trainer, compile_backbone

CONFIG = RunConfig("tiny", TreeMethod(), data=DataConfig(length=6),
                   backbone=BackboneConfig(1, 16, 2, condition_width=8),
                   train=TrainConfig(steps=20, warmup=2, batch=8, lr=0.01, dtype="float32", seed=3))


class Batch(NamedTuple):
    tokens: torch.Tensor
    rows: torch.Tensor


def trainer(**settings: Any) -> Trainer:
    config = replace(CONFIG, train=replace(CONFIG.train, **settings))
    assembly = assemble(config, complete_tree(12, 4), pad_id=0)
    return Trainer(assembly.model, assembly.objective, config.train, torch.device("cpu"))


def batches(step: int, size: int = 8) -> list[Batch]:
    tokens = torch.randint(1, 12, (8, 6), generator=torch.Generator().manual_seed(step))
    rows = torch.arange(8)
    return [Batch(tokens[i: i + size], rows[i: i + size]) for i in range(0, 8, size)]


def weights(of: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in of.model.parameters()])


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_accumulation_gives_the_gradient_of_the_whole_batch(micro: int) -> None:
    whole, parts = trainer(), trainer(micro_batch=micro)
    assert parts.micros == 8 // micro
    for step in range(4):
        whole.update(batches(step))
        parts.update(batches(step, micro))
    torch.testing.assert_close(weights(whole), weights(parts), rtol=1e-4, atol=1e-6)
    one, other = whole.read(), parts.read()
    assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.bound == pytest.approx(other.bound, rel=1e-5)
    assert one.levels == pytest.approx(other.levels, rel=1e-5) and one.tokens == other.tokens == 4 * 48


def test_the_first_update_has_rate_zero_and_the_next_ones_move() -> None:
    moving = trainer()
    before = weights(moving)
    moving.update(batches(0))
    assert torch.equal(before, weights(moving))
    moving.update(batches(1))
    assert not torch.equal(before, weights(moving))


def test_training_lowers_the_loss() -> None:
    moving = trainer(steps=200, lr=0.02)
    losses = []
    for _ in range(60):
        moving.update(batches(0))
        losses.append(moving.read().bound)
    assert sum(losses[-10:]) / 10 < 0.7 * sum(losses[:10]) / 10


def test_bf16_keeps_float32_weights_and_stays_close() -> None:
    exact, rough = trainer(), trainer(dtype="bfloat16")
    for step in range(5):
        exact.update(batches(step))
        rough.update(batches(step))
    assert all(parameter.dtype is torch.float32 for parameter in rough.model.parameters())
    assert rough.read().loss == pytest.approx(exact.read().loss, rel=0.02)


def test_global_randomness_is_untouched() -> None:
    moving = trainer()
    before = torch.random.get_rng_state()
    moving.update(batches(0))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("where", ["weight", "gradient"])
def test_what_is_not_finite_stops_the_run_and_names_the_first_step(where: str) -> None:
    moving = trainer()
    moving.update(batches(0))
    moving.update(batches(1))
    parameter = moving.model.backbone.blocks[0].qkv.weight
    handle = None
    if where == "weight":
        with torch.no_grad():
            parameter[0, 0] = torch.nan
    else:
        handle = parameter.register_hook(lambda gradient: gradient * torch.inf)
    moving.update(batches(2))
    if handle is not None:
        handle.remove()
    moving.update(batches(3))
    with pytest.raises(RunError, match=r"step 3: the loss or the gradient is not finite"):
        moving.check()
    with pytest.raises(RunError, match="step 3"):
        moving.read()


def test_the_backbone_compiles_only_where_it_pays() -> None:
    model = trainer().model
    assert not compile_backbone(model, torch.device("cpu"), None)
    assert not compile_backbone(model, torch.device("cuda"), None, available=lambda: False)
    assert not compile_backbone(model, torch.device("cuda"), False)
    with pytest.raises(ConfigError, match="not compiled"):
        compile_backbone(model, torch.device("cpu"), None, memory="lean")
    names = set(model.state_dict())
    assert compile_backbone(model, torch.device("cuda"), None, available=lambda: True)
    assert model.backbone.fused == "fast", "on a GPU the blocks are fused by hand"
    assert compile_backbone(model, torch.device("cuda"), True, memory="lean") and model.backbone.fused == "lean"
    assert compile_backbone(model, torch.device("cpu"), True, memory="lean")
    assert set(model.state_dict()) == names, "a compiled run must save under the same names"


@pytest.mark.parametrize("backbone", [BackboneConfig(3, 32, 2), Causal("llama", 3, 32, 2), Causal("gpt2", 3, 32, 2)])
def test_a_narrow_stream_changes_hidden_states_by_rounding_only(backbone) -> None:
    torch.manual_seed(0)
    network = backbone.build(20, 2)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    nodes, time = torch.randint(0, 20, (2, 9)), torch.rand(2, dtype=torch.float64)
    outputs = {}
    for stream in (torch.float32, torch.bfloat16):
        network.stream, seen = stream, []
        handle = network.blocks[1].register_forward_hook(lambda block, inputs, output, seen=seen: seen.append(output.dtype))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs[stream] = network(nodes, time, None).float()
        handle.remove()
        assert seen == [stream]
    exact, narrow = outputs.values()
    assert 0 < float((narrow - exact).norm() / exact.norm()) < 0.02
    network.stream = torch.bfloat16
    plain = network(nodes, time, None)
    network.stream = torch.float32
    assert torch.equal(plain, network(nodes, time, None)), "without autocast the stream stays as wide as the weights"
