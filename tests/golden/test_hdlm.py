"""HDLM against the numbers of its authors' code.

Theirs floors denominators at 1e-4 (`floored`) and, at xi < 1, draws from rows that do not sum to one and scores with an
approximation; what it computes there is put together here from the pieces of the exact method.
"""
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tdlm.model import DenseHead
from tdlm.objectives import HdlmMethod, HdlmObjective
from tdlm.process import Hierarchical, Moment
from tdlm.tree import Tree
from tests.golden.fixture import Golden, gpt2_logits
from tests.golden.test_mdlm import Given, close

GOLD = Golden("hdlm")
FLOAT = torch.float64
SHIPPED = {1.0: (0.0, 2.0), 2.0: (0.1, 5.0)}
CLIPS = {"shipped": SHIPPED, "simplified": SHIPPED, "dynamic": SHIPPED, "clip10": {1.0: (0.0, 10.0), 2.0: (0.0, 10.0)},
         "none": {1.0: None, 2.0: None}}
PLAIN = [("small", gamma, kind) for gamma in SHIPPED for kind in ("shipped", "simplified", "clip10")]
PLAIN += [("gpt2", gamma, "shipped") for gamma in SHIPPED]
ASTRAY = [("small", 1.0), ("small", 2.0), ("gpt2", 1.0)]


def tree_of(cluster: Tensor) -> Tree:
    return Tree.from_nested([(cluster == c).nonzero()[:, 0].tolist() for c in range(int(cluster.max()) + 1)])


def our_ids(z: Tensor, tree: Tree) -> Tensor:
    """Theirs: tokens, MASK, clusters; ours: tokens, clusters, root."""
    return torch.where(z == tree.size, tree.root, z - (z > tree.size).long())


def floored(moment: Moment) -> Moment:
    mass = moment.occupancy[:, 1:]
    return replace(moment, weight=moment.weight * mass / mass.clamp(min=1e-4))


class Case:
    def __init__(self, group: str, noisy: str = "zt"):
        self.x, self.t = GOLD[f"{group}/x"], GOLD[f"{group}/t"]
        if group == "gpt2":
            self.tree = tree_of((torch.arange(int(GOLD["gpt2/mask_id"])) * 2654435761 % 2**32) >> 26)
            raw = gpt2_logits(8, int(GOLD["gpt2/width"]), int(GOLD["gpt2/salt"]), self.x[0])
            self.real = torch.ones_like(self.x, dtype=torch.bool)
        else:
            self.tree = tree_of(GOLD["cluster_map"])
            raw, self.real = GOLD["small/logits"], GOLD["small/attention_mask"].bool()
        self.logits = raw.reshape(-1, raw.shape[-1])[:, : self.tree.size]
        self.nodes = our_ids(GOLD[f"{group}/{noisy}"], self.tree)
        self.hidden = self.nodes >= self.tree.size

    def model(self, chosen: Tensor | None = None, dtype: torch.dtype = FLOAT) -> Given:
        logits = self.logits if chosen is None else self.logits[chosen.flatten()]
        return Given(DenseHead(self.tree, len(logits)), logits.to(dtype))

    def moment(self, target: HdlmObjective) -> Moment:
        return floored(target.process.moment(self.t, 2))

    def each(self, target: HdlmObjective, model: Given, moment: Moment, chosen: Tensor | None = None):
        """The product's loss with every (chosen) position as a sequence of its own."""
        pick = torch.ones_like(self.real) if chosen is None else chosen
        row = torch.arange(len(self.x))[:, None].expand_as(self.x)[pick]
        alone = Moment(moment.time[row], None, moment.occupancy[row], moment.weight[row], moment.train_weight[row])
        return target.score(model, self.x[pick][:, None], self.nodes[pick][:, None], alone)

    def gradient(self, train: Tensor, model: Given, chosen: Tensor) -> Tensor:
        """d train / d logits, 18 columns: MASK and the clusters have none."""
        result = torch.zeros(len(self.logits), 18, dtype=FLOAT)
        result[chosen.flatten(), :13] = torch.autograd.grad(train, model.matrix)[0].T
        return result.view(*self.x.shape, -1)


