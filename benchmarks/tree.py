"""How good and how fast are the trees?   python -m benchmarks.tree [--clusters FOLDER]   or   ... --device cuda [--data FOLDER]

The vocabulary is GPT-2's with PAD (50,258 tokens), the vectors are tests/fixtures/gpt2-vocab-embed64.npz (64 dimensions),
and once 768 synthetic dimensions (`synthetic`). The yardstick in the same run is faiss's unconstrained K-means of the
same vectors, 15 iterations: its inertia, and its time, since seconds alone say little on a machine that others use too.

Every measurement runs in a process of its own. faiss and torch bring an OpenMP runtime each; in one process their
waiting threads take the processor from one another, and a tree takes eight times as long.

With `--device` the question is what that device does with the same requests: the first tree with everything that starts the
device, then warm ones, and the processor's trees of the same machine beside them; with `--data` also a tree from how a
corpus uses its tokens, counting included. One process, written after every tree. `--device cpu --tiny` tries it.
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
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdlm.data.store import TokenStore
from tdlm.files import write_json
from tdlm.train.provenance import device_name, provenance
from tdlm.tree.build import build_tree
from tdlm.tree.cluster import inertia
from tdlm.tree.embeddings import from_array, from_store
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


def measure_tree(name: str, device: str = "cpu", rows: np.ndarray | None = None) -> dict[str, Any]:
    vectors, k, height = REQUESTS[name]
    rows = rows_of(vectors) if rows is None else rows
    low, high = RATIOS
    tree, took = timed(lambda: build_tree(rows, branching=k, size=len(rows), min_ratio=low, max_ratio=high, height=height,
                                          device=device))
    known = rows.any(1)
    return {"vectors": vectors, "dimensions": rows.shape[1], "K": k, "height_asked": height, "height": tree.height,
            "inner_nodes": tree.nodes - tree.size, **out_of_bounds(tree, height),
            "root_inertia": inertia(rows, tree.slot[-1].numpy()[known], k, np.flatnonzero(known)),
            "sha256": hashlib.sha256(tree.to_bytes()).hexdigest(), **took}


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


DEVICE_RUNS = {"K=512": 4, "K=512, 768 dimensions": 3, "K=225": 2, "K=37, height 3": 2, "K=2": 1}
"""Trees that `--device` makes of each request; the first of all starts the device."""


def on_device(chosen: argparse.Namespace) -> dict[str, Any]:
    """Trees on a device, then the processor's own, as long as there is time."""
    device, begun = chosen.device, time.perf_counter()
    result: dict[str, Any] = {"ratios": RATIOS, "tokens": TOKENS, "trees": {}, "provenance": provenance(
        device, processor=device_name("cpu"), command=f"python -m benchmarks.tree --device {torch.device(device).type}")}
    kept: dict[str, np.ndarray] = {}

    def rows(name: str) -> np.ndarray:
        vectors = REQUESTS[name][0]
        if vectors not in kept:
            kept[vectors] = rows_of(vectors)[-2000:] if chosen.tiny else rows_of(vectors)
        return kept[vectors]

    def part(name: str, key: str, act: Any) -> None:
        found = result["trees"].setdefault(name, {})
        try:
            late = time.perf_counter() - begun > chosen.seconds
            found[key] = {"failed": f"left out, {chosen.seconds:.0f} s are over"} if late else act()
        except Exception as error:  # whatever breaks one tree, the others are still wanted
            found[key] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name:24s} {key:10s} {found[key].get('failed') or found[key]['seconds']}", flush=True)
        result["seconds"] = time.perf_counter() - begun
        write_json(chosen.out, result)

    for name, count in DEVICE_RUNS.items():
        part(name, "device", lambda name=name, count=count: warm([measure_tree(name, device, rows(name)) for _ in range(count)]))
    if chosen.data:
        part("corpus, K=512", "device", lambda: corpus_tree(chosen.data, device))
    for name in DEVICE_RUNS:
        part(name, "processor", lambda name=name: measure_tree(name, "cpu", rows(name)))
        result["aims"] = device_aims(result["trees"])
    result["seconds"] = time.perf_counter() - begun
    return result


def warm(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one record, the first of them by itself: it loads the device's kernels."""
    seconds = [run["seconds"] for run in runs]
    rest = seconds[1:] or seconds
    return {**{key: value for key, value in runs[0].items() if key not in ("seconds", "load_average")},
            "seconds": {"first": seconds[0], "median": statistics.median(rest), "min": min(rest), "max": max(rest)},
            "same_bytes": len({run["sha256"] for run in runs}) == 1}


def corpus_tree(folder: Path, device: str) -> dict[str, Any]:
    """Counting neighbours, the decomposition, and K=512 clusters of the vectors."""
    store = TokenStore(folder)
    vectors, counting = timed(lambda: from_store(store, device=device))
    tree, building = timed(lambda: build_tree(vectors, branching=512, size=store.size, counts=store.counts, device=device))
    return {"tokens": store.tokens("train"), "height": tree.height, **out_of_bounds(tree, None),
            "seconds": {"vectors": counting["seconds"], "tree": building["seconds"]}}


def device_aims(trees: dict[str, Any]) -> dict[str, Any]:
    """The device's trees beside the processor's: as good, in bounds, the same every time, and soon."""
    found: dict[str, Any] = {}
    for name, both in trees.items():
        here, there = both.get("device", {}), both.get("processor", {})
        if name not in DEVICE_RUNS or "seconds" not in here:
            continue
        if "seconds" in there:
            ratio = here["root_inertia"] / there["root_inertia"]
            found[f"{name}: root inertia over the processor's"] = {"value": ratio, "most": 1.01, "met": ratio <= 1.01}
        outside = here["splits_out_of_bounds"]
        found[f"{name}: splits out of bounds"] = {"value": outside, "most": 0, "met": outside == 0}
        found[f"{name}: same bytes in every run"] = {"value": here["same_bytes"], "least": 1, "met": here["same_bytes"]}
        if name.startswith("K=512"):
            for which in ("first", "median"):
                seconds = here["seconds"][which]
                found[f"{name}: seconds, {which}"] = {"value": seconds, "most": 3, "met": seconds <= 3}
    return found


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
    options.add_argument("--device", help="cuda: the trees of that device, with the processor's beside them")
    options.add_argument("--data", type=Path, help="with --device: a prepared folder, for a tree from its corpus")
    options.add_argument("--seconds", type=float, default=30, help="with --device: begin no tree after so long")
    options.add_argument("--tiny", action="store_true", help="with --device: 2,000 tokens, to try the script")
    options.add_argument("--out", type=Path, help="default: benchmarks/results/tree.json, or tree-DEVICE.json")
    chosen = options.parse_args()
    if chosen.out is None:
        suffix = f"-{torch.device(chosen.device).type}" if chosen.device else ""
        chosen.out = Path(__file__).parent / "results" / f"tree{suffix}.json"
    if chosen.only:
        print(json.dumps(MEASURES[chosen.only[0]](chosen.only[1])))
        return
    if chosen.device:
        result = on_device(chosen)
        write_json(chosen.out, result)
        print(json.dumps(result["aims"], indent=1), f"{result['seconds']:.0f} s")
        return
    result = {"ratios": RATIOS, "tokens": TOKENS, "against_faiss": {
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
