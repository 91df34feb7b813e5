"""Which tree is good for a text, without training a network?   python -m benchmarks.tree_quality --data FOLDER

A token x with class c (its ancestor below the root) between neighbours with classes l and r costs

    root   -log p(c | l, r)            leaf   -log p(x | c, l, r)            nats a token of held-out text.

Both are count models of the training text, interpolated as Jelinek and Mercer do:

    p(c | l, r) = a3 n(l c r) / n(l . r) + a2 n(l c) / n(l) + b2 n(c r) / n(r) + a1 n(c) / n + a0 / K
    p(x | c, l, r) the same within the class: n(l x r) / n(l c r), n(l x) / n(l c), n(x r) / n(c r), n(x) / n(c), 1 / |c|

with weights of their own for every power of two of the longest history's count, fitted by EM on one half of the held-out
documents and scored on the other, both ways. A history that was never seen gives nothing and its weight is lost, so the sums are
upper bounds. A document's edge is a class of its own. The sum of both is what is compared: it is the loss of one
particular model of tokens that sees its neighbours only through classes, and says nothing about a network's beyond that.

What a real (small, one seed) training found for three trees of K=512 stands beside it (PERPLEXITY); it was trained on other
parts of Wikipedia than these. The data: `tdlm prepare` of a text with the tokenizer that --tokenizer-vectors belongs to (GPT-2).
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdlm.data.store import TokenStore
from tdlm.files import write_json
from tdlm.train.provenance import provenance
from tdlm.tree.build import build_tree
from tdlm.tree.cooccurrence import token_chunks
from tdlm.tree.embeddings import Vectors, from_array, from_store, neighbours_from_store
from tdlm.tree.tree import Tree

VECTORS = Path(__file__).parents[1] / "tests" / "fixtures" / "gpt2-vocab-embed64.npz"
PERPLEXITY = {"random": 284, "another model's embedding": 259, "corpus": 170}
DENSE = 1 << 26  # keys up to here are counted in a table, beyond by sorting


@dataclass(frozen=True)
class Counts:
    """How often each key occurs."""

    table: np.ndarray
    dense: bool

    @classmethod
    def of(cls, keys: np.ndarray, span: int) -> Counts:
        return cls(np.bincount(keys, minlength=span), True) if span <= DENSE else cls(np.sort(keys), False)

    def __getitem__(self, keys: np.ndarray) -> np.ndarray:
        if self.dense:
            return self.table[keys]
        return np.searchsorted(self.table, keys, side="right") - np.searchsorted(self.table, keys)


def stream_of(store: TokenStore, split: str, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """A split's tokens, -1 before and after each document, and the number of the document each belongs to."""
    documents, total = [], 0
    for number in store.documents(split):
        documents.append(np.asarray(store.document(number)))
        total += len(documents[-1])
        if limit is not None and total >= limit:
            break
    stream = np.concatenate([np.array([-1]), *token_chunks(documents, store.size, gap=1)]).astype(np.int32)
    return stream, np.cumsum(stream < 0)


@dataclass(frozen=True)
class Grams:
    """Every token of a stream with the classes to its left and right, as keys."""

    left: np.ndarray
    own: np.ndarray
    right: np.ndarray
    token: np.ndarray

    @classmethod
    def of(cls, stream: np.ndarray, label: np.ndarray, k: int) -> Grams:
        seen = np.append(label, k).astype(np.int64)[stream]  # -1 takes the last: the class of the edge
        at = np.flatnonzero(stream >= 0)
        return cls(seen[at - 1], seen[at], seen[at + 1], stream[at].astype(np.int64))


