"""What the proofs are about: drawn trees and distributions, and models that are tables instead of networks."""
from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tdlm.process import Cascade, Cosine, Linear, Overlapping, Polynomial
from tdlm.process.oracle import Enumeration
from tdlm.tree import Tree


@st.composite
def trees(draw: st.DrawFn, max_leaves: int = 8, max_height: int = 3) -> Tree:
    """A tree over shuffled tokens with padded paths and single-child nodes."""
    leaves = draw(st.integers(2, max_leaves))
    order = draw(st.permutations(range(leaves)))

    def grow(tokens: list[int], room: int) -> Any:
        if room == 0 or (len(tokens) == 1 and not draw(st.booleans())):
            return tokens[0] if len(tokens) == 1 else list(tokens)
        if len(tokens) == 1:
            return [grow(tokens, room - 1)]
        parts = draw(st.integers(1 if room > 1 else 2, min(4, len(tokens))))
        cuts = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), min_size=parts - 1, max_size=parts - 1)))
        pieces = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)])]
        return [piece[0] if len(piece) == 1 and draw(st.booleans()) else grow(piece, room - 1) for piece in pieces]

    nested = grow(list(order), max_height - 1)
    return Tree.from_nested(nested if isinstance(nested, list) else [nested], size=leaves).check()


def processes() -> st.SearchStrategy:
    return st.sampled_from([Cascade(), Cascade(Cosine()), Cascade(Polynomial(2.0)), Cascade(Polynomial(3.0)), Overlapping()])


def distribution(size: int, length: int, seed: int) -> Tensor:
    """A joint distribution over V^S with dependent positions and some improbable sequences."""
    generator = torch.Generator().manual_seed(seed)
    shape = (size,) * length
    return torch.rand(shape, generator=generator, dtype=torch.float64) ** 3 + 1e-4


class TableHead:
    """`hidden` already holds log-probabilities over slots."""

    def __init__(self, tree: Tree):
        self.tree = tree

    def log_probs(self, hidden: Tensor, parent: Tensor) -> Tensor:
        slots = torch.arange(self.tree.branching)
        return hidden.masked_fill(slots >= self.tree.num_children[parent][:, None], -torch.inf).log_softmax(-1)

    def nll(self, hidden: Tensor, parent: Tensor, slot: Tensor) -> Tensor:
        return -self.log_probs(hidden, parent).gather(1, slot[:, None])[:, 0]


class TableModel:
    """A 'network' that looks its answer up: any function (node ids, time) -> child probabilities (S, K)."""

    told_time = False

    def __init__(self, tree: Tree, predict):
        self.head, self.predict = TableHead(tree), predict
        self.asked = 0

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        self.asked += 1
        answers = [self.predict(tuple(row), float(t)) for row, t in zip(nodes.tolist(), time)]
        return torch.stack(answers).clamp(min=1e-300).log()


def uniform_predictor(tree: Tree):
    """Equal probability for every child (masked and normalised by the head)."""
    return lambda nodes, t: torch.full((len(nodes), tree.branching), 1.0, dtype=torch.float64)


def random_predictor(tree: Tree, seed: int = 0):
    """A fixed arbitrary answer for every noisy sequence: no denoiser of anything."""
    def predict(nodes: tuple[int, ...], t: float) -> Tensor:
        generator = torch.Generator().manual_seed(hash((nodes, seed)) % (1 << 62))
        raw = torch.rand(len(nodes), tree.branching, generator=generator, dtype=torch.float64) + 0.05
        kids = torch.tensor([int(tree.num_children[z]) for z in nodes])
        raw = raw.masked_fill(torch.arange(tree.branching) >= kids[:, None], 0.0)
        return raw / raw.sum(-1, keepdim=True)
    return predict


def tiny_world(seed: int = 0, length: int = 2, nested: Any = None) -> tuple[Tree, Enumeration]:
    tree = Tree.from_nested(nested if nested is not None else [[0, 1], [2, [3, 4]]])
    return tree, Enumeration(tree, distribution(tree.size, length, seed))


__all__ = ["Linear", "TableModel", "distribution", "processes", "random_predictor", "tiny_world", "trees", "uniform_predictor"]
