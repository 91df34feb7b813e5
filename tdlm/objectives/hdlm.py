"""Hierarchical diffusion (HDLM): token -> cluster -> MASK, on a tree of height 2 whose root is MASK.

A token x leaves at rate gamma / (1 - t) for a cluster, its own with probability xi and every other one of the n clusters
with eta = (1 - xi) / (n - 1); a cluster leaves at rate 1 / (1 - t) for MASK (`process/hierarchical.py`). With the
network's distribution p over tokens, and P_c the probability of the tokens of cluster c,

    q(c|x) = xi for the own cluster, else eta          M_c = sum_v p(v) q(c|v) = eta + (xi - eta) P_c.

The true reverse goes from MASK to c at a rate proportional to q(c|x) and from c to x; the model's goes to c in proportion
to M_c and from c to v in proportion to p(v) q(c|v) / M_c. Both leave a state at the same total rate, so that in

    -log p(x) <= sum_i Int dt  lambda_1 w_1 E[ sum_c q(c|x) log(q(c|x) / M_c) | MASK ]
                             + lambda_0 w_0 E[ -log(p(x) q(c|x) / M_c)        | cluster c ]

only these divergences remain; p is one of the position given the *other* positions (what z_i itself says enters by q).
At xi = 1 they are -log P_c and -log p(x) / P_c: the tree method on the hierarchical process with a dense head. The bound
is exact for any gamma and xi; `train` clips both weights to [lower, upper]: (0, 2) at gamma = 1, (0.1, 5) at gamma = 2 and
(0, 10) on LM1B are the published settings.

`scratch` is HDLM as a method of this package: embeddings start at random as everywhere, there is one head, and PAD is
treated as in the other methods. `faithful` inherits the original's training loss, a mean over real tokens in which PAD
has no term (so a `count` bound of such a network is poor: compare by `given-length`). It is the mean of each micro-batch, so
where rows hold PAD this loss alone depends on how a batch is cut into micro-batches. In neither are reproduced: embeddings
taken from a trained GIDD and cluster centroids, the second head, the attention mask over PAD (which its own sampling
lacks), rows of the forward process that do not sum to one and the likelihood at xi < 1 that is not a bound, the mask weight
that is right at gamma = 1 and 2 only, floored denominators, an argmax for what is left at t = 0.

Samplers: those of the tree method, on the exact reverse; `hdlm` is the original's default step, one level at a time with
marginal-preserving probabilities, which takes every cluster for the token's own, also at xi < 1.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError, SampleError, TreeError
from ..model.dense import Dense, DenseHead
from ..model.head import weighted_nll
from ..model.kernels.rows import take
from ..model.model import Network
from ..process import Hierarchical, Moment, corrupt
from ..registry import register
from ..rng import Draws
from ..sample import Sampled, generate
from ..tree.tree import Tree
from .base import Estimator, Loss, Pad, beside, by_row, choose_sampler, delivered, in_pad_mode, is_pad, ordered
from .tree import SAMPLERS
from .wide import in_parts


@register("hdlm")
@dataclass(frozen=True)
class HdlmMethod:
    head: Any = field(default_factory=Dense)
    pad: Literal["count", "given-length"] = "count"
    gamma: float = 1.0
    xi: float = 1.0
    clip: tuple[float, float] | None = (0.0, 2.0)
    variant: Literal["scratch", "faithful"] = "scratch"
    role = "method"
    flat = False
    causal = False

    def __post_init__(self) -> None:
        if not 0 < self.xi <= 1:
            raise ConfigError(f"method.xi must lie in (0, 1], got {self.xi}")
        if self.xi < 1 and not isinstance(self.head, Dense):
            raise ConfigError("method.xi below 1 needs probabilities of all tokens at once: method.head=dense")
        if self.clip is not None and not 0 <= self.clip[0] < self.clip[1]:
            raise ConfigError(f"method.clip must be two rising numbers from 0 on, or none, got {self.clip}")
        Hierarchical(self.gamma)  # says now what is wrong with gamma

    def objective(self, tree: Tree, pad_id: int | None) -> HdlmObjective:
        return HdlmObjective(self, tree, pad_id)


class Sheet(NamedTuple):
    """What the network is shown and asked, in the order its head wants, and with which weights."""

    nodes: Int[Tensor, "B S"]
    time: Float[Tensor, "B"]
    place: Int[Tensor, "M"]
    """Hidden positions, counted through the batch."""
    state: Int[Tensor, "M"]
    token: Int[Tensor, "M"]
    slot: Int[Tensor, "M"]
    cell: Int[Tensor, "M"]
    """Row and level."""
    weight: Float[Tensor, "M"]
    """Of the bound."""
    share: Float[Tensor, "M"]
    tokens: Int[Tensor, "B"]
    order: Any
    """The head's own (`head.arranged`), or None."""


