"""The adaptive softmax (Grave et al. 2017): frequent tokens get much of the head, rare ones little.

For flat methods: tokens in order of frequency, r = 0 the most frequent, are cut at c_1 < .. < c_n < V into a short list
and n clusters, and

    p(r) = softmax(head h)[r]                                                        r < c_1
    p(r) = softmax(head h)[c_1 + i - 1]  softmax(B_i A_i h)[r - c_i]                 c_i <= r < c_{i+1},  i = 1..n

`head` has c_1 + n rows, A_i maps d to d / div_value^i and B_i that to the cluster's size; none has a bias. `nll` computes
a cluster for the positions whose token lies in it and for no other, so most positions meet c_1 + n rows instead of V.
The last maps start at zero: an untrained head is uniform over the short list and the clusters, and within each cluster.

The order is that of the training counts and is saved with the weights: a run that is opened again does not have the
counts, its order comes with its weights. Without counts the order is that of the ids.
"""
from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError
from ..registry import register
from ..rng import sent
from ..tree.tree import Tree
from .head import wider
from .kernels.rows import take

SHARES = (0.04, 0.2)
"""Where the vocabulary is cut when nothing is said: 2,010 and 10,052 of GPT-2's 50,258 tokens."""


class Clusters(NamedTuple):
    """Which positions each cluster has, as the processor knows it; their order is any."""

    order: Int[Tensor, "M"]
    members: list[Tensor]

    def to(self, device: torch.device) -> Clusters:
        return self._replace(members=[sent(positions, device) for positions in self.members])


class AdaptiveHead(nn.Module):
    rank: Tensor
    edges: Tensor

    def __init__(self, width: int, size: int, cutoffs: tuple[int, ...], div_value: float, frequency: Tensor | None):
        super().__init__()
        self.branching, self.cutoffs = size, cutoffs
        self.output = nn.Linear(width, cutoffs[0] + len(cutoffs), bias=False)
        inner = [max(1, int(width / div_value**number)) for number in range(1, len(cutoffs) + 1)]
        self.tails = nn.ModuleList(nn.Sequential(nn.Linear(width, w, bias=False), nn.Linear(w, high - low, bias=False))
                                   for w, (low, high) in zip(inner, pairwise((*cutoffs, size))))
        self.flops = 2 * sum(weight.numel() for weight in self.parameters())
        """Forward, per position, when every cluster is needed: at most this."""
        nn.init.zeros_(self.output.weight)
        for tail in self.tails:
            nn.init.zeros_(tail.get_submodule("1").weight)  # pyright: ignore[reportArgumentType]
        order = torch.arange(size) if frequency is None else torch.argsort(frequency.cpu(), descending=True, stable=True)
        self.register_buffer("rank", torch.argsort(order))
        self._known = (-1, self.rank)
        """The ranks where the processor has them, and which version of them."""
        self.register_buffer("edges", torch.tensor(cutoffs), persistent=False)

    def nll(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        return self._nll(hidden, slot, self._members(self.rank[slot], self.edges))

    def _members(self, rank: Int[Tensor, "M"], edges: Tensor) -> list[Tensor]:
        """The positions of each cluster."""
        cluster = torch.bucketize(rank, edges, right=True)  # 0 is the short list
        return [(cluster == number).nonzero()[:, 0] for number in range(1, len(self.cutoffs) + 1)]

    def _nll(self, hidden: Tensor, slot: Tensor, members: list[Tensor]) -> Tensor:
        rank = self.rank[slot]
        cluster = torch.bucketize(rank, self.edges, right=True)
        entry = torch.where(cluster == 0, rank, self.cutoffs[0] + cluster - 1)
        nll = F.cross_entropy(wider(self.output(hidden)), entry, reduction="none")
        for number, (tail, chosen) in enumerate(zip(self.tails, members)):
            logits = wider(tail(take(hidden, chosen)))
            within = F.cross_entropy(logits, rank[chosen] - self.cutoffs[number], reduction="none")
            nll = nll.index_add(0, chosen, within)
        return nll

    def arrange(self, parent: Int[Tensor, "M"], slot: Int[Tensor, "M"]) -> Clusters:
        version, rank = self._known
        if version != self.rank._version:  # a checkpoint was opened
            rank = self.rank.cpu()
            self._known = (self.rank._version, rank)
        return Clusters(torch.arange(len(slot)), self._members(rank[slot], torch.tensor(self.cutoffs)))

    def sorted(self, hidden: Float[Tensor, "M d"], slot: Int[Tensor, "M"], share: Float[Tensor, "M"],
               order: Clusters) -> tuple[Float[Tensor, ""], Float[Tensor, "M"]]:
        """(sum of share x nll, nll), and nothing waits for the device."""
        nll = self._nll(hidden, slot, order.members)
        return (nll * share.to(nll.dtype)).sum(), nll.detach()

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M K"]:
        short = self.cutoffs[0]
        first = wider(self.output(hidden)).log_softmax(-1)
        rest = [wider(tail(hidden)).log_softmax(-1) + first[:, short + number, None] for number, tail in enumerate(self.tails)]
        return torch.cat([first[:, :short], *rest], 1)[:, self.rank]


@register("adaptive")
@dataclass(frozen=True)
class Adaptive:
    """`cutoffs`: where the tokens in order of frequency are cut (none: at 4% and 20% of the vocabulary); `div_value`: by
    how much each cluster is narrower than the one before."""

    cutoffs: tuple[int, ...] | None = None
    div_value: float = 4.0
    role = "head"

    def __post_init__(self) -> None:
        cuts = self.cutoffs
        if cuts is not None and (not cuts or cuts[0] < 1 or any(low >= high for low, high in pairwise(cuts))):
            raise ConfigError(f"head.cutoffs must rise from at least 1, for example 2000,10000, got {cuts}")
        if not self.div_value >= 1:
            raise ConfigError(f"head.div_value must be at least 1, got {self.div_value}")

    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> AdaptiveHead:
        if tree.height > 1:
            raise ConfigError(f"the adaptive head divides the whole vocabulary, but this tree has {tree.height} levels; use it "
                              "with a flat method such as ar or mdlm, or take --set method.head=tied")
        cutoffs = self.cutoffs or tuple(sorted({max(1, round(share * tree.size)) for share in SHARES}))
        if cutoffs[-1] >= tree.size:
            raise ConfigError(f"head.cutoffs must lie below the vocabulary's {tree.size} tokens, got {cutoffs}")
        return AdaptiveHead(embedding.embedding_dim, tree.size, cutoffs, self.div_value,
                            None if mass is None else mass[tree.children[0].to(mass.device)])
