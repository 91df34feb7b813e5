"""Generative perplexity and what must stand beside it.

Text is judged by a causal language model that had no part in it: nats n_i of the T_i judge tokens of sample i.

    corpus perplexity        exp( sum_i n_i / sum_i T_i )        GIDD, HDLM, MDLM, DUO
    per-sequence perplexity  mean_i exp( n_i / T_i )             SEDD, FM

Alone it says little: repeated phrases, a low temperature or rounding in the draws make it *better*. So beside it stand

    entropy      of the tokens of one sample, -sum_v f_v log f_v in nats, mean over samples; and of all samples together
    distinct-n   different n-grams / n-grams, n-grams within a sample, all samples together

and all of them for held-out human text of the same rows by the same judge: the numbers to come near to, from either
side. Everything is counted in the judge's tokens, so that models with different tokenizers can stand in one table. All
measures of diversity depend on how many and how long the texts are, which are printed. No text is chosen or left out; an
empty one has no perplexity and is counted.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .judge import Judge, features, token_nats
from .likelihood import perplexity

ORDERS = (1, 2, 3)


def judge_texts(judge: Judge, texts: Sequence[str], *, max_length: int, stride: int | None = None, batch: int = 8,
                progress: Callable[[int, int], None] | None = None) -> tuple[dict[str, Any], list[list[int]]]:
    """The measures of some texts, and the judge's ids they were taken on (at most `max_length` a text)."""
    if max_length < 1:
        raise ConfigError(f"at least one token of a text must be judged, got --max-length {max_length}")
    encoded = [judge.encode(text) for text in texts]
    ids = [text[:max_length] for text in encoded]
    nats = token_nats(judge, ids, stride=stride, batch=batch, progress=progress)
    scored = [row for row in nats if len(row)]
    if not scored:
        raise ConfigError(f"there is nothing to judge: all {len(texts)} texts are empty" if texts else
                          "there is nothing to judge: no texts were given")
    return {"count": len(texts), "empty": len(texts) - len(scored), "cut": sum(len(text) > max_length for text in encoded),
            **perplexities(scored), **diversity([text for text in ids if text])}, ids


def perplexities(nats: Sequence[Tensor]) -> dict[str, Any]:
    """Both averages over some texts, from the nats of their tokens. `error` is the standard error of the corpus mean (nats
    per token) over texts, as a ratio of two sums."""
    total = torch.stack([row.double().sum() for row in nats])
    tokens = torch.tensor([len(row) for row in nats], dtype=torch.float64)
    mean, own = float(total.sum() / tokens.sum()), total / tokens
    count = len(nats)
    spread = float(((total - mean * tokens) ** 2).sum())
    error = math.sqrt(spread * count / (count - 1)) / float(tokens.sum()) if count > 1 else None
    return {"tokens": int(tokens.sum()), "tokens_per_text": float(tokens.mean()), "nats": mean, "error": error,
            "perplexity": perplexity(mean), "perplexity_per_text": sum(map(perplexity, own.tolist())) / count,
            "median_perplexity_per_text": perplexity(float(own.median()))}


def diversity(ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Unigram entropy in nats and distinct-n."""
    rows = [np.asarray(row, dtype=np.int64) for row in ids]
    return {"entropy": float(np.mean([entropy(row) for row in rows])), "corpus_entropy": entropy(np.concatenate(rows)),
            "distinct": {str(order): distinct(rows, order) for order in ORDERS}}


def entropy(ids: np.ndarray) -> float:
    """Of the tokens' own frequencies, in nats."""
    counts = np.unique(ids, return_counts=True)[1]
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum()) + 0.0  # + 0: never -0.0


def distinct(rows: Sequence[np.ndarray], order: int) -> float | None:
    """Different n-grams / n-grams; None where no text is long enough to hold one."""
    grams = [np.lib.stride_tricks.sliding_window_view(row, order) for row in rows if len(row) >= order]
    if not grams:
        return None
    together = np.concatenate(grams)
    return len(np.unique(together, axis=0)) / len(together)


def mauve_score(judge: Judge, samples: Sequence[Sequence[int]], human: Sequence[Sequence[int]], *, seed: int = 0) -> float:
    """MAUVE (Pillutla et al. 2021) between two sets of texts, on this judge's last hidden states (so that it needs no second
    model; scores on different judges do not compare). Meant for hundreds of texts or more."""
    try:
        import mauve
    except ImportError:
        raise ConfigError("MAUVE is a package of its own: pip install 'tdlm[eval]'") from None
    kept = [[text for text in texts if text] for texts in (samples, human)]
    if min(map(len, kept)) < 2:
        raise ConfigError("MAUVE compares distributions and needs at least 2 texts that are not empty on both sides; use more")
    result = mauve.compute_mauve(p_features=features(judge, kept[0]).numpy(), q_features=features(judge, kept[1]).numpy(),
                                 seed=seed, verbose=False)
    return float(result.mauve)
