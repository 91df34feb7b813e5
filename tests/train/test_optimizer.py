"""The recipe against closed forms."""
from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tdlm.config import TrainConfig
from tdlm.errors import RunError
from tdlm.train.optimizer import (
    MovingAverage,
    clip_gradients,
    learning_rate,
    make_optimizer,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))


def gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def test_schedule_of_the_paper() -> None:
    config = TrainConfig()
    assert learning_rate(0, config) == 0
    assert learning_rate(5_000, config) == pytest.approx(2.5e-4)
    assert learning_rate(10_000, config) == pytest.approx(5e-4)
    for step in (10_001, 123_456, 400_000, 499_999):
        p = (step - 10_000) / 490_000
        assert learning_rate(step, config) == pytest.approx(5e-4 * (0.1 + 0.9 * (1 + math.cos(math.pi * p)) / 2))
    assert learning_rate(500_000, config) == pytest.approx(5e-5)


@given(steps=st.integers(1, 300), share=st.floats(0, 1), ratio=st.floats(0, 1))
def test_schedule_is_defined_and_bounded_everywhere(steps: int, share: float, ratio: float) -> None:
    config = TrainConfig(steps=steps, warmup=int(share * steps), final_lr_ratio=ratio, lr=1.0)
    rates = [learning_rate(step, config) for step in range(steps + 1)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[: config.warmup] == sorted(rates[: config.warmup])
    assert all(a >= b - 1e-12 for a, b in zip(rates[config.warmup:], rates[config.warmup + 1:]))


def test_without_warmup_the_first_step_has_the_peak_rate() -> None:
    assert learning_rate(0, TrainConfig(steps=10, warmup=0, lr=0.5)) == 0.5


def test_adamw_matches_its_formula() -> None:
    config = TrainConfig(lr=0.01, betas=(0.9, 0.99), eps=1e-9, weight_decay=0.02)
    model = network().double()
    optimizer = make_optimizer(model, config)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    first = [torch.zeros_like(p) for p in expected]
    second = [torch.zeros_like(p) for p in expected]
    for step in range(1, 6):
        gradients(model, step)
        rate = 0.01 * step
        for i, parameter in enumerate(model.parameters()):
            g = parameter.grad
            assert g is not None
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.99 * second[i] + 0.01 * g * g
            expected[i] = expected[i] * (1 - rate * 0.02)
            expected[i] -= rate * (first[i] / (1 - 0.9**step)) / ((second[i] / (1 - 0.99**step)).sqrt() + 1e-9)
        set_learning_rate(optimizer, rate)
        optimizer.step()
    for parameter, value in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-10, atol=1e-12)


def test_every_parameter_decays() -> None:
    model = network()
    optimizer = make_optimizer(model, TrainConfig())
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0]["weight_decay"] == 0.02
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
@pytest.mark.parametrize("fused", [True, False])
def test_clipping_gives_the_norm_before_and_steps_with_gradients_scaled_to_the_limit(limit: float | None, fused: bool) -> None:
    clipped, scaled = network(), network()
    gradients(clipped, 1)
    gradients(scaled, 1)
    before = torch.cat([p.grad.flatten() for p in clipped.parameters() if p.grad is not None])
    for parameter in scaled.parameters():
        if parameter.grad is not None:
            parameter.grad *= min(1.0, (limit or math.inf) / float(before.norm()))
    one, other = (torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, fused=fused) for model in (clipped, scaled))
    norm = clip_gradients(one, limit)
    torch.testing.assert_close(norm, before.norm())
    one.step()
    other.step()
    for a, b in zip(clipped.parameters(), scaled.parameters()):
        torch.testing.assert_close(a, b)


def test_restored_optimizer_continues_to_the_bit() -> None:
    model = network()
    optimizer = make_optimizer(model, TrainConfig(lr=0.1))
    for step in range(3):
        gradients(model, step)
        optimizer.step()
    twin = copy.deepcopy(model)
    other = make_optimizer(twin, TrainConfig(lr=0.1))
    tensors = {name: value.clone() for name, value in optimizer_tensors(optimizer, model).items()}
    restore_optimizer(other, twin, tensors)
    for step in range(3, 6):
        for net, opt in ((model, optimizer), (twin, other)):
            gradients(net, step)
            opt.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_optimizer_state_of_another_model_is_refused() -> None:
    model = network()
    optimizer = make_optimizer(model, TrainConfig())
    gradients(model, 0)
    optimizer.step()
    tensors = optimizer_tensors(optimizer, model)
    with pytest.raises(RunError, match=r"strange\.weight"):
        restore_optimizer(optimizer, model, {**tensors, "exp_avg.strange.weight": torch.zeros(1)})


def test_moving_average_warms_up_and_can_be_applied() -> None:
    model = network()
    average = MovingAverage(model, 0.9999)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    for updates in range(1, 20):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(updates)
        average.update(updates)
        decay = min(0.9999, (1 + updates) / (10 + updates))
        expected = [decay * e + (1 - decay) * p.detach() for e, p in zip(expected, model.parameters())]
    for value, wanted in zip(average.weights.values(), expected):
        torch.testing.assert_close(value, wanted)
    raw = [parameter.detach().clone() for parameter in model.parameters()]
    with average.applied():
        for parameter, wanted in zip(model.parameters(), expected):
            torch.testing.assert_close(parameter.detach(), wanted)
    assert all(torch.equal(p, r) for p, r in zip(model.parameters(), raw))