@pytest.mark.parametrize(("group", "gamma", "kind"), PLAIN)
def test_losses_and_gradients(group: str, gamma: float, kind: str) -> None:
    case = Case(group)
    target = HdlmMethod(gamma=gamma, clip=CLIPS[kind][gamma]).objective(case.tree, None)
    moment, name = case.moment(target), f"{group}/xi1.0_gamma{gamma}/{kind}"
    elbo = case.each(target, case.model(), moment).bound.view_as(case.x)
    loss = case.each(target, case.model(), replace(moment, weight=target.train_weight(moment))).bound.view_as(case.x)
    assert close(elbo, GOLD[f"{name}/elbo"]) and close(loss, GOLD[f"{name}/loss"])
    assert close((elbo * case.real).sum() / case.real.sum(), GOLD[f"{name}/elbo_scalar"])
    model = case.model(case.real)
    train = case.each(target, model, moment, case.real).train
    assert close(train, GOLD[f"{name}/loss_scalar"])
    if f"{name}/grad_loss_scalar" in GOLD:
        assert close(case.gradient(train, model, case.real), GOLD[f"{name}/grad_loss_scalar"])


def test_only_their_floor_is_between_the_weights() -> None:
    case = Case("small")
    for gamma in SHIPPED:
        target = HdlmMethod(gamma=gamma).objective(case.tree, None)
        ours, theirs = target.process.moment(case.t, 2), case.moment(target)
        bites = ours.occupancy[:, 1:] < 1e-4
        assert bites.tolist() == [[False, True]] + [[False, False]] * 5, "MASK at t = 0.001"
        assert close(ours.weight[~bites], theirs.weight[~bites]) and (ours.weight > theirs.weight)[bites].all()


def their_costs(target: HdlmObjective, head: Any, hidden: Tensor, state: Tensor, token: Tensor) -> Tensor:
    """Their approximation at xi < 1: of the divergence at MASK the own cluster's part, without its entropy's constant
    for the others, and at a wrong cluster -log p(x)."""
    cluster, root = target.tree.ancestor[1, token], target.tree.root
    log_m = target.mixture(head.log_probs(hidden, torch.full_like(state, root)).exp())
    excess = target.eta * (math.log(target.eta) - log_m)
    others = excess.sum(1) - excess.gather(1, target.tree.slot[1, token][:, None])[:, 0]
    here = log_m.gather(1, target.cluster_slot[state][:, None])[:, 0]
    wrong = torch.where(state == cluster, 0.0, math.log(target.eta) - here)
    return target.divergence(head, hidden, state, token) + torch.where(state == root, -others, wrong)


def their_values(case: Case, target: HdlmObjective, model: Given) -> dict[str, Tensor]:
    """What their code calls loss and elbo (B, S) at xi < 1."""
    moment, (row, column) = case.moment(target), case.hidden.nonzero(as_tuple=True)
    state, token = case.nodes[row, column], case.x[row, column]
    costs = their_costs(target, model.head, model.hidden(case.nodes, case.t, None)[row, column], state, token)
    level = (state == case.tree.root).long()
    return {key: torch.zeros_like(case.x, dtype=costs.dtype).index_put((row, column), costs * weight[row, level].to(costs.dtype))
            for key, weight in {"elbo": moment.weight, "loss": target.train_weight(moment)}.items()}


@pytest.mark.parametrize(("group", "gamma"), ASTRAY)
def test_losses_and_gradients_with_wrong_clusters(group: str, gamma: float) -> None:
    case, name = Case(group, "zt_perturbed"), f"{group}/xi0.9_gamma{gamma}/simplified"
    target, model = HdlmMethod(gamma=gamma, xi=0.9, clip=SHIPPED[gamma]).objective(case.tree, None), case.model()
    values = their_values(case, target, model)
    for key, value in values.items():
        assert close(value, GOLD[f"{name}/{key}"])
        assert close((value * case.real).sum() / case.real.sum(), GOLD[f"{name}/{key}_scalar"])
    if f"{name}/grad_loss_scalar" in GOLD:
        train = (values["loss"] * case.real).sum() / case.real.sum()
        gradient = case.gradient(train, model, torch.ones_like(case.real))
        assert close(gradient, GOLD[f"{name}/grad_loss_scalar"])
    exact = case.each(target, model, case.moment(target)).bound.view_as(case.x)
    own = case.nodes == case.tree.ancestor[1, case.x]
    assert own.any() and close(exact[own], GOLD[f"{name}/elbo"][own]), "at the own cluster theirs is exact"
    rest = case.hidden & ~own
    assert not close(exact[rest], GOLD[f"{name}/elbo"][rest], 1e-3)


@pytest.mark.parametrize(("group", "gamma", "xi"), [("small", 1.0, 1.0), ("small", 2.0, 1.0), ("gpt2", 1.0, 1.0),
                                                    ("gpt2", 2.0, 1.0), ("small", 1.0, 0.9), ("small", 2.0, 0.9)])
