"""How good and how fast are the trees?   python -m benchmarks.tree [--clusters FOLDER]

The vocabulary is GPT-2's with PAD (50,258 tokens), the vectors are tests/fixtures/gpt2-vocab-embed64.npz (64 dimensions),
and once 768 synthetic dimensions (`synthetic`). The yardstick in the same run is faiss's unconstrained K-means of the
same vectors, 15 iterations: its inertia, and its time, since seconds alone say little on a machine that others use too.

Every measurement runs in a process of its own. faiss and torch bring an OpenMP runtime each; in one process their
waiting threads take the processor from one another, and a tree takes eight times as long.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdlm.files import write_json
from tdlm.train.provenance import provenance
from tdlm.tree.build import build_tree
from tdlm.tree.cluster import inertia
from tdlm.tree.embeddings import from_array
from tdlm.tree.reference import hdlm_kmeans
from tdlm.tree.tree import Tree, split_bounds

VECTORS = Path(__file__).parents[1] / "tests" / "fixtures" / "gpt2-vocab-embed64.npz"
TOKENS = 50_258
RATIOS = (0.8, 1.2)
REQUESTS = {  # name: (vectors, K, height asked for)
    "K=512": ("gpt2", 512, None), "K=512, 768 dimensions": ("synthetic", 512, None), "K=256": ("gpt2", 256, None),
    "K=225": ("gpt2", 225, None), "K=225, height 2": ("gpt2", 225, 2), "K=37": ("gpt2", 37, None),
    "K=37, height 3": ("gpt2", 37, 3), "K=2": ("gpt2", 2, None)}


def synthetic(size: int = TOKENS - 1, dimensions: int = 768, groups: int = 2000, seed: int = 0) -> np.ndarray:
    """Groups whose sizes follow Zipf's law (the r-th in proportion to 1/(r+10)), around centres drawn from a normal with
    variance 1/i in direction i; within a group the same with 0.6 of the deviation; then every row is scaled by a
    log-normal factor (sigma 0.25): clustered, of very unequal density, a few directions dominating, as embeddings are."""
    draw = np.random.default_rng(seed)
    spectrum = np.arange(1, dimensions + 1, dtype=np.float32) ** -0.5
    share = 1 / (np.arange(groups) + 10)
    group = draw.choice(groups, size, p=share / share.sum())
    centres = draw.standard_normal((groups, dimensions), dtype=np.float32) * spectrum
    rows = centres[group] + 0.6 * draw.standard_normal((size, dimensions), dtype=np.float32) * spectrum
    return rows * draw.lognormal(0, 0.25, (size, 1)).astype(np.float32)


def rows_of(name: str) -> np.ndarray:
    """(V, d), PAD and tokens without a vector all zero."""
    if name == "gpt2":
        return from_array(VECTORS, TOKENS).rows
    rows = synthetic()
    return np.concatenate([rows, np.zeros((1, rows.shape[1]), dtype=np.float32)])


def timed(act: Any) -> tuple[Any, dict[str, float]]:
    wall, used = time.perf_counter(), time.process_time()
    result = act()
    return result, {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - used,
                    "load_average": os.getloadavg()[0]}


def out_of_bounds(tree: Tree, height: int | None) -> dict[str, int]:
    """Counted from the ancestors alone, without what the builder or `Tree.check` know."""
    ancestor, k = tree.ancestor.numpy(), tree.branching
    splits, outside = 0, 0
    for h in range(tree.height, 0, -1):
        nodes, size = np.unique(ancestor[h], return_counts=True)
        for node, count in zip(nodes[size > k], size[size > k]):
            children, sizes = np.unique(ancestor[h - 1][ancestor[h] == node], return_counts=True)
            room = k ** (h - 1) if height is not None else None
            low, high = split_bounds(int(count), k, *RATIOS, room)
            splits += 1
            outside += len(children) != k or int(sizes.min()) < low or int(sizes.max()) > high
    return {"splits": splits, "splits_out_of_bounds": outside}


def measure_tree(name: str) -> dict[str, Any]:
    vectors, k, height = REQUESTS[name]
    rows = rows_of(vectors)
    low, high = RATIOS
    tree, took = timed(lambda: build_tree(rows, branching=k, size=TOKENS, min_ratio=low, max_ratio=high, height=height))
    known = rows.any(1)
    with tempfile.TemporaryDirectory() as folder:
        tree.save(Path(folder) / "tree.safetensors")
        digest = hashlib.sha256((Path(folder) / "tree.safetensors").read_bytes()).hexdigest()
    return {"vectors": vectors, "dimensions": rows.shape[1], "K": k, "height_asked": height, "height": tree.height,
            "inner_nodes": tree.nodes - tree.size, **out_of_bounds(tree, height),
            "root_inertia": inertia(rows[known], tree.slot[-1].numpy()[known], k), "sha256": digest, **took}


def measure_faiss(name: str) -> dict[str, Any]:
    """Unconstrained K-means of the rows that have a vector; every point is used."""
    import faiss

    vectors, k, _ = REQUESTS[name]
    rows = rows_of(vectors)
    rows = np.ascontiguousarray(rows[rows.any(1)])

    def cluster() -> np.ndarray:
        means = faiss.Kmeans(rows.shape[1], k, niter=15, seed=0, max_points_per_centroid=len(rows))
        means.train(rows)
        return means.index.search(rows, 1)[1][:, 0]

    label, took = timed(cluster)
    low, high = split_bounds(TOKENS, k, *RATIOS)
    size = np.bincount(label, minlength=k)
    return {"vectors": vectors, "K": k, "version": faiss.__version__, "inertia": inertia(rows, label, k),
            "clusters_out_of_bounds": int(((size < low) | (size > high)).sum()), "smallest": int(size.min()),
            "largest": int(size.max()), **took}


def measure_reference(k: str) -> dict[str, Any]:
    """The hierarchical baseline's routine, which asks for sizes without enforcing them."""
    rows = rows_of("gpt2")
    rows = rows[rows.any(1)]
    label, took = timed(lambda: hdlm_kmeans(rows, int(k), min_ratio=RATIOS[0], max_ratio=RATIOS[1], seed=0))
    low, high = split_bounds(len(rows), int(k), *RATIOS)
    size = np.bincount(label, minlength=int(k))
    return {"K": int(k), "clusters_out_of_bounds": int(((size < low) | (size > high)).sum()), "smallest": int(size.min()),
            "largest": int(size.max()), "inertia": inertia(rows, label, int(k)), **took}


