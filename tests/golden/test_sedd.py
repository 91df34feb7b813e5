"""SEDD (absorbing graph) against the numbers of its own code.

The original's time t runs to a mask probability of (1 - eps) t; ours is the mask probability itself. What our closed forms
skip (scores, their entropy, staggered scores) is certified for the oracle, which the proofs then hold against the product.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tdlm.objectives import SeddMethod
from tdlm.objectives.base import Loss
from tdlm.process import flat_oracle as oracle
from tdlm.process.flat import Hybrid, Uniform
from tdlm.sample import Choice
from tdlm.sample.score import AbsorbScore
from tdlm.tree import Tree
from tests.golden.fixture import Golden, gpt2_logits

SEDD = Golden("sedd")
EPS = 1e-3
PROCESS = Hybrid(13)


class RawHead:
    """`hidden` already holds the raw numbers of the tokens."""

    def logits(self, hidden: Tensor, parent: Tensor) -> Tensor:
        return hidden


class GivenModel:
    told_time = True
    head: Any = RawHead()

    def __init__(self, raw: Tensor):
        self.raw = raw

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return self.raw


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=rtol, atol=atol)


def share(group: str, name: str = "t") -> Tensor:
    """The mask probability at the original's time."""
    return (1 - EPS) * SEDD[f"{group}/{name}"]


def loss_of(group: str, raw: Tensor) -> Loss:
    """Rows of one position each, so that `bound` is the loss per position."""
    x, z = SEDD[f"{group}/x"], SEDD[f"{group}/zt"]
    m = share(group).repeat_interleave(x.shape[1])
    target = SeddMethod().objective(Tree.star(raw.shape[-1]), None)
    # d t (original) = d m / (1 - eps)
    return target.score(GivenModel(raw.flatten(0, 1)[:, None]), x.reshape(-1, 1), z.reshape(-1, 1), m,
                        torch.full_like(m, 1 / (1 - EPS)))


def test_noise():
    t = SEDD["grid/t"]
    for keep, slope in ((PROCESS.at((1 - EPS) * t).keep, (1 - EPS) * PROCESS.rates((1 - EPS) * t)[0]),
                        (Uniform(13, EPS).at(t).keep, 13 * Uniform(13, EPS).rates(t)[1])):
        close(-torch.log(keep), SEDD["grid/sigma"])
        close(slope, SEDD["grid/dsigma"])
    for group in ("small", "gpt2"):
        close(-torch.log(PROCESS.at(share(group)).keep), SEDD[f"{group}/sigma"])
        close((1 - EPS) * PROCESS.rates(share(group))[0], SEDD[f"{group}/dsigma"])


def gpt2_raw() -> Tensor:
    return gpt2_logits(8, int(SEDD["gpt2/vocab"]), int(SEDD["gpt2/salt"]), SEDD["gpt2/x"][0])[None]


@pytest.mark.parametrize("group", ["small", "gpt2"])
def test_losses(group):
    raw = (SEDD["small/raw"] if group == "small" else gpt2_raw())[..., :-1]
    ours = loss_of(group, raw).bound.view_as(SEDD[f"{group}/loss_per_position"])
    close(ours, SEDD[f"{group}/loss_per_position"])
    close(ours, SEDD[f"{group}/mdlm_repo_loss_per_position"])
    close(ours.sum(1), SEDD[f"{group}/loss_per_sequence"])
    close(ours / SEDD[f"{group}/dsigma"][:, None], SEDD[f"{group}/score_entropy"])


@pytest.mark.parametrize("group", ["small", "gpt2"])
def test_float32(group):
    """Within what the original's own float32 allows, plus 1e-5 (1e-4 at the ends of time)."""
    raw = (SEDD["small/raw"] if group == "small" else gpt2_raw())[..., :-1]
    truth = SEDD[f"{group}/loss_per_position"]
    ours = loss_of(group, raw.float()).bound.view_as(truth)
    for name in ("loss_per_position", "mdlm_repo_loss_per_position", "score_entropy"):
        scale = SEDD[f"{group}/dsigma"][:, None] if name == "score_entropy" else torch.ones(1, 1)
        slack = (SEDD[f"{group}_f32/{name}"].double() * scale - truth).abs()
        assert ((ours - truth).abs() <= slack + 1e-5 * truth.abs() + 1e-6).all()