def test_single_precision(group: str, gamma: float, xi: float) -> None:
    case = Case(group, "zt" if xi == 1 else "zt_perturbed")
    target = HdlmMethod(gamma=gamma, xi=xi, clip=SHIPPED[gamma]).objective(case.tree, None)
    model = case.model(dtype=torch.float32)
    moment, inner = case.moment(target), (case.t > 0.02) & (case.t < 0.98)
    if xi == 1:
        weights = {"elbo": moment.weight, "loss": target.train_weight(moment)}
        values = {key: case.each(target, model, replace(moment, weight=weight)).bound.view_as(case.x)
                  for key, weight in weights.items()}
    else:
        values = their_values(case, target, model)
    for key, value in values.items():
        theirs = GOLD[f"{group}_f32/xi{xi}_gamma{gamma}/{'shipped' if xi == 1 else 'simplified'}/{key}"].double()
        assert close(value[inner], theirs[inner], 1e-5) and close(value, theirs, 1e-4)


@pytest.mark.parametrize("xi", [1.0, 0.9])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_forward_process(gamma: float, xi: float) -> None:
    """Their rows put p/n on every other cluster, ours (and their own loss) p/(n-1); the rest of the row agrees."""
    name, tree = f"schedule/xi{xi}_gamma{gamma}", tree_of(GOLD["cluster_map"])
    occupancy = Hierarchical(gamma).occupancy(GOLD["schedule/t"], 2)
    for column, key in enumerate(("alpha", "cluster_mass", "mask_mass")):
        assert close(occupancy[:, column], GOLD[f"{name}/{key}"])
    token, cluster, mask = (part[:, None, None] for part in occupancy.unbind(-1))
    target = HdlmMethod(gamma=gamma, xi=xi).objective(tree, None)
    own = one_hot(tree.slot[1], 4).double()
    q = xi * own + target.eta * (1 - own)
    assert close(q.sum(1), torch.ones(13)), "a distribution over clusters"
    theirs = xi * own + target.eta * (1 - own) * 3 / 4
    row = torch.cat([token * torch.eye(13, dtype=FLOAT), mask.expand(-1, 13, 1), cluster * theirs], -1)
    for key in ("q_zt_given_x", "q_zt_given_x__probs_at_t"):
        assert close(row, GOLD[f"{name}/{key}"])
    assert close(row.sum(-1), GOLD[f"{name}/rowsum"])
    if xi == 1:
        assert close(row, GOLD[f"{name}/q_zt_given_x__effective_after_sampler"])


@pytest.mark.parametrize("xi", [1.0, 0.9])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_weights(gamma: float, xi: float) -> None:
    name, tree = f"schedule/xi{xi}_gamma{gamma}", tree_of(GOLD["cluster_map"])
    exact = Hierarchical(gamma).moment(GOLD["schedule/t"], 2)
    moment = floored(exact)
    fine = exact.occupancy[:, 2] >= 1e-4
    for level, key in enumerate(("cluster", "mask")):
        assert close(moment.weight[:, level], GOLD[f"{name}/elbo_weight_{key}"])
        assert close(exact.weight[fine, level], GOLD[f"{name}/elbo_weight_{key}"][fine])
        for kind in ("dynamic", "clip10", "none"):
            target = HdlmMethod(gamma=gamma, xi=xi, clip=CLIPS[kind][gamma]).objective(tree, None)
            assert close(target.train_weight(moment)[:, level], GOLD[f"{name}/{kind}/loss_weight_{key}"])


@pytest.mark.parametrize("gamma", [3.0, 1.5])
def test_weights_where_theirs_lack_a_factor(gamma: float) -> None:
    """At gamma other than 1 and 2 their mask weight lacks 1 / (gamma - 1)."""
    moment = floored(Hierarchical(gamma).moment(GOLD["schedule/t"], 2))
    for column, key in enumerate(("alpha", "cluster_mass", "mask_mass")):
        assert close(moment.occupancy[:, column], GOLD[f"schedule/defect_gamma{gamma}/{key}"])
    assert close(moment.weight[:, 0], GOLD[f"schedule/defect_gamma{gamma}/elbo_weight_cluster"])
    assert close(moment.weight[:, 1] * (gamma - 1), GOLD[f"schedule/defect_gamma{gamma}/elbo_weight_mask"])


