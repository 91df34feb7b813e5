"""Which tree is good for a text, without training a network?   python -m benchmarks.tree_quality --data FOLDER

A token x with class c (its ancestor below the root) between two neighbours costs, in nats a token of held-out text,

    root   -log p(c | left, right)            leaf   -log p(x | c, left, right).

Two yardsticks differ in what is known of the neighbours:

    classes   their classes l and r, for root and leaf
    cascade   what a two-level cascade shows: while classes are found each neighbour's class is known with chance u, else nothing;
              while tokens are found, its token with chance u, else its class; u uniform in (0, 1), so that of the four
              cases both known and neither known count 1/3 each, one known 1/6 each

All are count models of the training text, interpolated as Jelinek and Mercer do; with l, r what is known of the neighbours,

    p(c | l, r) = a n(l c r) / n(l . r) + b n(l c) / n(l) + b' n(c r) / n(r) + d n(c) / n + e / K
    p(x | c, l, r) the same within the class: n(l x r) / n(l c r), n(l x) / n(l c), n(x r) / n(c r), n(x) / n(c), 1 / |c|,
                   and where a neighbour's token is known, the second and third parts once more with its class

with weights of their own for every power of two of the longest history's count, fitted by EM on one half of the held-out
documents and scored on the other, both ways. A history that was never seen gives nothing and its weight is lost, so the sums are
upper bounds. A document's edge is a class of its own. Both are losses of particular models that see one token to each side;
a network sees more, and what it makes of a tree they do not know.

What a real (small, one seed) training found for three trees of K=512 stands beside it (PERPLEXITY): another text of the same
encyclopedia. The data: `tdlm prepare` of a text with GPT-2's tokenizer, which the fixture's vectors are for.
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
    """Every token of a stream, its class, and the ids of its neighbours' classes and tokens (with an id for the edge)."""

    own: np.ndarray
    token: np.ndarray
    left: dict[str, np.ndarray]
    right: dict[str, np.ndarray]

    @classmethod
    def of(cls, stream: np.ndarray, label: np.ndarray, k: int) -> Grams:
        seen = np.append(label, k).astype(np.int64)[stream]  # -1 takes the last: the class of the edge
        token = np.where(stream < 0, len(label), stream).astype(np.int64)
        at = np.flatnonzero(stream >= 0)
        nothing = np.zeros(len(at), dtype=np.int64)
        return cls(seen[at], token[at], {"nothing": nothing, "class": seen[at - 1], "token": token[at - 1]},
                   {"nothing": nothing, "class": seen[at + 1], "token": token[at + 1]})


class Parts:
    """The relative frequencies that are mixed, counted in a training text for the tokens of another."""

    def __init__(self, train: Grams, test: Grams, label: np.ndarray, k: int):
        self.train, self.test, self.k, self.size = train, test, k, len(label)
        self.spans = {"nothing": 1, "class": k + 1, "token": len(label) + 1}
        self.members = np.bincount(label, minlength=k)[test.own]
        self.known: dict[tuple[str, str, str], np.ndarray] = {}

    def count(self, left: str, what: str, right: str) -> np.ndarray:
        """n(left what right) of every token asked for; `what` is its class, its token, or nothing."""
        if (left, what, right) not in self.known:
            middle, end = {"nothing": 1, "class": self.k, "token": self.size}[what], self.spans[right]

            def key(grams: Grams) -> np.ndarray:
                own = {"nothing": 0, "class": grams.own, "token": grams.token}[what]
                return (grams.left[left] * middle + own) * end + grams.right[right]

            self.known[left, what, right] = Counts.of(key(self.train), self.spans[left] * middle * end)[key(self.test)]
        return self.known[left, what, right]

    def share(self, left: str, what: str, given: str, right: str) -> np.ndarray:
        return self.count(left, what, right) / np.maximum(self.count(left, given, right), 1)

    def mixed(self, left: str, what: str, given: str, right: str) -> tuple[np.ndarray, np.ndarray]:
        """(n, parts) and the count of the longest history. The last part is the same for all and never zero."""
        sides = [(left, "nothing"), ("nothing", right), *((("class", "nothing"),) if left == "token" else ()),
                 *((("nothing", "class"),) if right == "token" else ()), ("nothing", "nothing"), (left, right)]
        parts = [self.share(a, what, given, b) for a, b in dict.fromkeys(sides)]
        evenly = np.full(len(self.members), 1 / self.k) if what == "class" else 1 / self.members
        return np.stack([*parts, evenly], axis=1), self.count(left, given, right)


