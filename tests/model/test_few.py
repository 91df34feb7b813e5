"""The tied head at a few positions, asked without looking at their parents."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tdlm.model.head import TiedHead
from tdlm.model.kernels import few
from tdlm.train.plan import complete_tree
from tdlm.tree import Tree

TREES = [complete_tree(200, 20), complete_tree(3000, 18), Tree.from_nested([[*range(30)], 30, [31, 32]])]


@pytest.mark.parametrize("tree", TREES, ids=["even", "deep", "padded"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_says_what_the_head_says(tree, bias, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    embedding = nn.Embedding(tree.nodes + 7, 16).double()
    embedding.weight.data.copy_(torch.randn(embedding.weight.shape, generator=generator))
    head = TiedHead(tree, embedding, bias).double()
    if head.bias is not None:
        head.bias.data.copy_(torch.randn(head.bias.shape, generator=generator))
    assert head.groups is not None
    parent = torch.randint(tree.size, tree.nodes, (90,), generator=generator)
    parent[:30] = tree.root
    hidden = torch.randn(90, 16, generator=generator, dtype=torch.float64)
    wanted = head.log_probs(hidden, parent)
    for limit in (few.LIMIT, 50 * len(embedding.weight)):
        monkeypatch.setattr(few, "LIMIT", limit)
        found = few.few_logits(hidden, parent, embedding.weight, head.bias, head.child_table, tree.size)
        assert torch.allclose(head.masked(found, parent).log_softmax(-1), wanted, rtol=1e-12, atol=1e-12)
    narrow = few.few_logits(hidden.bfloat16(), parent, embedding.weight, head.bias, head.child_table, tree.size)
    assert narrow.dtype == torch.float32
    assert (head.masked(narrow, parent).log_softmax(-1).exp() - wanted.exp()).abs().max() < 0.05
