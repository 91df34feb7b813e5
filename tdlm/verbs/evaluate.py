"""`tdlm eval`: score the fixed rows of a split, or named text sets, under a named protocol; keep it as eval.json.

eval.json holds the run's own number (protocol `strict`) with n-gram models on the same tokens beside it; under
`protocols` the same text under other protocols, and under `sets` the results on other people's text, by set and protocol.
"""
from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..config import DataConfig
from ..console import counter
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..errors import ConfigError
from ..evaluate.judge import Judge, judge_rows, load_judge, same_ids
from ..evaluate.likelihood import Bound, evaluate_bound
from ..evaluate.ngram import ngram_cross_entropies
from ..evaluate.protocols import Protocol, averages, check, protocol_rows, under
from ..evaluate.protocols import protocol as named
from ..evaluate.sets import Texts, TextStore, read_set
from ..files import write_json
from ..objectives.base import Objective, Pad, is_pad
from ..train.provenance import provenance
from ..train.run import Run

NGRAM_TOKENS = 30_000_000
"""The n-gram models are counted on at most so many training tokens, from the beginning (memory)."""
STRICT = "strict"


def evaluate_run(run: Run, *, data: Path | None, split: str, estimator: str, pad: Pad | None, repeats: int,
                 limit: int | None, batch: int, seed: int, say: Callable[[str], None], protocol: str = STRICT,
                 length: int | None = None, layout: str | None = None, counted: dict[str, Any] | None = None,
                 dtype: str = "float32") -> dict[str, Any]:
    """The rows of a prepared folder. `counted` is what n-gram models scored on these very rows (`ngrams`, `ngram_tokens`), where
    that is known already."""
    store = run.store(data)
    chosen, objective = _for_run(run, protocol, estimator, pad, length, layout)
    rows = protocol_rows(chosen, store, split=split, limit=limit)
    bound = _bound(run, objective, chosen, rows, estimator, repeats, batch, seed, dtype)
    result = {**_result(chosen, bound, rows, store.tokenizer), "step": run.step, "split": split, "vocabulary": store.size,
              "dtype": dtype}
    if chosen.average == "tokens" and counted is not None:
        result |= counted
    elif chosen.average == "tokens":
        say("counting n-grams on the training tokens")
        result["ngrams"] = ngram_cross_entropies(_training(store), rows.numpy(), size=store.size, pad_id=store.pad_id)
        result["ngram_tokens"] = min(NGRAM_TOKENS, store.tokens("train"))
    result["provenance"] = _origin(objective.tree.ancestor.device, seed, store.fingerprint, store.tokenizer)
    kept = _kept(run.path)
    if chosen.name == STRICT:  # a changed protocol has a name of its own and leaves the run's number alone
        write_json(run.path / "eval.json", {**result, **{key: kept[key] for key in ("protocols", "sets") if key in kept}})
    else:
        kept["protocols"] = {**kept.get("protocols", {}), chosen.name: result}
        write_json(run.path / "eval.json", kept)
    return result


def evaluate_sets(run: Run, sets: Sequence[str], *, estimator: str, pad: Pad | None, repeats: int, limit: int | None, batch: int,
                  seed: int, protocol: str = STRICT, length: int | None = None,
                  layout: str | None = None) -> dict[str, dict[str, Any]]:
    """Other people's text by name: the results by set."""
    chosen, objective = _for_run(run, protocol, estimator, pad, length, layout)
    results = {}
    for texts, store in _read(sets, run.tokenizer):
        rows = protocol_rows(chosen, store, limit=limit)
        bound = _bound(run, objective, chosen, rows, estimator, repeats, batch, seed)
        results[texts.name] = {**_result(chosen, bound, rows, run.tokenizer), "set": texts.to_json(), "step": run.step,
                               "vocabulary": store.size, "provenance": _origin(objective.tree.ancestor.device, seed,
                                                                               store.fingerprint, run.tokenizer)}
    kept = _kept(run.path)
    for name, result in results.items():
        kept.setdefault("sets", {}).setdefault(name, {})[chosen.name] = result
    write_json(run.path / "eval.json", kept)
    return results