def measure_clusters(path: str) -> dict[str, Any]:
    """A published table of clusters: each token gets its cluster's centre, so all rows of a cluster are equal."""
    rows = from_array(path, TOKENS).rows
    _, size = np.unique(rows, axis=0, return_counts=True)
    tree, took = timed(lambda: build_tree(rows, branching=512, size=TOKENS))
    low, high = split_bounds(TOKENS, len(size), *RATIOS)
    return {"file": Path(path).name, "dimensions": rows.shape[1], "clusters": len(size), "smallest": int(size.min()),
            "largest": int(size.max()), "clusters_out_of_bounds": int(((size < low) | (size > high)).sum()),
            "tree_K": 512, "tree_height": tree.height, **out_of_bounds(tree, None), **took}


MEASURES = {"tree": measure_tree, "faiss": measure_faiss, "reference": measure_reference, "clusters": measure_clusters}


def alone(what: str, name: str) -> dict[str, Any]:
    """One measurement in a new process."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.tree", "--only", what, name], check=True, text=True,
                          stdout=subprocess.PIPE)
    print(f"{what} {name if what != 'clusters' else Path(name).name}: {done.stdout.strip()}", file=sys.stderr)
    return json.loads(done.stdout)


def spread(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One record of several runs of the same thing: the first, with the times of all."""
    seconds = [run["seconds"] for run in runs]
    return {**{k: v for k, v in runs[0].items() if k not in ("seconds", "processor_seconds", "load_average")},
            "seconds": {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)},
            "processor_seconds": statistics.median(run["processor_seconds"] for run in runs),
            "load_average": [round(run["load_average"], 2) for run in runs]}


