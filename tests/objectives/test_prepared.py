"""The processor's part of a loss, made beforehand: no number and no gradient may differ, and what is left asks a GPU for nothing
that the processor would wait for."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tdlm.assemble import Assembly, assemble
from tdlm.config import BackboneConfig, DataConfig
from tdlm.model import Adaptive, Causal, Dense, Shared, Tied
from tdlm.objectives import (
    Autoregressive,
    AutoregressiveTree,
    GiddMethod,
    HdlmMethod,
    MdlmMethod,
    SeddMethod,
    TreeMethod,
    TwoStepMethod,
    base,
)
from tdlm.objectives.base import Loss
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.tree import Tree
from tests.objectives.test_places import Watched

PAD = 9
TWO = Tree.from_nested([[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]], size=10)
RAGGED = Tree.from_nested([[0, 1, 2], [3, 4], 5, [6, 7, 8, 9]], size=10)
DEEP = Tree.from_nested([[[0, 1], [2]], [3, [4, 5]], 6, [[7, 8], [9]]], size=10)
STAR = Tree.star(10)

CASES: dict[str, tuple[Any, Tree]] = {
    "tree, tied": (TreeMethod(head=Tied()), DEEP), "tree, shared": (TreeMethod(), DEEP),
    "mdlm": (MdlmMethod(), STAR), "mdlm, tied": (MdlmMethod(head=Tied()), STAR),
    "two-step": (TwoStepMethod(), TWO), "two-step, deep": (TwoStepMethod(), DEEP), "two-step, star": (TwoStepMethod(), STAR),
    "hdlm": (HdlmMethod(), TWO), "hdlm, ragged": (HdlmMethod(gamma=2.0), RAGGED),
    "hdlm, tied rows": (HdlmMethod(head=Dense(tied=True)), RAGGED), "hdlm, tied": (HdlmMethod(head=Tied()), TWO),
    "hdlm, faithful": (HdlmMethod(variant="faithful"), TWO), "hdlm, astray": (HdlmMethod(xi=0.8), TWO),
    "gidd": (GiddMethod(), STAR), "gidd, masks": (GiddMethod(p_uniform=0.0), STAR),
    "gidd, masks, tied": (GiddMethod(p_uniform=0.0, head=Tied()), STAR),
    "sedd, absorb": (SeddMethod(), STAR), "sedd, uniform": (SeddMethod(graph="uniform"), STAR),
    "ar": (Autoregressive(), STAR), "ar, tied": (Autoregressive(head=Tied()), STAR),
    "ar, adaptive": (Autoregressive(head=Adaptive(cutoffs=(3, 6))), STAR),
    "ar-tree": (AutoregressiveTree(), DEEP), "ar-tree, shared": (AutoregressiveTree(head=Shared()), DEEP),
}
SORTED = {"tree, tied", "mdlm, tied", "two-step", "two-step, deep", "two-step, star", "hdlm", "hdlm, ragged", "hdlm, tied rows",
          "hdlm, tied", "hdlm, faithful", "gidd, masks, tied", "ar, tied", "ar, adaptive", "ar-tree"}
"""Those whose heads want an order."""
ROWS, LENGTH = 6, 5
WAITS = {"aten::nonzero", "aten::_local_scalar_dense", "aten::item", "aten::masked_select", "aten::unique_consecutive",
         "aten::_unique2", "aten::unique_dim", "aten::is_nonzero", "aten::repeat_interleave", "aten::equal"}


def build(method: Any, tree: Tree) -> Assembly:
    backbone: Any = (Causal(blocks=1, width=16, heads=2) if method.causal
                     else BackboneConfig(blocks=1, width=16, heads=2, conditioning="none"))
    made = assemble(replace(recipe("demo"), method=method, backbone=backbone, data=DataConfig(length=LENGTH)), tree, pad_id=PAD,
                    counts=torch.arange(1, 11))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def tokens_of() -> torch.Tensor:
    tokens = torch.randint(0, 9, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens[2:, 3:] = PAD
    return tokens


def draws() -> Draws:
    return Draws(0, 0, "all", torch.arange(ROWS))


def measured(model: Any, act: Callable[[], Loss]) -> list[torch.Tensor]:
    """Numbers and gradients."""
    model.zero_grad(set_to_none=True)
    loss = act()
    loss.train.backward()
    return [loss.train.detach(), loss.bound, *loss.parts.values(),
            *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def modes(method: Any) -> list[str]:
    return ["count", "drop"] if method.causal else ["count", "given-length", "drop"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wide", [False, True])
def test_what_the_processor_makes_is_what_the_device_would_make(name: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under every PAD mode, with few children gathered by nobody, and with heads that keep no logits."""
    monkeypatch.setattr("tdlm.model.head.FEW", 1)
    for module in ("head", "dense") if wide else ():
        monkeypatch.setattr(f"tdlm.model.{module}.WIDE", 8)
    made = build(*CASES[name])
    for pad in modes(CASES[name][0]):
        objective: Any = made.objective.with_pad(pad)  # type: ignore[arg-type]
        monkeypatch.setattr(base, "sorts", lambda values, device: False)
        slow = measured(made.model, partial(objective.loss, made.model, tokens_of(), draws=draws()))
        monkeypatch.setattr(base, "sorts", lambda values, device: True)
        prepared = objective.prepare(made.model.head, tokens_of(), draws())
        assert wide or (getattr(prepared, "sheet", prepared).order is not None) == (name in SORTED)
        with Watched() as watched:
            fast = measured(made.model, partial(objective.complete, made.model, prepared))
        assert not watched.names & WAITS
        assert len(slow) > 8 and bool((slow[1] > 0).any())
        for one, other in zip(slow, fast, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
