"""`tdlm eval`: score the fixed rows of a split, beside n-gram models on the same tokens; keep it as eval.json."""
from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..console import counter
from ..data.batches import eval_rows
from ..data.store import TokenStore
from ..evaluate.likelihood import evaluate_bound
from ..evaluate.ngram import ngram_cross_entropies
from ..files import write_json
from ..objectives.base import Pad, is_pad
from ..train.provenance import provenance
from ..train.run import Run

NGRAM_TOKENS = 30_000_000
"""The n-gram models are counted on at most so many training tokens, from the beginning (memory)."""


def evaluate_run(run: Run, *, data: Path | None, split: str, estimator: str, pad: Pad | None,
                 repeats: int, limit: int | None, batch: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    store = run.store(data)
    objective = run.assembly.objective if pad is None else run.assembly.objective.with_pad(pad)
    layout, length = run.config.data.layout, run.config.data.length
    rows_of = eval_rows(store, length=length, layout=layout, split=split, limit=limit)
    rows = rows_of.batch(0, len(rows_of)).tokens
    with counter("evaluate") as progress:
        bound = evaluate_bound(run.assembly.model, objective, rows, batch=batch, seed=seed, repeats=repeats,
                               estimator=None if estimator == "auto" else estimator, progress=progress)
    sizes = np.append(store.tokenizer.token_bytes, 0)[: store.size]
    text_bytes = int(sizes[rows[~is_pad(rows, objective.pad_id)].numpy()].sum())
    say("counting n-grams on the training tokens")
    ngrams = ngram_cross_entropies(_training(store), rows.numpy(), size=store.size, pad_id=store.pad_id)
    device = objective.tree.ancestor.device
    result = {**bound.to_json(text_bytes), "step": run.step, "split": split, "layout": layout, "length": length,
              "vocabulary": store.size, "ngrams": ngrams,
              "ngram_tokens": min(NGRAM_TOKENS, store.tokens("train")),
              "provenance": provenance(device, command=shlex.join(["tdlm", *sys.argv[1:]]), seed=seed,
                                       data_fingerprint=store.fingerprint, tokenizer_hash=store.tokenizer.hash)}
    write_json(run.path / "eval.json", result)
    return result


def _training(store: TokenStore) -> Iterator[np.ndarray]:
    """Training documents until the n-gram models have seen enough."""
    seen = itertools.accumulate((len(store.document(i)) for i in store.documents("train")), initial=0)
    for number, before in zip(store.documents("train"), seen):
        if before >= NGRAM_TOKENS:
            return
        yield store.document(number)