def against_faiss(name: str, repeats: int) -> dict[str, Any]:
    """Tree and faiss in turn, so that both meet the same neighbours."""
    pairs = [(alone("faiss", name), alone("tree", name)) for _ in range(repeats)]
    faiss, tree = spread([pair[0] for pair in pairs]), spread([pair[1] for pair in pairs])
    return {"tree": tree, "faiss": faiss, "inertia_ratio": tree["root_inertia"] / faiss["inertia"],
            "time_ratio": statistics.median(b["seconds"] / a["seconds"] for a, b in pairs),
            "same_bytes": len({pair[1]["sha256"] for pair in pairs}) == 1}


def aims(result: dict[str, Any]) -> dict[str, Any]:
    """What was promised, what came, and whether it holds; times are the median of the runs."""
    found: dict[str, Any] = {}

    def aim(name: str, value: Any, least: float, most: float) -> None:
        found[name] = {"value": value, "least": least, "most": most if math.isfinite(most) else None,
                       "met": bool(least <= value <= most)}

    for name, ratio, seconds in (("K=512", 1.01, 15), ("K=512, 768 dimensions", 1.02, 45)):
        pair = result["against_faiss"][name]
        aim(f"{name}: height", pair["tree"]["height"], 2, 2)
        aim(f"{name}: root inertia over faiss's", pair["inertia_ratio"], 0, ratio)
        aim(f"{name}: seconds", pair["tree"]["seconds"]["median"], 0, seconds)
        aim(f"{name}: same bytes in every run", pair["same_bytes"], 1, 1)
    heights = {"K=256": (2, 2), "K=225, height 2": (2, 2), "K=37, height 3": (3, 3), "K=2": (16, 20)}
    for name, (least, most) in heights.items():
        aim(f"{name}: height", result["trees"][name]["height"], least, most)
    aim("K=2: seconds", result["trees"]["K=2"]["seconds"]["median"], 0, 90)
    every = [*result["trees"].values(), *(pair["tree"] for pair in result["against_faiss"].values())]
    aim("splits out of bounds, all trees", sum(tree["splits_out_of_bounds"] for tree in every), 0, 0)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", nargs=2, metavar=("WHAT", "NAME"), help="one measurement, printed (the runs use this)")
    options.add_argument("--clusters", type=Path, help="a folder of cluster tables (.npz with centroid and cluster) to read")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tree.json")
    chosen = options.parse_args()
    if chosen.only:
        print(json.dumps(MEASURES[chosen.only[0]](chosen.only[1])))
        return
    result: dict[str, Any] = {"ratios": RATIOS, "tokens": TOKENS, "against_faiss": {
        name: against_faiss(name, chosen.repeats) for name in ("K=512", "K=512, 768 dimensions")}}
    result["trees"] = {name: spread([alone("tree", name)]) for name in REQUESTS if name not in result["against_faiss"]}
    again = alone("tree", "K=2")
    result["trees"]["K=2"]["same_bytes"] = again["sha256"] == result["trees"]["K=2"]["sha256"]
    result["reference_routine"] = [spread([alone("reference", "64")])]
    if chosen.clusters:
        tables = sorted(chosen.clusters.glob("*.npz"))
        result["cluster_tables"] = [spread([alone("clusters", str(path))]) for path in tables]
    result["aims"] = aims(result)
    result |= {"repeats": chosen.repeats, "provenance": provenance(
        "cpu", cpus=os.cpu_count(), torch_threads=torch.get_num_threads(), load_average=os.getloadavg()[0])}
    write_json(chosen.out, result)
    print(json.dumps(result["aims"], indent=1))


if __name__ == "__main__":
    main()