def evaluate_model(spec: str, *, data: Path | None, split: str, limit: int | None, batch: int, device: str,
                   sets: Sequence[str] = (), protocol: str = STRICT, length: int | None = None, layout: str | None = None,
                   dtype: str = "float32") -> dict[str, dict[str, Any]]:
    """Any causal language model of the transformers library on the same rows: the results by set, or by split."""
    if data is None:
        raise ConfigError(f"{spec} is scored per token of a prepared folder, so that its number compares with a run's; give "
                          "the folder: --data DIR")
    prepared = TokenStore(data)
    tokenizer = prepared.tokenizer
    base = named(protocol)  # there is no run to fill in what the protocol leaves open: the wishes do
    chosen = base.changed(length=length if base.length else None, layout=layout if base.layout else None)
    chosen = chosen.of(DataConfig(length or DataConfig.length, cast(Any, layout) or DataConfig.layout), "count")
    check(chosen, tokenizer, longest=None, who=spec)
    judge = load_judge(spec, device=device, dtype=dtype)
    check(chosen, tokenizer, longest=judge.positions if same_ids(judge, tokenizer) else None, who=judge.name)
    if not sets:
        rows = protocol_rows(chosen, prepared, split=split, limit=limit)
        return {split: {**_judged(judge, chosen, rows, tokenizer, batch), "split": split, "vocabulary": prepared.size,
                        "provenance": _origin(judge.device, 0, prepared.fingerprint, tokenizer)}}
    return {texts.name: {**_judged(judge, chosen, protocol_rows(chosen, store, limit=limit), tokenizer, batch),
                         "set": texts.to_json(), "vocabulary": store.size,
                         "provenance": _origin(judge.device, 0, store.fingerprint, tokenizer)}
            for texts, store in _read(sets, tokenizer)}


def _for_run(run: Run, protocol: str, estimator: str, pad: Pad | None, length: int | None,
             layout: str | None) -> tuple[Protocol, Objective]:
    """The protocol with what was asked and what the run says, and the objective under its PAD mode."""
    wish = None if estimator == "auto" else estimator
    chosen = named(protocol).changed(pad=pad, length=length, layout=layout, estimator=wish)
    chosen = chosen.of(run.config.data, run.assembly.objective.pad)
    check(chosen, run.tokenizer, longest=run.config.data.length, who="this run")
    assert chosen.pad is not None
    return chosen, run.assembly.objective.with_pad(chosen.pad)


def _bound(run: Run, objective: Objective, chosen: Protocol, rows: Tensor, estimator: str, repeats: int, batch: int,
           seed: int, dtype: str = "float32") -> Bound:
    """A method that lacks the protocol's estimator uses its own; one that was asked for by name must be there."""
    known = objective.estimators(run.assembly.model)
    wanted = chosen.estimator if estimator != "auto" or chosen.estimator in known else None
    with counter("evaluate") as progress:
        return evaluate_bound(run.assembly.model, objective, rows, batch=batch, seed=seed, repeats=repeats, estimator=wanted,
                              progress=progress, dtype=dtype)


def _judged(judge: Judge, chosen: Protocol, rows: Tensor, tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
    assert chosen.pad is not None and chosen.layout is not None
    with counter("evaluate") as progress:
        bound, how = judge_rows(judge, rows, tokenizer, pad=chosen.pad, layout=chosen.layout, batch=batch, progress=progress)
    return {**_result(chosen, bound, rows, tokenizer), "model": judge.to_json(), "how": how}


def _result(chosen: Protocol, bound: Bound, rows: Tensor, tokenizer: Tokenizer) -> dict[str, Any]:
    sizes = np.append(tokenizer.token_bytes, 0)[: tokenizer.size]
    text_bytes = int(sizes[rows[~is_pad(rows, tokenizer.pad_id)].numpy()].sum())
    return {**under(chosen, bound).to_json(text_bytes), "averages": averages(chosen, bound), "layout": chosen.layout,
            "length": chosen.length, "protocol": {**chosen.to_json(), "estimator": bound.estimator, "pad": bound.pad}}


def _read(sets: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[Texts, TextStore]]:
    for texts in [read_set(name) for name in sets]:  # all are found before the first one is scored
        yield texts, TextStore(texts, tokenizer)


def _origin(device: torch.device, seed: int, fingerprint: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return provenance(device, command=shlex.join(["tdlm", *sys.argv[1:]]), seed=seed, data_fingerprint=fingerprint,
                      tokenizer_hash=tokenizer.hash)


def _kept(folder: Path) -> dict[str, Any]:
    """What eval.json says so far; a damaged one is written anew."""
    path = folder / "eval.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _training(store: TokenStore) -> Iterator[np.ndarray]:
    """Training documents until the n-gram models have seen enough."""
    seen = itertools.accumulate((len(store.document(i)) for i in store.documents("train")), initial=0)
    for number, before in zip(store.documents("train"), seen):
        if before >= NGRAM_TOKENS:
            return
        yield store.document(number)