CASES = {"classes": {"root": [("class", "class", 1.0)], "leaf": [("class", "class", 1.0)]},
         "cascade": {"root": [("class", "class", 1 / 3), ("class", "nothing", 1 / 6), ("nothing", "class", 1 / 6),
                              ("nothing", "nothing", 1 / 3)],
                     "leaf": [("token", "token", 1 / 3), ("token", "class", 1 / 6), ("class", "token", 1 / 6),
                              ("class", "class", 1 / 3)]}}
"""What is known of the left and of the right neighbour, and how often."""


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
    """Root, leaf and sum of both yardsticks, and how the text spreads over the classes."""
    label, k = tree.slot[-1].numpy(), int(tree.num_children[tree.root])
    counted, asked = Grams.of(train, label, k), Grams.of(test, label, k)
    parts, number = Parts(counted, asked, label, k), document[test >= 0]
    share = np.bincount(counted.own, minlength=k) / len(counted.own)
    result: dict[str, Any] = {
        "largest_share": float(share.max()), "classes_of_half_the_text": int((np.cumsum(-np.sort(-share)) < 0.5).sum() + 1),
        "unigram_root": float(-(share[share > 0] * np.log(share[share > 0])).sum())}
    done: dict[Any, np.ndarray] = {}
    for name, levels in CASES.items():
        nats = {}
        for level, cases in levels.items():
            what, given = ("class", "nothing") if level == "root" else ("token", "class")
            for left, right, _ in cases:
                if (left, what, right) not in done:
                    done[left, what, right] = interpolated(*parts.mixed(left, what, given, right), number % 2)
            nats[level] = np.sum([often * done[left, what, right] for left, right, often in cases], axis=0)
        both = nats["root"] + nats["leaf"]
        of_document = np.bincount(number, both)[np.unique(number)] / np.bincount(number)[np.unique(number)]
        result[name] = {"root": float(nats["root"].mean()), "leaf": float(nats["leaf"].mean()), "sum": float(both.mean()),
                        "error": float(of_document.std() / np.sqrt(len(of_document)))}
    return result


def requests(store: TokenStore, limit: int) -> dict[str, Callable[[int], Tree]]:
    """Name -> a function that builds the tree of K."""
    kept: dict[Any, Any] = {}

    def once(key: Any, make: Callable[[], Any]) -> Any:
        return kept[key] if key in kept else kept.setdefault(key, make())

    def vectors(**settings: Any) -> Vectors:
        return once(tuple(settings.items()), lambda: from_store(store, limit=limit, **settings))

    def other() -> Vectors:
        return from_array(VECTORS, store.size, metric="cosine")

    def plain(rows: Callable[[], Vectors | None], method: Any = "kmeans", **more: Any) -> Callable[[int], Tree]:
        return lambda k: build_tree(rows(), branching=k, size=store.size, method=method, counts=store.counts, **more)

    def moved(window: int, rows: Callable[[], Vectors] = vectors, **more: Any) -> Callable[[int], Tree]:
        def build(k: int) -> Tree:
            near = neighbours_from_store(store, window=window, limit=limit)
            return build_tree(rows(), branching=k, size=store.size, method="exchange", near=near, counts=store.counts, **more,
                              say=lambda line: print(line, file=sys.stderr, flush=True))
        return build

    def noise() -> Vectors:
        return Vectors(np.random.default_rng(0).normal(size=(store.size, 8)).astype(np.float32), {"kind": "noise"})

    return {"random": plain(lambda: None, "random"), "another model's embedding": plain(other), "corpus": plain(vectors),
            **{f"exchange, window {w}": moved(w) for w in (2, 1, 4)},
            "corpus, mass at most 2": plain(vectors, max_mass=2.0), "corpus, mass at most 8": plain(vectors, max_mass=8.0),
            "exchange, window 2, from another model's embedding": moved(2, other),
            "exchange, window 2, from noise": moved(2, noise), "exchange, window 2, mass at most 2": moved(2, max_mass=2.0),
            "frequency": plain(lambda: None, "frequency"),
            **{f"corpus, window {w}": plain(lambda w=w: vectors(window=w)) for w in (1, 2, 8)},
            "corpus, sides pooled": plain(lambda: vectors(sides="pooled")),
            "corpus, 1024 contexts": plain(lambda: vectors(contexts=1024))}


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
        result["ranks_as_measured"] = {yard: sorted(known, key=lambda tree: -found[tree][yard]["sum"]) == known for yard in CASES}
        result["provenance"] = provenance("cpu", peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        write_json(chosen.out, result)


if __name__ == "__main__":
    main()