def test_gradient():
    """Times in [1e-3, 1] train, and ours is the mean over positions where the original sums over them."""
    raw = SEDD["small/raw"][..., :13].clone().requires_grad_(True)
    x, z, m = SEDD["small/x"], SEDD["small/zt"], share("small")
    density = torch.full_like(m, 1 / (1 - EPS))
    loss = SeddMethod().objective(Tree.star(13), None).score(GivenModel(raw), x, z, m, density)
    (grad,) = torch.autograd.grad(loss.train, raw)
    theirs = SEDD["small/grad_mean_loss_wrt_log_score"]
    rows = m >= 1e-3
    assert rows.sum() >= 5
    close(grad[rows] * (1 - 1e-3) * x.shape[1], theirs[rows][..., :13])
    assert not theirs[..., 13].any()


def test_the_oracle_has_their_scores_and_entropies():
    x, z, log_score = SEDD["small/x"], SEDD["small/zt"], SEDD["small/log_score"]
    for b in range(6):
        m = float(share("small")[b])
        ours = oracle.scores(PROCESS, SEDD["small/raw"][b], tuple(z[b].tolist()), m)
        close(ours.log(), log_score[b])
        K, unit = oracle.marginals(PROCESS, torch.tensor(m, dtype=torch.float64)), torch.eye(14, dtype=torch.float64)
        for i, (token, state) in enumerate(zip(x[b].tolist(), z[b].tolist())):
            rates = (1 - unit[state]) * (state == 13)
            cost = oracle.jump_costs(rates, K[token] / K[token, state].clamp(min=1e-300), ours[i])
            close(cost, SEDD["small/score_entropy"][b, i])


@pytest.mark.parametrize("group", ["reverse", "reverse_normalised"])
def test_steps(group):
    """The oracle's rows are theirs, negative entries included; the product's are those, clipped and normalised."""
    world = oracle.FlatWorld(PROCESS, torch.ones(13))
    for b in range(8):
        raw, state = SEDD[f"{group}/raw"][b], tuple(SEDD[f"{group}/zt"][b].tolist())
        later, earlier = (float(share(group, name)[b]) for name in ("t", "s"))

        def ratios(z, t, raw=raw):
            return oracle.scores(PROCESS, raw, z, t)

        close(ratios(state, later).log(), SEDD[f"{group}/log_score"][b])
        unit = oracle.generator(PROCESS, later) * (1 - later)
        rates = (unit[:, list(state)].T * ratios(state, later)).scatter(1, torch.tensor(state)[:, None], 0.0)
        close(rates.scatter(1, torch.tensor(state)[:, None], -rates.sum(1, keepdim=True)), SEDD[f"{group}/reverse_rate"][b])
        staggered = torch.linalg.solve(oracle.kernel(PROCESS, earlier, later).T, ratios(state, later).T).T
        close(staggered, SEDD[f"{group}/staggered_score"][b], rtol=1e-8, atol=1e-9)
        wide = {"rtol": 1e-7, "atol": 1e-9}  # the oracle inverts a matrix; the scores reach 1e4
        close(world.euler_rows(ratios)(state, later, earlier), SEDD[f"{group}/euler_probs"][b], **wide)
        close(world.analytic_rows(ratios)(state, later, earlier), SEDD[f"{group}/analytic_probs"][b], **wide)
        close(world.analytic_rows(ratios)(state, later, 0.0)[:, :13], SEDD[f"{group}/denoiser_probs"][b], **wide)
        masked = torch.tensor(state) == 13
        hidden, at = raw[masked][:, :13], torch.tensor(state)[masked]
        rule = AbsorbScore(PROCESS)
        for name in ("euler", "analytic"):
            theirs = SEDD[f"{group}/{name}_probs"][b][masked].clamp(min=0)
            close(rule.rows(RawHead(), hidden, at, later, earlier, Choice()), theirs / theirs.sum(1, keepdim=True))
        theirs = SEDD[f"{group}/denoiser_probs"][b][masked]
        last = rule.rows(RawHead(), hidden, at, later, 0.0, Choice())
        close(last[:, :13], theirs / theirs.sum(1, keepdim=True))
        assert not last[:, 13].any()


def test_account():
    SEDD.account(
        compared=["grid/sigma", "grid/dsigma", "small/sigma", "small/dsigma", "gpt2/sigma", "gpt2/dsigma", "*/log_score",
                  "*/score_entropy", "*/loss_per_position", "*/mdlm_repo_loss_per_position", "*/loss_per_sequence",
                  "small/grad_mean_loss_wrt_log_score", "*/euler_probs", "*/analytic_probs", "*/denoiser_probs",
                  "*/reverse_rate", "*/staggered_score"],
        inputs=["*/x", "*/t", "*/s", "*/zt", "*/raw", "small/mask_id", "gpt2/mask_id", "gpt2/vocab", "gpt2/salt"],
        left_out={"reverse/grid_8_steps": "their grid stops at t = 1e-5 and one more evaluation follows; our N steps end at 0"})
