"""Methods that score every position look none of them up: a GPU is not waited for, and no gather has to be undone."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, DataConfig
from tdlm.model import Causal, Shared
from tdlm.objectives import Autoregressive, AutoregressiveTree, GiddMethod, SeddMethod, ar, gidd, sedd
from tdlm.objectives.base import Places, everywhere
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.tree import Tree

EVERY = {"gidd": GiddMethod(p_uniform=0.1), "sedd": SeddMethod(graph="uniform"), "ar": Autoregressive(),
         "ar-tree": AutoregressiveTree(head=Shared())}
TOKENS = torch.randint(0, 6, (5, 4), generator=torch.Generator().manual_seed(1))


class Watched(TorchDispatchMode):
    """The names of all operations; indexing by a mask looks up where it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        indices = args[1] if name.lstrip("aten:_").startswith("index") and isinstance(args[1], list | tuple) else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        self.names |= {name, "aten::nonzero"} if masked else {name}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", EVERY)
def test_all_positions_are_neither_counted_nor_gathered(name, monkeypatch):
    """And the numbers are those of the positions looked up one by one."""
    monkeypatch.setattr(ar, "takes_all", lambda head, hidden: True)  # as on a GPU
    method = EVERY[name]
    tree = Tree.star(6) if method.flat else Tree.from_nested([[0, 3], [1, [2, [4, 5]]]])
    backbone: Any = Causal(blocks=1, width=8, heads=2) if method.causal else BackboneConfig(blocks=1, width=8, heads=2)
    made = assemble(replace(recipe("demo"), method=method, backbone=backbone, data=DataConfig(length=4)), tree, pad_id=5)
    with torch.no_grad():
        for number, parameter in enumerate(made.model.parameters()):
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))

    def measured() -> tuple[set[str], list[torch.Tensor]]:
        made.model.zero_grad()
        with Watched() as watched:
            loss = made.objective.loss(made.model, TOKENS, draws=Draws(2, 0, "places", torch.arange(5)))
            loss.train.backward()
        gradients = [parameter.grad for parameter in made.model.parameters() if parameter.grad is not None]
        return watched.names, [loss.train.detach(), loss.parts["levels"], *gradients]

    looked_up = {"aten::nonzero", "aten::_index_put_impl_", "aten::index_put", "aten::index_put_"}
    names, fast = measured()
    assert not names & looked_up
    for place in (ar, gidd, sedd):
        monkeypatch.setattr(place, "Places", lambda mask, every: Places(mask, every=False))
    names, slow = measured()
    assert names & looked_up
    for one, two in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (1, 1), (0, 4)])
def test_everywhere_is_every_index_in_order(shape):
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    assert torch.equal(values[everywhere(values)], values.flatten())
    mask = values % 2 == 0
    assert torch.equal(Places(mask, every=True).of(values), values.flatten())
    assert torch.equal(Places(mask, every=False).of(values), values[mask])
