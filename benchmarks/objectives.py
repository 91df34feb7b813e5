"""What does each method's loss cost beside its network?   python -m benchmarks.objectives [--vocabulary 8192]

The same network for every method (left-to-right ones have their own kind), random tokens, float32 on the CPU. For each: the
network alone, forward and backward; the whole loss, forward and backward; their ratio. A method whose loss costs much more
than its V-wide head explains is slow by accident.
"""
from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tdlm.assemble import assemble
from tdlm.config import DataConfig
from tdlm.files import write_json
from tdlm.model.causal import Causal
from tdlm.rng import Draws
from tdlm.study.named import METHODS, TOY
from tdlm.train.plan import complete_tree
from tdlm.train.provenance import provenance
from tdlm.tree.tree import Tree


def milliseconds(act: Callable[[], Any], repeats: int) -> dict[str, float]:
    spans = []
    for _ in range(repeats + 1):
        before = time.perf_counter()
        act()
        spans.append(1000 * (time.perf_counter() - before))
    return {"median": statistics.median(spans[1:]), "min": min(spans[1:]), "max": max(spans[1:])}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    method, _, told = METHODS[name]
    backbone = (Causal(blocks=options.blocks, width=options.width, heads=4) if told == "causal"
                else replace(TOY.backbone, blocks=options.blocks, width=options.width, heads=4, conditioning=told))
    config = replace(TOY, method=method, backbone=backbone, data=DataConfig(length=options.length))
    tree = Tree.star(options.vocabulary) if method.flat else complete_tree(options.vocabulary, options.branching)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, options.vocabulary, (options.batch, options.length), generator=generator)
    assembly = assemble(config, tree, pad_id=None, counts=torch.ones(options.vocabulary))
    model, objective = assembly.model, assembly.objective
    time_, level = torch.rand(options.batch, dtype=torch.float64, generator=generator), torch.zeros(options.batch).long()
    step = iter(range(10_000))

    def network() -> None:
        model.zero_grad(set_to_none=True)
        model.hidden(tokens, time_, level).sum().backward()

    def loss() -> None:
        model.zero_grad(set_to_none=True)
        draws = Draws(0, next(step), "benchmark", torch.arange(options.batch))
        objective.loss(model, tokens, draws=draws).train.backward()

    alone, whole = milliseconds(network, options.repeats), milliseconds(loss, options.repeats)
    return {"network": alone, "loss": whole, "ratio": whole["median"] / alone["median"], "classes": getattr(
        model.predictor, "classes", tree.branching)}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value in {"vocabulary": 8192, "branching": 96, "batch": 8, "length": 128, "blocks": 4, "width": 256,
                        "repeats": 7}.items():
        options.add_argument(f"--{name}", type=int, default=value)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "objectives.json")
    chosen = options.parse_args()
    load = [round(value, 2) for value in os.getloadavg()]  # other work on the machine would spoil the figures
    results = {}
    for name in METHODS:
        results[name] = result = measure(name, chosen)
        print(f"{name:18s} network {result['network']['median']:7.1f} ms   loss {result['loss']['median']:7.1f} ms "
              f"({result['loss']['min']:.0f} .. {result['loss']['max']:.0f})   ratio {result['ratio']:.2f}", flush=True)
    sizes = {name: value for name, value in vars(chosen).items() if name != "out"}
    write_json(chosen.out, {"sizes": sizes, "methods": results, "load_average_before": load,
                            "provenance": provenance("cpu", command="python -m benchmarks.objectives")})


if __name__ == "__main__":
    main()