def components(train: Grams, test: Grams, label: np.ndarray, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For root and leaf: the (n, 5) relative frequencies of what came, and the count of the longest history."""
    size, e = len(label), k + 1

    def count(key: Callable[[Grams], np.ndarray], span: int) -> np.ndarray:
        return Counts.of(key(train), span)[key(test)]

    lcr = count(lambda g: (g.left * k + g.own) * e + g.right, e * k * e)
    lr, lc = count(lambda g: g.left * e + g.right, e * e), count(lambda g: g.left * k + g.own, e * k)
    cr, c = count(lambda g: g.own * e + g.right, k * e), count(lambda g: g.own, k)
    left, right = count(lambda g: g.left, e), count(lambda g: g.right, e)
    total = np.full(len(c), len(train.own))
    root = _ratios([(lcr, lr), (lc, left), (cr, right), (c, total), (np.ones_like(c), np.full(len(c), k))])
    lxr = count(lambda g: (g.left * size + g.token) * e + g.right, e * size * e)
    lx, xr = count(lambda g: g.left * size + g.token, e * size), count(lambda g: g.token * e + g.right, size * e)
    x, members = count(lambda g: g.token, size), np.bincount(label, minlength=k)[test.own]
    leaf = _ratios([(lxr, lcr), (lx, lc), (xr, cr), (x, c), (np.ones_like(c), members)])
    return {"root": (root, lr), "leaf": (leaf, lcr)}


def _ratios(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    return np.stack([above / np.maximum(below, 1) for above, below in pairs], axis=1)


def interpolated(parts: np.ndarray, history: np.ndarray, half: np.ndarray, turns: int = 40) -> np.ndarray:
    """(n,) nats: weights fitted where `half` is the other one, for every power of two of the history's count."""
    bucket = np.ceil(np.log2(history + 1)).astype(int)
    nats = np.empty(len(parts))
    for side in (0, 1):
        general = _weights(parts[half != side], np.full(parts.shape[1], 1 / parts.shape[1]), turns)
        for number in np.unique(bucket):
            fit, score = (half != side) & (bucket == number), (half == side) & (bucket == number)
            weights = _weights(parts[fit], general, turns) if fit.sum() >= 100 else general
            nats[score] = -np.log(parts[score] @ weights)
    return nats


def _weights(parts: np.ndarray, start: np.ndarray, turns: int) -> np.ndarray:
    """The mixture's weights by EM. The last part is never zero, and keeps a share: an unmet case must not cost infinitely."""
    weights = start
    for _ in range(turns):
        share = parts * weights
        weights = (share / share.sum(1, keepdims=True)).mean(0)
        weights = 0.9999 * weights + 0.0001 * np.eye(len(weights))[-1]
    return weights


def measure(tree: Tree, train: np.ndarray, test: np.ndarray, document: np.ndarray) -> dict[str, Any]:
    """The two costs, their sum, and how the text spreads over the classes."""
    label, k = tree.slot[-1].numpy(), int(tree.num_children[tree.root])
    counted, asked = Grams.of(train, label, k), Grams.of(test, label, k)
    half = document[test >= 0] % 2
    nats = {name: interpolated(*part, half) for name, part in components(counted, asked, label, k).items()}
    both = nats["root"] + nats["leaf"]
    of_document = np.bincount(document[test >= 0], both) / np.maximum(np.bincount(document[test >= 0]), 1)
    means = of_document[np.unique(document[test >= 0])]
    share = np.bincount(counted.own, minlength=k) / len(counted.own)
    return {"root": float(nats["root"].mean()), "leaf": float(nats["leaf"].mean()), "sum": float(both.mean()),
            "perplexity": float(np.exp(both.mean())), "spread_over_documents": float(means.std() / np.sqrt(len(means))),
            "largest_share": float(share.max()), "classes_of_half_the_text": int((np.cumsum(-np.sort(-share)) < 0.5).sum() + 1),
            "unigram_root": float(-(share[share > 0] * np.log(share[share > 0])).sum())}


def requests(store: TokenStore, limit: int) -> dict[str, Callable[[int], Tree]]:
    """Name -> a function that builds the tree of K."""
    kept: dict[Any, Any] = {}

    def once(key: Any, make: Callable[[], Any]) -> Any:
        return kept[key] if key in kept else kept.setdefault(key, make())

    def vectors(**settings: Any) -> Vectors:
        return once(tuple(settings.items()), lambda: from_store(store, limit=limit, **settings))

    def other() -> Vectors:
        return from_array(VECTORS, store.size, metric="cosine")

    def plain(rows: Callable[[], Vectors | None], method: Any = "kmeans") -> Callable[[int], Tree]:
        return lambda k: build_tree(rows(), branching=k, size=store.size, method=method, counts=store.counts)

    def moved(window: int, rows: Callable[[], Vectors] = vectors, rounds: int = 12) -> Callable[[int], Tree]:
        def build(k: int) -> Tree:
            near = neighbours_from_store(store, window=window, limit=limit)
            return build_tree(rows(), branching=k, size=store.size, method="exchange", near=near, rounds=rounds,
                              say=lambda line: print(line, file=sys.stderr, flush=True))
        return build

    def noise() -> Vectors:
        return Vectors(np.random.default_rng(0).normal(size=(store.size, 8)).astype(np.float32), {"kind": "noise"})

    return {"random": plain(lambda: None, "random"), "frequency": plain(lambda: None, "frequency"),
            "another model's embedding": plain(other), "corpus": plain(vectors),
            **{f"corpus, window {w}": plain(lambda w=w: vectors(window=w)) for w in (1, 2, 8)},
            "corpus, sides pooled": plain(lambda: vectors(sides="pooled")),
            "corpus, 1024 contexts": plain(lambda: vectors(contexts=1024)),
            **{f"exchange, window {w}": moved(w) for w in (1, 2, 4)},
            "exchange, window 2, from another model's embedding": moved(2, other),
            "exchange, window 2, from noise": moved(2, noise)}


def one(name: str, build: Callable[[int], Tree], k: int, parts: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[str, Any]:
    wall, used = time.perf_counter(), time.process_time()
    tree = build(k)
    took = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - used,
            "load_average": os.getloadavg()[0]}
    information = tree.meta["levels"][0].get("information")
    result = {**measure(tree, *parts), "height": tree.height, "information": information, **took}
    print(f"{name}: {json.dumps(result)}", file=sys.stderr, flush=True)
    return result


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--data", type=Path, required=True, help="a prepared folder (GPT-2 tokenizer)")
    options.add_argument("--branching", type=int, default=512)
    options.add_argument("--tokens", type=int, default=32_000_000, help="of the training text, for trees and yardstick")
    options.add_argument("--only", nargs="*", help="names of trees (default: all); the rest of --out is kept")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tree_quality.json")
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    store = TokenStore(chosen.data)
    train, _ = stream_of(store, "train", chosen.tokens)
    test, document = stream_of(store, "valid")
    trees = requests(store, chosen.tokens)
    result: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.only and chosen.out.is_file() else {"trees": {}}
    result |= {"K": chosen.branching, "data": store.fingerprint, "train_tokens": int((train >= 0).sum()),
               "held_out_tokens": int((test >= 0).sum()), "measured_perplexity": PERPLEXITY}
    for name in chosen.only or trees:
        result["trees"][name] = one(name, trees[name], chosen.branching, (train, test, document))
        found = result["trees"]
        known = [tree for tree in PERPLEXITY if tree in found]
        result["ranks_as_measured"] = sorted(known, key=lambda tree: -found[tree]["sum"]) == known
        result["provenance"] = provenance("cpu", peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        write_json(chosen.out, result)


if __name__ == "__main__":
    main()
