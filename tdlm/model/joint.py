"""A head for L adjacent positions at once: one distribution over the product of their child sets, K^L combinations.

The hidden states of the neighbourhood stand side by side (`concat`) or are averaged (`mean`), then one matrix gives a logit
for every combination of slots (k_1, ..., k_L); its class is the number with these digits in base K, k_1 first. Impossible
combinations get -inf: slots that a node does not have, positions that are missing from a last shorter neighbourhood, and
positions whose slot is *known*, because they have moved, are given, or have one child: there only the known slot is left.
So what is still open is always predicted in the light of what is known: the logits of one table, restricted and normalised.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..tree.tree import Tree
from .head import wider
from .transformer import zeroed

MOST = 2**20
"""Combinations that one matrix product can still answer."""


def combinations(branching: int, length: int) -> int:
    """K^L, if a head can have so many outputs."""
    if branching**length > MOST:
        fits = max(n for n in range(1, 21) if branching**n <= MOST or n == 1)
        raise ConfigError(f"a neighbourhood of {length} positions with {branching} children each has {branching}^{length} "
                          f"combinations, more than {MOST}; this tree allows a neighbourhood of at most {fits}, a smaller "
                          "branching factor (tdlm tree build --branching) a longer one")
    return branching**length


def own_slots(tree: Tree) -> Int[Tensor, "N"]:
    """Which child of its parent a node is; 0 for the root."""
    own = torch.zeros_like(tree.num_children)
    for level in range(tree.height):  # upwards: a padded step writes 0, the step to the parent comes after all of them
        own = own.scatter(0, tree.ancestor[level], tree.slot[level])
    return own


class JointHead(nn.Module):
    num_children: Tensor

    def __init__(self, tree: Tree, width: int, length: int, combine: Literal["concat", "mean"] = "concat"):
        super().__init__()
        self.length, self.base, self.combine = length, tree.branching, combine
        self.outcomes = combinations(tree.branching, length)
        inputs = width * length if combine == "concat" else width
        self.output = zeroed(nn.Linear(inputs, self.outcomes))
        self.branching = -(-self.outcomes // length)  # logits per position, as the plan of a run counts them
        self.flops = 2 * inputs * self.outcomes // length
        self.register_buffer("num_children", tree.num_children.clone(), persistent=False)

    def logits(self, hidden: Float[Tensor, "M L d"], parent: Int[Tensor, "M L"]) -> Float[Tensor, "M classes"]:
        if self.combine == "concat":
            return wider(self.output(hidden.flatten(1)))
        real = (parent >= 0)[..., None]
        return wider(self.output((hidden * real).sum(1) / real.sum(1)))

    def masked(self, hidden: Float[Tensor, "M L d"], parent: Int[Tensor, "M L"],
               known: Int[Tensor, "M L"]) -> Float[Tensor, "M classes"]:
        """Logits with -inf at impossible combinations. `parent` are node ids, -1 at missing positions; `known` slots, -1
        where the position is open."""
        slots = torch.arange(self.base, device=parent.device)
        free = slots < self.num_children[parent.clamp(min=0)][..., None]
        possible = torch.where((known >= 0)[..., None], slots == known[..., None], free)
        logits = self.logits(hidden, parent)
        blocked = torch.zeros_like(logits, dtype=torch.bool)
        for place in range(self.length):
            by_digit(blocked, self.base, place).logical_or_(~possible[:, place, None, :, None])
        return logits.masked_fill(blocked, -torch.inf)

    def nll(self, hidden: Float[Tensor, "M L d"], parent: Int[Tensor, "M L"], known: Int[Tensor, "M L"],
            slots: Int[Tensor, "M L"]) -> Float[Tensor, "M"]:
        """-log p of the whole combination."""
        return F.cross_entropy(self.masked(hidden, parent, known), self.code(slots), reduction="none")

    def log_probs(self, hidden: Float[Tensor, "M L d"], parent: Int[Tensor, "M L"],
                  known: Int[Tensor, "M L"]) -> Float[Tensor, "M classes"]:
        return self.masked(hidden, parent, known).log_softmax(-1)

    def _place_values(self, like: Tensor) -> Int[Tensor, "L"]:
        return self.base ** torch.arange(self.length - 1, -1, -1, device=like.device)

    def code(self, slots: Int[Tensor, "M L"]) -> Int[Tensor, "M"]:
        """The class of a combination."""
        return (slots * self._place_values(slots)).sum(-1)

    def slots(self, code: Int[Tensor, "M"]) -> Int[Tensor, "M L"]:
        """The combination of a class."""
        return code[:, None] // self._place_values(code) % self.base


def by_digit(values: Tensor, base: int, place: int) -> Tensor:
    """A view (M, before, K, after) of (M, K^L) that tells the slots of one place apart."""
    before = base**place
    return values.view(len(values), before, base, values.shape[1] // (before * base))


def marginals(log_probs: Float[Tensor, "M classes"], base: int, length: int) -> Float[Tensor, "M L K"]:
    """The distribution of each position by itself."""
    return torch.stack([by_digit(log_probs, base, place).logsumexp((1, 3)) for place in range(length)], 1)


def sum_out(log_probs: Float[Tensor, "M classes"], gone: Tensor, base: int) -> Float[Tensor, "M classes"]:
    """The joint distribution of the other positions: those of `gone` (M, L) are summed over and show slot 0."""
    for place in range(gone.shape[1]):
        apart = by_digit(log_probs, base, place)
        total = F.pad(apart.logsumexp(2, keepdim=True), (0, 0, 0, base - 1), value=-torch.inf)
        log_probs = torch.where(gone[:, place, None, None, None], total, apart).flatten(1)
    return log_probs


@dataclass(frozen=True)
class Neighbourhood:
    """Builds the head; `length` and `combine` are settings of the method."""

    length: int
    combine: Literal["concat", "mean"]
    role = "head"

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> JointHead:
        return JointHead(tree, embedding.embedding_dim, self.length, self.combine)
