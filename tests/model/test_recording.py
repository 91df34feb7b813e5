"""Replayed passes against the passes themselves, without a GPU: memory is shared as two CUDA graphs share it."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tdlm.config import BackboneConfig
from tdlm.model.kernels.recording import WARM, Pass, Recording
from tdlm.model.transformer import Backbone

NODES, LEVELS, LENGTH = 23, 2, 7


class Replay(NamedTuple):
    replay: Callable[[], None]


class Rehearsed(Recording):
    """Replays by computing anew into the memory of the first time. The way there also spoils what the way back left, as
    graphs that share a pool of memory may."""

    def _record(self, x: Tensor, modulations: Tensor, make: Callable[[Tensor], Pass]) -> None:
        self.x, self.modulations = x.clone(), modulations.clone()
        self.run = make(self.modulations)
        self.out = self.run.forward(self.x, True).clone()
        self.dout = torch.zeros_like(self.out)
        dx, dmodulations, dfinal, dweights = self.run.backward(self.dout.clone())
        self.gradients = dx.clone(), dmodulations.clone(), dfinal.clone(), [gradient.clone() for gradient in dweights]

        def flat(gradients: Any) -> list[Tensor]:
            return [*gradients[:3], *gradients[3]]

        def there() -> None:
            for gradient in flat(self.gradients):
                gradient.fill_(torch.nan)
            self.run = make(self.modulations)
            self.out.copy_(self.run.forward(self.x, True))

        def back() -> None:
            for memory, gradient in zip(flat(self.gradients), flat(self.run.backward(self.dout.clone())), strict=True):
                memory.copy_(gradient)

        self.there, self.back = Replay(there), Replay(back)  # type: ignore[assignment]


def backbone(conditioning: Any, recording: Recording | None) -> Backbone:
    made = Backbone(BackboneConfig(blocks=2, width=24, heads=2, conditioning=conditioning, condition_width=8), NODES, LEVELS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    made.fused, made.recording = "fast", recording
    return made


def ask(model: Backbone, rows: int, seed: int, length: int = LENGTH) -> Tensor:
    """A loss whose gradient is different every time."""
    generator = torch.Generator().manual_seed(seed)
    nodes = torch.randint(0, NODES, (rows, length), generator=generator)
    hidden = model(nodes, torch.rand(rows, generator=generator), torch.randint(0, LEVELS, (rows,), generator=generator))
    return (hidden * torch.randn(hidden.shape, generator=generator)).sum()


def gradients(model: Backbone) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("conditioning", "rows", "micros"), [
    ("time", 3, 1), ("time", 3, 3), ("time", 1, 1), ("level", 3, 3), ("none", 3, 1), ("none", 1, 1)])
def test_replayed_gradients_are_the_gradients(conditioning: str, rows: int, micros: int) -> None:
    recording = Rehearsed(copies=micros > 1)
    models = backbone(conditioning, recording), backbone(conditioning, None)
    for step in range(WARM + 3):
        for model in models:
            model.zero_grad(set_to_none=True)
            for micro in range(micros):
                ask(model, rows, 10 * step + micro).backward()
        ours, theirs = map(gradients, models)
        assert ours.keys() == theirs.keys()
        for name, gradient in ours.items():
            torch.testing.assert_close(gradient, theirs[name], msg=f"step {step}, {name}")
            for model in models:
                parameter = model.get_parameter(name)
                parameter.data.sub_(gradient, alpha=1e-4)  # in place, as an optimizer does
    assert recording.there is not None


def test_two_losses_before_a_way_back_and_other_shapes_in_between() -> None:
    """Only one pass at a time is replayed; what comes in between runs as it is and disturbs nothing."""
    recording = Rehearsed(copies=True)
    models = backbone("level", recording), backbone("level", None)
    for step in range(WARM + 1):
        ask(models[0], 3, step).backward()
    for step in range(3):
        found = []
        for model in models:
            model.zero_grad(set_to_none=True)
            one = ask(model, 3, step)
            with torch.no_grad():
                aside = ask(model, 3, 100 + step)
            two, three = ask(model, 3, 200 + step), ask(model, 2, 300 + step, 5)
            (two + three).backward()
            one.backward()
            found.append((one.detach(), two.detach(), three.detach(), aside, gradients(model)))
        torch.testing.assert_close(found[0], found[1])
    assert recording.there is not None and recording.waiting() is None


def test_a_pass_that_is_given_up_makes_room_for_the_next() -> None:
    recording = Rehearsed()
    model, plain = backbone("time", recording), backbone("time", None)
    for step in range(WARM + 1):
        model.zero_grad(set_to_none=True)
        ask(model, 2, step).backward()
    assert recording.there is not None
    model.zero_grad(set_to_none=True)
    lost = ask(model, 2, 50)
    assert recording.waiting() is not None
    del lost
    assert recording.waiting() is None
    for each in (model, plain):
        each.zero_grad(set_to_none=True)
        ask(each, 2, 60).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_weights_that_move_are_not_looked_for_where_they_were() -> None:
    recording = Rehearsed()
    model, plain = backbone("time", recording), backbone("time", None)
    for step in range(WARM + 1):
        ask(model, 2, step).backward()
    for each in (model, plain):
        each.zero_grad(set_to_none=True)
        for parameter in each.parameters():
            parameter.data = parameter.data * 1.5  # other memory
        ask(each, 2, 60).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