class HdlmObjective:
    causal = False
    prepares = True
    knows_level = False
    levels = 2
    samplers = (*SAMPLERS, "hdlm")

    def __init__(self, method: HdlmMethod, tree: Tree, pad_id: int | None):
        if tree.height != 2:
            raise TreeError(f"hdlm needs a tree of height 2 (token, cluster, MASK), got height {tree.height}; "
                            "build one with tdlm tree build --height 2")
        self.method, self.tree, self.pad_id = method, tree, pad_id
        self.pad: Pad = method.pad
        self.process, self.num_states = Hierarchical(method.gamma), tree.nodes
        self.known = tree.to("cpu") if tree.ancestor.is_cuda else None
        if method.xi < 1 and not tree.ancestor.is_meta:  # a dry run has a tree without numbers
            self._check_clusters()

    def _check_clusters(self) -> None:
        """A wrong cluster must exist, and must be a state of its own."""
        bare = (self.tree.ancestor[1] < self.tree.size).nonzero()
        if len(bare):
            raise TreeError(f"method.xi below 1 needs a cluster above every token, but token {int(bare[0])} hangs under the "
                            "root; build a tree with fewer or larger clusters, or set method.xi=1")
        if self.clusters < 2:
            raise TreeError("method.xi below 1 needs at least 2 clusters, this tree has one; set method.xi=1")

    @cached_property
    def clusters(self) -> int:
        """n."""
        return int(self.tree.num_children[self.tree.root])

    @property
    def eta(self) -> float:
        return (1 - self.method.xi) / (self.clusters - 1)

    @property
    def is_bound(self) -> bool:
        return self.pad != "drop"

    def with_pad(self, pad: Pad) -> HdlmObjective:
        return in_pad_mode(self, pad)

    def estimators(self, model: Network) -> dict[str, Estimator]:
        return {"sampled": self.loss}

    def loss(self, model: Network, tokens: Int[Tensor, "B S"], *, draws: Draws) -> Loss:
        return self.complete(model, self.prepare(model.head, tokens, draws))

    def prepare(self, head: Any, tokens: Int[Tensor, "B S"], draws: Draws) -> Sheet:
        """Everything of `loss` that does not depend on the network, where the tokens are; for draws.device."""
        numbers = beside(draws, tokens)
        moment = self.process.moment(numbers.strata("time"), self.levels)
        return self.sheet(head, tokens, self.states(tokens, moment, numbers), moment, draws.device)

    def states(self, tokens: Int[Tensor, "B S"], moment: Moment, draws: Draws) -> Int[Tensor, "B S"]:
        """z_t: node ids drawn from q_t(. | x)."""
        xi = self.method.xi
        heights, tree = corrupt(moment, draws.uniform("state", tokens.shape[1])), self.tables(tokens)
        nodes = tree.ancestor[heights, tokens]
        if xi == 1:
            return nodes
        n = self.clusters
        uniform = draws.uniform("cluster", tokens.shape[1])
        further = 1 + ((uniform - xi) / (1 - xi) * (n - 1)).long().clamp(max=n - 2)
        slot = (tree.slot[1, tokens] + further.where(uniform >= xi, 0)) % n
        return tree.children[-1, slot].where(heights == 1, nodes)

    def score(self, model: Network, tokens: Int[Tensor, "B S"], nodes: Int[Tensor, "B S"], moment: Moment) -> Loss:
        """The loss of given states: everything of `loss` but the drawing."""
        return self.complete(model, self.sheet(model.head, tokens, nodes, moment, tokens.device))

    def sheet(self, head: Any, tokens: Int[Tensor, "B S"], nodes: Int[Tensor, "B S"], moment: Moment,
              device: torch.device) -> Sheet:
        tree, pad = self.tables(tokens), is_pad(tokens, self.pad_id)
        if self.pad == "given-length":
            nodes = tokens.where(pad, nodes)
        choice = tree.num_children[nodes] > 1 if self.method.xi == 1 else nodes >= tree.size
        place = choice.flatten().nonzero()[:, 0]
        state, token = nodes.flatten()[place], tokens.flatten()[place]
        level = (state == tree.root).long()
        slot = tree.slot[level, token]
        order = ordered(head, state, slot, device) if self.method.xi == 1 else None
        if order is not None:
            place, state, token, level, slot = (values[order.order] for values in (place, state, token, level, slot))
        row, unseen = place // tokens.shape[1], pad.flatten()[place]
        weight, share = moment.weight[row, level], self.train_weight(moment)[row, level]
        if self.method.variant == "faithful":
            share = share.masked_fill(unseen, 0) / (~pad).sum().clamp(min=1)
        else:
            share = share / tokens.numel()
        weight = weight.masked_fill(unseen, 0) if self.pad == "drop" else weight
        return delivered(Sheet(nodes, moment.time, place, state, token, slot, row * self.levels + level, weight, share,
                               (~pad).sum(1), order), device)

    def complete(self, model: Network, sheet: Sheet) -> Loss:
        hidden = take(model.hidden(sheet.nodes, sheet.time, None).flatten(0, 1), sheet.place)
        if self.method.xi == 1:
            train, cost = weighted_nll(model.head, hidden, sheet.state, sheet.slot, sheet.share, sheet.order)
        else:
            cost = self.divergence(model.head, hidden, sheet.state, sheet.token)
            train = (cost * sheet.share.to(cost.dtype)).sum()
        bound = by_row(sheet.cell, cost.detach().double() * sheet.weight, len(sheet.nodes) * self.levels).view(-1, self.levels)
        return Loss(train, bound.sum(1), {"levels": bound, "tokens": sheet.tokens})

    def tables(self, like: Tensor) -> Tree:
        """The tree where `like` lies."""
        return self.known if self.known is not None and not like.is_cuda else self.tree

    def train_weight(self, moment: Moment) -> Float[Tensor, "B 2"]:
        return moment.weight if self.method.clip is None else moment.weight.clamp(*self.method.clip)

    def divergence(self, head: Any, hidden: Float[Tensor, "M d"], state: Int[Tensor, "M"],
                   token: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """What a position hidden at `state` (a cluster or MASK) costs at xi < 1, before its weight."""
        xi, n, cluster = self.method.xi, self.clusters, self.tree.slot[1]

        def costs(hidden: Tensor, state: Tensor, token: Tensor) -> Tensor:
            log_p = head.token_log_probs(hidden)
            log_m = self.mixture(log_p.new_zeros(len(log_p), n).index_add(1, cluster, log_p.exp()))
            log_q = torch.full_like(log_m, math.log(self.eta)).scatter(1, cluster[token][:, None], math.log(xi))
            at_mask = (log_q.exp() * (log_q - log_m)).sum(1)
            here, own = self.cluster_slot[state][:, None], token[:, None]
            return torch.where(state == self.tree.root, at_mask, ((log_m - log_q).gather(1, here) - log_p.gather(1, own))[:, 0])

        return in_parts(costs, self.tree.size, hidden, state, token)

    def mixture(self, p: Float[Tensor, "M n"]) -> Float[Tensor, "M n"]:
        """log M_c from P_c."""
        return torch.log(self.eta + (self.method.xi - self.eta) * p)

    @cached_property
    def cluster_slot(self) -> Int[Tensor, "N"]:
        """Which child of the root a cluster is."""
        table = torch.zeros_like(self.tree.num_children)
        return table.index_copy(0, self.tree.children[-1, : self.clusters],
                                torch.arange(self.clusters, device=table.device))

    def sample(self, model: Network, shape: tuple[int, int], *, steps: int, draws: Draws, prefix: Tensor | None = None,
               sampler: str | None = None, **options: Any) -> Sampled:
        if options.get("per_level") is not None:
            raise SampleError("the levels of hdlm overlap in time, steps cannot be shared out between them; give steps alone")
        name, process, tree = choose_sampler(self.samplers, sampler), self.process, self.tree
        if name == "hdlm":
            process = replace(process, step="marginal")
        elif self.method.xi < 1:
            model, tree = cast(Network, _Astray(model, self)), self.detour  # a walk asks its head for log_probs alone
        draw = SAMPLERS.get(name, generate)
        return draw(model, process, tree, shape, steps=steps, draws=draws, prefix=prefix, **options)

    @cached_property
    def detour(self) -> Tree:
        """The tree as the reverse process walks it at xi < 1: every token can be reached from every cluster."""
        V, n = self.tree.size, self.clusters
        children = torch.arange(V, device=self.tree.children.device).repeat(n + 1, 1)
        children[-1] = -1
        children[-1, :n] = self.tree.children[-1, :n]
        num_children = self.tree.num_children.clone()
        num_children[V:-1] = V
        return replace(self.tree, children=children, num_children=num_children)


class _Astray:
    """The network at xi < 1 as a network on the detour tree: MASK -> c by M_c, c -> v by p(v) q(c|v) / M_c."""

    def __init__(self, model: Network, objective: HdlmObjective):
        self.model, self.objective, self.told_time, self.hidden = model, objective, model.told_time, model.hidden

    @property
    def head(self) -> _Astray:
        return self

    def log_probs(self, hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"]) -> Float[Tensor, "M V"]:
        target, tree, xi = self.objective, self.objective.tree, self.objective.method.xi
        head, masked = cast(DenseHead, self.model.head), parent == tree.root
        clusters = target.mixture(head.log_probs(hidden[masked], parent[masked])[:, : target.clusters].exp())
        tokens = head.token_log_probs(hidden[~masked])
        inside = tree.ancestor[1] == parent[~masked][:, None]
        log_q = torch.full_like(tokens, math.log(target.eta)).masked_fill(inside, math.log(xi))
        result = torch.full((len(parent), tree.size), -torch.inf, dtype=clusters.dtype, device=parent.device)
        result[masked, : target.clusters] = clusters
        result[~masked] = (tokens + log_q).log_softmax(-1)
        return result
