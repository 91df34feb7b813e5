"""The published number: the bound on held-out rows, per level, with its Monte-Carlo error.

Every row is scored `repeats` times with independent noise (times stratified over all rows of a repeat). With X_dr the
estimate of row d in repeat r and c_d the row's share in the average (1 / tokens; `weights` has the other one), the bound
is sum_d c_d mean_r X_dr, and its Monte-Carlo standard error

    sqrt( sum_d c_d^2 var_r(X_dr) / repeats ),

which treats rows as independent; stratification makes the true error smaller, never larger in expectation. From MANY repeats
on their own scatter is known well enough to be taken instead, which has the stratification in it:

    sqrt( var_r( sum_d c_d X_dr ) / repeats ).

The error says how far the number is from what infinitely many repeats on *these* rows would give. The estimators are the
method's: `sampled` (the paper's: one time per sequence), `count` (one uniform count of masked positions per level: no
noise of time; cascade and a network that is not told the time), `exact` (no noise at all: autoregressive; one repeat is
all there is and the error is 0).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from ..model.model import Network, autocast
from ..objectives.base import Objective, is_pad
from ..rng import Draws

MANY = 16
"""Repeats whose own scatter tells their error (to within a fifth of it)."""


@dataclass(frozen=True)
class Bound:
    nats: float
    """Per real token."""
    error: float
    levels: list[float]
    level_errors: list[float]
    tokens: int
    rows: int
    repeats: int
    estimator: str
    pad: str
    is_bound: bool
    estimates: Float[Tensor, "repeats rows levels"] = field(repr=False, compare=False)
    """Nats of every row by repeat and level, from which any average can be made."""
    row_tokens: Int[Tensor, "rows"] = field(repr=False, compare=False)

    def averaged(self, batch: int) -> Bound:
        """The same rows under the average over batches of `batch` rows (see `weights`)."""
        return bound_of(self.estimates, self.row_tokens, estimator=self.estimator, pad=self.pad, is_bound=self.is_bound,
                        batch=batch)

    def to_json(self, token_bytes: int | None = None) -> dict[str, Any]:
        result = {"bound": self.nats, "error": self.error, "perplexity": perplexity(self.nats), "levels": self.levels,
                  "level_errors": self.level_errors, "tokens": self.tokens, "documents": self.rows,
                  "repeats": self.repeats, "estimator": self.estimator, "pad": self.pad,
                  "is_a_bound": self.is_bound}
        if token_bytes:
            nats = float(self.estimates.mean(0).sum())  # of the text, whichever average the number above is
            result |= {"bytes": token_bytes, "bits_per_byte": nats / math.log(2) / token_bytes}
        return result


def perplexity(nats: float) -> float:
    """exp, infinite where a float ends (null in JSON; the nats stand beside it)."""
    return math.exp(nats) if nats < 709 else math.inf


def weights(row_tokens: Int[Tensor, "rows"], batch: int | None = None) -> Float[Tensor, "rows"]:
    """What a row's nats count in the average.

    Over tokens (batch None): 1 / all tokens. Over batches of n_b rows with T_b tokens each: n_b / (all rows x T_b), the
    mean of the batches' own nats per token. The two differ when batches hold different numbers of tokens, so there the
    batch size is part of the number. Batches without a token have no ratio and are left out.
    """
    tokens = row_tokens.double()
    if batch is None:
        return torch.full_like(tokens, 1.0) / tokens.sum()
    if batch < 1:
        raise ConfigError(f"an average over batches needs at least 1 row a batch, got {batch}")
    parts = [(len(part), float(part.sum())) for part in tokens.split(batch)]
    counted = sum(rows for rows, total in parts if total)
    return torch.cat([tokens.new_full((rows,), rows / (counted * total) if total else 0.0) for rows, total in parts])


def bound_of(estimates: Float[Tensor, "repeats rows levels"], row_tokens: Int[Tensor, "rows"], *, estimator: str, pad: str,
             is_bound: bool, batch: int | None = None) -> Bound:
    """The number, its error and its levels, from the nats of every row."""
    if not int(row_tokens.sum()):
        raise ConfigError("the rows to evaluate hold no real tokens, only PAD")
    share = weights(row_tokens, batch)
    levels = (estimates.mean(0) * share[:, None]).sum(0)
    return Bound(nats=float(levels.sum()), error=_error(estimates.sum(2), share), levels=levels.tolist(),
                 level_errors=[_error(estimates[:, :, level], share) for level in range(estimates.shape[2])],
                 tokens=int(row_tokens.sum()), rows=len(row_tokens), repeats=len(estimates), estimator=estimator, pad=pad,
                 is_bound=is_bound, estimates=estimates, row_tokens=row_tokens)


def pad_name(objective: Objective, rows: Tensor) -> str:
    """The PAD mode that is printed with a number: `pack` where no row holds PAD."""
    return objective.pad if bool(is_pad(rows, objective.pad_id).any()) else "pack"


@torch.no_grad()
def evaluate_bound(model: Network, objective: Objective, rows: Tensor, *, batch: int, seed: int, repeats: int = 2,
                   estimator: str | None = None, dtype: str = "float32",
                   progress: Callable[[int, int], None] | None = None) -> Bound:
    """The bound of `rows` (R, S), any R >= 1; a last batch may be smaller. Without a wish the best valid estimator."""
    if not len(rows):
        raise ConfigError("there is nothing to evaluate: the validation split holds no rows")
    device = objective.tree.ancestor.device
    known = objective.estimators(model)
    estimator = next(iter(known)) if estimator is None else estimator
    if estimator not in known:
        raise ConfigError(f"the estimator {estimator!r} is not valid for this method and network (count needs the cascade and "
                          f"a network that is not told the time); use {' or '.join(known)}")
    if estimator == "exact":
        repeats = 1  # nothing is drawn: another repeat would give the same numbers
    elif repeats < 2:
        raise ConfigError(f"an error bar needs at least 2 repeats, got {repeats}")
    if batch < 1:
        raise ConfigError(f"at least one row is scored at a time, got --batch {batch}")
    score = known[estimator]
    estimates = torch.zeros(repeats, len(rows), objective.levels, dtype=torch.float64)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    starts = range(0, len(rows), batch)
    for repeat in range(repeats):
        for done, start in enumerate(starts):
            chunk = rows[start:start + batch].to(device)
            index = torch.arange(start, start + len(chunk), device=device)
            with autocast(device, dtype):
                loss = score(model, chunk, draws=Draws(seed, repeat, "evaluate", index, len(rows)))
            estimates[repeat, start:start + len(chunk)] = loss.parts["levels"].cpu()
            tokens[start:start + len(chunk)] = loss.parts["tokens"].cpu()
            if progress is not None:
                progress(repeat * len(starts) + done + 1, repeats * len(starts))
    mode = pad_name(objective, rows)
    return bound_of(estimates, tokens, estimator=estimator, pad=mode, is_bound=mode == "pack" or objective.is_bound)


def _error(estimates: Tensor, share: Tensor) -> float:
    """Standard error of the mean over repeats (first axis), summed over rows; a single repeat is exact."""
    if len(estimates) == 1:
        return 0.0
    if len(estimates) >= MANY:
        return float(torch.sqrt((estimates * share).sum(1).var() / len(estimates)))
    return float(torch.sqrt((estimates.var(0) * share**2).sum() / len(estimates)))