@pytest.mark.parametrize(("xi", "mode"), [(1.0, "within"), (0.9, "within"), (0.9, "between")])
@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_their_default_step(gamma: float, xi: float, mode: str) -> None:
    """The `hdlm` sampler: its kernel over heights times the head's children. (`between`, an option of theirs that spreads
    1 - xi over the tokens outside of the cluster, is neither their default nor the posterior; its pieces are ours.)"""
    name, tree = f"reverse/xi{xi}_gamma{gamma}/{mode}", tree_of(GOLD["cluster_map"])
    process = Hierarchical(gamma, step="marginal")
    pairs = list(zip(GOLD["reverse/t"].tolist(), GOLD["reverse/s"].tolist()))
    kernel = torch.stack([process.reverse(t, s, 2) for t, s in pairs])
    occupancy = process.occupancy(torch.tensor(pairs, dtype=FLOAT), 2)
    loose = (occupancy[:, 1, 0] - occupancy[:, 0, 0]) / occupancy[:, 0, 1]
    assert close(kernel[:, 2, 1], GOLD[f"{name}/jump_prob_mask"]) and close(kernel[:, 2, 0], torch.zeros(7))
    assert close(loose, GOLD[f"{name}/jump_prob_cluster_unclipped"]) and close(kernel[:, 1, 0], loose.clamp(max=1))

    z = our_ids(GOLD["reverse/zt"], tree)
    model = Given(head := DenseHead(tree, 42), GOLD["reverse/logits"].reshape(42, 18)[:, :13])
    at_cluster = ((z >= tree.size) & (z < tree.root)).flatten()[:, None]
    clusters = model.head.log_probs(model.unit, torch.full((42,), tree.root)).exp()[:, :4]
    tokens = head.token_log_probs(model.unit).exp()
    parent = torch.where(at_cluster[:, 0], z.flatten(), tree.size)
    kids = tree.children[parent - tree.size]
    inside = torch.zeros(42, 14, dtype=FLOAT).scatter_add(
        1, torch.where(kids < 0, 13, kids), model.head.log_probs(model.unit, parent).exp())[:, :13]
    own, within = one_hot(parent - tree.size, 4).double(), tree.ancestor[1] == parent[:, None]
    keep = xi if mode == "between" else 1.0
    far, away = clusters * (1 - own), tokens * ~within
    clusters = torch.where(at_cluster, keep * own + (1 - keep) * far / far.sum(1, keepdim=True), clusters)
    tokens = torch.where(at_cluster, keep * inside + (1 - keep) * away / away.sum(1, keepdim=True), tokens)
    assert close(clusters.view(7, 6, 4), GOLD[f"{name}/cluster_probs"])
    assert close(tokens.view(7, 6, 13), GOLD[f"{name}/token_probs"][..., :13])
    assert close(GOLD[f"{name}/token_probs"][..., 13], torch.zeros(7, 6))

    row = torch.zeros(7, 6, 18, dtype=FLOAT)
    for i, j in torch.cartesian_prod(torch.arange(7), torch.arange(6)).tolist():
        if z[i, j] == tree.root:
            row[i, j, 13], row[i, j, 14:] = kernel[i, 2, 2], kernel[i, 2, 1] * clusters.view(7, 6, 4)[i, j]
        elif z[i, j] >= tree.size:
            row[i, j, 14:] = kernel[i, 1, 1] * own.view(7, 6, 4)[i, j]
            row[i, j, :13] = kernel[i, 1, 0] * tokens.view(7, 6, 13)[i, j]
        else:
            row[i, j, z[i, j]] = 1
    assert close(row, GOLD[f"{name}/row"])


def test_every_array_is_accounted_for() -> None:
    GOLD.account(
        compared=["schedule/xi*/alpha", "schedule/xi*_mass", "schedule/xi*/q_zt_given_x", "schedule/*__probs_at_t",
                  "schedule/xi*/rowsum", "schedule/xi1.0_*/*__effective_after_sampler", "schedule/xi*/elbo_weight_*",
                  "schedule/*/dynamic/*", "schedule/*/clip10/*", "schedule/*/none/*", "schedule/defect_*",
                  "small/xi*", "gpt2/xi*", "small_f32/*", "gpt2_f32/*", "reverse/*/within/*", "reverse/*/between/*"],
        inputs=["cluster_map", "mask_id", "n_clusters", "schedule/t", "small/[!x]*", "small/x", "gpt2/[!x]*", "gpt2/x",
                "reverse/[tszl]*"],
        left_out={"schedule/*/empirical/*": "training weights t^2 - t + 3 and 3 - 2t without a derivation; no published run",
                  "schedule/xi0.9_*/*__effective_after_sampler": "a defect: the mass their rows lack falls on the last cluster",
                  "reverse/*/gidd_parameterization/*": "not a reverse of this process: clusters go back to MASK, and at "
                                                       "xi = 0.9 rows do not sum to one"})
