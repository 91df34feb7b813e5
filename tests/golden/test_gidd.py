"""GIDD against the numbers of its own code: marginals, weights, losses, gradients, posteriors. Every array is accounted for."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tdlm.objectives import GiddMethod, GiddObjective
from tdlm.objectives.base import Loss
from tdlm.process.flat import Hybrid, marginal, posterior
from tdlm.tree import Tree
from tests.golden.fixture import Golden, gpt2_logits

GIDD = Golden("gidd")
P = {"p0.0": math.exp(-20), "p0.1": 0.1, "p0.2": 0.2}  # the original puts e^-20 in the place of 0
MODES = {"dynamic": ("dynamic", 2.0), "clip": ("clip", 2.0), "clip10": ("clip", 10.0), "none": ("none", 2.0)}


class GivenHead:
    """`hidden` already holds the logits of the tokens; further columns take mass away, as the original's padding does."""

    def __init__(self, size: int):
        self.size = size

    def log_probs(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return hidden.log_softmax(-1)[:, : self.size]

    def nll(self, hidden: Tensor, parent: Tensor, slot: Tensor) -> Tensor:
        return -self.log_probs(hidden, parent).gather(1, slot[:, None])[:, 0]


class GivenModel:
    told_time = True

    def __init__(self, logits: Tensor, size: int):
        self.head, self.logits = GivenHead(size), logits

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return self.logits


class Case:
    """The inputs of one group, with MASK moved to the last id and its logit taken out."""

    def __init__(self, group: str, logits: str | None = None):
        mask, self.t = int(GIDD[f"{group}/mask_id"]), GIDD[f"{group}/t"]
        if group == "gpt2":
            self.size = int(GIDD["gpt2/vocab"]) - 1
            wide = gpt2_logits(8, self.size + 1, int(GIDD["gpt2/salt"]), GIDD["gpt2/x"][0])[None]
        else:
            wide, self.size = GIDD[logits or f"{group}/logits"].double(), 13
        self.x, self.z = (torch.where(ids == mask, self.size, ids - (ids > mask).long())
                          for ids in (GIDD[f"{group}/x"], GIDD[f"{group}/zt"]))
        self.logits = torch.cat([wide[..., :mask], wide[..., mask + 1:]], -1)

    def objective(self, p: str, mode: str = "dynamic") -> GiddObjective:
        weighting, clip = MODES[mode]
        method = GiddMethod(p_uniform=P[p], weighting=weighting, clip=clip)  # pyright: ignore[reportArgumentType]
        return method.objective(Tree.star(self.size), None)

    def positions(self, p: str, mode: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """KL, Itakura-Saito, the weight of the bound and that of training, all (B, S)."""
        target = self.objective(p, mode)
        row, column = torch.ones_like(self.x).nonzero(as_tuple=True)
        model = GivenModel(self.logits, self.size)
        kl, other = target.divergences(model.head, self.logits[row, column].to(dtype), self.x[row, column], self.z[row, column],
                                       target.process.at(self.t[row]))
        weight, train = target.weights(self.x, self.z, self.t)
        return kl.view_as(self.x), other.view_as(self.x), weight, train

    def loss(self, p: str, mode: str) -> tuple[Loss, Tensor]:
        logits = self.logits.clone().requires_grad_(True)
        loss = self.objective(p, mode).score(GivenModel(logits, self.size), self.x, self.z, self.t, torch.ones_like(self.t))
        (grad,) = torch.autograd.grad(loss.train, logits)
        return loss, grad


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("p", P)
def test_marginals(p):
    t = GIDD["schedule/t"]
    process = Hybrid(13, P[p])
    mix = process.at(t)
    close(mix.keep, GIDD[f"schedule/{p}/alpha"])
    noise = torch.cat([mix.each[:, None].expand(-1, 13), mix.mask[:, None]], 1)
    close(noise, GIDD[f"schedule/{p}/beta_pi"])
    for row, time in enumerate(t):
        rows = marginal(process.at(time.expand(13)), torch.eye(13, dtype=torch.float64))
        close(rows, GIDD[f"schedule/{p}/q_zt_given_x"][row])


@pytest.mark.parametrize("p", P)
def test_weights(p):
    t, x = GIDD["weights/t"], int(GIDD["weights/x"])
    tokens, states = torch.full((len(t), 14), x), torch.arange(14).expand(len(t), -1)
    for mode, (weighting, clip) in MODES.items():
        method = GiddMethod(p_uniform=P[p], weighting=weighting, clip=clip)  # pyright: ignore[reportArgumentType]
        weight, train = method.objective(Tree.star(13), None).weights(tokens, states, t)
        close(weight, GIDD[f"weights/{p}/elbo_weight"])
        close(train, GIDD[f"weights/{p}/{mode}/loss_weight"])
    close(torch.tensor(math.log(Hybrid(13, P[p]).scale), dtype=torch.float64), GIDD[f"weights/{p}/log_B"], rtol=1e-9, atol=1e-8)
    close(torch.tensor(P[p], dtype=torch.float64), GIDD[f"weights/{p}/p_uniform_effective"])


def modes_of(group: str, p: str) -> list[str]:
    return [mode for mode in MODES if f"{group}/{p}/{mode}/loss" in GIDD]


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("group", ["small", "midmask", "gpt2"])
def test_losses(group, p):
    case = Case(group)
    real = GIDD[f"{group}/attention_mask"].double() if f"{group}/attention_mask" in GIDD else torch.ones(case.x.shape)
    for mode in modes_of(group, p):
        kl, other, weight, train = case.positions(p, mode)
        where = f"{group}/{p}/{mode}"
        close((kl + other) * weight, GIDD[f"{group}/{p}/elbo"])
        close((kl + other) * train, GIDD[f"{where}/loss"])
        for name, part in (("kl", kl), ("is", other)):
            close((part * train * real).sum() / (train * real).sum(), GIDD[f"{where}/metric_{name}"])
        loss, grad = case.loss(p, mode)
        # times in [1e-4, 1 - 1e-4] train, drawn from all of (0, 1): hence the factor
        close(loss.train * (1 - 2e-4), GIDD[f"{where}/loss_scalar"])
        close(loss.bound, GIDD[f"{group}/{p}/elbo"].sum(1))
        if f"{where}/grad_loss_scalar" in GIDD:
            theirs = GIDD[f"{where}/grad_loss_scalar"]
            close(grad * (1 - 2e-4), theirs[..., :13])
            assert not theirs[..., 13].any()
    if f"{group}/{p}/elbo_scalar" in GIDD:
        kl, other, weight, _ = case.positions(p, "none")
        close(((kl + other) * weight * real).sum() / real.sum(), GIDD[f"{group}/{p}/elbo_scalar"])


@pytest.mark.parametrize("p", P)
def test_padding_columns_would_take_mass(p):
    """Our head has no padding columns; given log-probabilities that lost mass to them, the formulas give the original's."""
    case = Case("small", logits="pad128/logits")
    real = GIDD["small/attention_mask"].double()
    kl, other, weight, train = case.positions(p, "dynamic")
    close((kl + other) * weight, GIDD[f"pad128/{p}/elbo"])
    loss = (kl + other) * train
    close(loss, GIDD[f"pad128/{p}/dynamic/loss"])
    close(loss.mean(), GIDD[f"pad128/{p}/dynamic/loss_scalar"])
    for name, part in (("kl", kl), ("is", other)):
        close((part * train * real).sum() / (train * real).sum(), GIDD[f"pad128/{p}/dynamic/metric_{name}"])


@pytest.mark.parametrize("p", P)
@pytest.mark.parametrize("group", ["small", "gpt2"])
def test_float32(group, p):
    """Our float32 against the float64 numbers, within what the original's own float32 allows."""
    case = Case(group)
    for mode in ("dynamic", "clip", "none"):
        kl, other, weight, train = case.positions(p, mode, torch.float32)
        ours = torch.stack([(kl + other) * weight, (kl + other) * train])
        truth = torch.stack([GIDD[f"{group}/{p}/elbo"], GIDD[f"{group}/{p}/{mode}/loss"]])
        theirs = torch.stack([GIDD[f"{group}_f32/{p}/elbo"], GIDD[f"{group}_f32/{p}/{mode}/loss"]]).double()
        assert ((ours - truth).abs() <= (theirs - truth).abs() + 1e-5 * truth.abs() + 1e-6).all()


def test_zero_is_the_limit_of_the_originals_smallest():
    """p_uniform = 0, exactly: masked positions as with e^-20 to 2.4e-6, all others nothing."""
    case = Case("small")
    target = GiddMethod(p_uniform=0.0, weighting="none").objective(Tree.star(13), None)
    loss = target.score(GivenModel(case.logits, 13), case.x, case.z, case.t, torch.ones_like(case.t))
    masked = (case.z == 13) * GIDD["small/p0.0/elbo"]
    close(loss.bound, masked.sum(1), rtol=5e-6, atol=0)


@pytest.mark.parametrize("p", P)
def test_posterior(p):
    logits, state = GIDD["reverse/logits"][..., :13], GIDD["reverse/zt"]
    s, t = (GIDD[f"reverse/{name}"].repeat_interleave(5) for name in ("s", "t"))
    rows = posterior(Hybrid(13, P[p]), state.flatten(), logits.softmax(-1).flatten(0, 1), s, t)
    close(rows, GIDD[f"reverse/{p}/probs"].flatten(0, 1))
    filtered = rows.where(rows >= 0.05, 0.0)
    close(filtered / filtered.sum(1, keepdim=True), GIDD[f"reverse/{p}/probs_min_p_0.05"].flatten(0, 1))
    case, probes = Case("gpt2"), GIDD["gpt2/probe_ids"]
    process, t = Hybrid(case.size, P[p]), case.t.expand(8)
    close(process.at(case.t).keep, GIDD[f"gpt2/{p}/alpha"])
    noise = marginal(process.at(case.t), torch.zeros(1, case.size, dtype=torch.float64))
    close(noise[:, probes], GIDD[f"gpt2/{p}/beta_pi_probe"], rtol=1e-9, atol=0.0)
    rows = posterior(process, case.z[0], case.logits[0].softmax(-1), torch.full_like(t, 0.3), t)
    close(rows[:, probes], GIDD[f"gpt2/{p}/reverse_s0.3_probe"][0], rtol=1e-9, atol=1e-15)
    close(rows.sum(1), GIDD[f"gpt2/{p}/reverse_s0.3_rowsum"][0])


def test_account():
    GIDD.account(
        compared=["schedule/p*", "weights/p*/elbo_weight", "weights/p*/*/loss_weight", "weights/p*/log_B",
                  "weights/p*/p_uniform_effective", "small/p*", "midmask/p*", "gpt2/p[0-9]*", "pad128/p*", "small_f32/*",
                  "gpt2_f32/*", "reverse/p*"],
        inputs=["*/x", "*/t", "*/zt", "*/s", "*/logits", "*/attention_mask", "*/mask_id", "gpt2/vocab", "gpt2/salt",
                "gpt2/probe_ids"],
        left_out={"weights/p*/alpha_ratio": "returned by the original and used nowhere in its loss"})
