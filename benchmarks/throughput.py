"""How fast do methods train on a GPU, and in how much memory?   python -m benchmarks.throughput [--cases paper tied ...]

Whole updates, as `tdlm train` does them (noise, forward, backward, clipping, AdamW), of every method in one process on the
same synthetic tokens (Zipf's law over the vocabulary), the rivals in their strongest form here: gathered positions and a
cross-entropy that never holds all logits. Printed and written after every case: tokens/s (median and range over updates),
peak memory (all that torch took from the device), time to compile, and the share of the chip's dense bf16 peak.

`--device cpu --tiny` tries the script itself.
"""
from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, RunConfig
from tdlm.data.batches import Batch, prefetch
from tdlm.errors import RunError
from tdlm.files import write_json
from tdlm.model.causal import Causal
from tdlm.model.head import Tied
from tdlm.model.model import Model, count_parameters
from tdlm.objectives import ar, gidd, hdlm, mdlm
from tdlm.objectives.tree import TreeMethod
from tdlm.process import Overlapping
from tdlm.recipes import recipe
from tdlm.train.loop import tf32
from tdlm.train.metrics import peak_flops
from tdlm.train.plan import complete_tree, train_flops
from tdlm.train.provenance import device_name, provenance
from tdlm.train.step import Trainer, compile_backbone
from tdlm.tree.tree import Tree

SMALL = BackboneConfig(blocks=12, width=768, heads=12, conditioning="none")
CASES: dict[str, tuple[str, Any, Any]] = {
    "paper": ("TDLM small as in the paper: 17 blocks, shared head, told the time", TreeMethod(),
              replace(SMALL, blocks=17, conditioning="time")),
    "shared": ("12 blocks, shared head, told the level", TreeMethod(), replace(SMALL, conditioning="level")),
    "tied": ("12 blocks, tied tree head, told the level", TreeMethod(head=Tied()), replace(SMALL, conditioning="level")),
    "overlapping": ("12 blocks, tied tree head, overlapping levels", TreeMethod(process=Overlapping(), head=Tied()), SMALL),
    "mdlm": ("MDLM, 12 blocks, untied, fused cross-entropy", mdlm.MdlmMethod(), SMALL),
    "mdlm-tied": ("MDLM, 12 blocks, tied, fused cross-entropy", mdlm.MdlmMethod(head=Tied()), SMALL),
    "gidd": ("GIDD+, 12 blocks", gidd.GiddMethod(), replace(SMALL, conditioning="time")),
    "hdlm": ("HDLM from scratch, 12 blocks, dense head", hdlm.HdlmMethod(), replace(SMALL, conditioning="time")),
    "ar": ("autoregressive, 12 blocks (Llama style)", ar.Autoregressive(), Causal(blocks=12, width=768, heads=12)),
}


def config_of(name: str, options: argparse.Namespace) -> RunConfig:
    _, method, backbone = CASES[name]
    if options.tiny:
        backbone = replace(backbone, blocks=2, width=64, heads=2)
    base = recipe("small")
    return replace(base, name=name, method=method, backbone=backbone, data=replace(base.data, length=options.length),
                   train=replace(base.train, batch=options.batch, micro_batch=options.micro_batch, stream=options.stream,
                                 memory=options.memory, float8=options.float8))


def tokens_of(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    """Zipf-distributed ids whose frequency says nothing about their place in the tree."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(vocabulary, generator=generator)
    chance = 1 / torch.arange(1, vocabulary + 1, dtype=torch.float64)
    return place[torch.multinomial(chance, batch * length, replacement=True, generator=generator)].view(batch, length)


def spans(act: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each call, by the device's own clock."""
    if device.type != "cuda":
        times = [time.perf_counter()]
        for _ in range(count):
            act()
            times.append(time.perf_counter())
        return [1000 * (b - a) for a, b in zip(times, times[1:])]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        act()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) for a, b in zip(marks, marks[1:])]


def measure(name: str, tree: Tree, tokens: torch.Tensor, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    config = config_of(name, options)
    torch.compiler.reset()
    assembly = assemble(config, Tree.star(tree.size) if config.method.flat else tree, pad_id=None,
                        counts=torch.bincount(tokens.flatten(), minlength=tree.size), device=device)
    compiled = compile_backbone(assembly.model, device, None if device.type == "cuda" else False,
                                config.train.memory if device.type == "cuda" else "fast", config.train.float8)
    trainer = Trainer(assembly.model, assembly.objective, config.train, device)
    with prefetch(Same(tokens, trainer.micros), itertools.count(), micros=trainer.micros, pin=device.type == "cuda",
                  prepare=trainer.prepare) as batches:
        def update() -> None:
            trainer.update(itertools.islice(batches, trainer.micros))

        return timed(name, config, assembly.model, trainer, compiled, update, device, options)


class Same:
    """The same rows in every step, as the loader gives them."""

    def __init__(self, tokens: torch.Tensor, micros: int):
        self.pieces = [Batch(*piece) for piece in zip(tokens.chunk(micros), torch.arange(len(tokens)).chunk(micros))]

    def batch(self, step: int, rank: int, world: int, micro: int, micros: int) -> Batch:
        return self.pieces[micro]


def timed(name: str, config: RunConfig, model: Model, trainer: Trainer, compiled: bool, update: Callable[[], None],
          device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    before = time.perf_counter()
    update()
    trainer.read()
    first = time.perf_counter() - before
    for _ in range(options.warmup):
        update()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    times = spans(update, options.updates, device)
    middle, positions = statistics.median(times), options.batch * options.length
    flops, peak = train_flops(model, config)["train"], peak_flops(device_name(device))
    rate = positions / middle * 1000
    result = {
        "what": CASES[name][0], "tokens_per_second": {"median": rate, "min": positions / max(times) * 1000,
                                                      "max": positions / min(times) * 1000},
        "milliseconds": middle, "peak_gib": torch.cuda.max_memory_reserved(device) / 2**30 if device.type == "cuda" else None,
        "parameters": count_parameters(model), "flops_per_token": flops, "compiled": compiled,
        "first_update_seconds": first, "share_of_peak": rate * flops / peak if peak else None,
        "loss": trainer.read().loss, "config": config.to_json(),
    }
    if options.profile and device.type == "cuda":
        result["kernels"] = profile(update, options.profile)
    return result


def profile(act: Callable[[], Any], rows: int) -> list[dict[str, Any]]:
    """The GPU's time by kernel, per update."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(2):
            act()
        torch.cuda.synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda kernel: -kernel.device_time_total)
    busy = sum(kernel.device_time_total for kernel in kernels) / 2000
    top = [{"kernel": kernel.key[:100], "calls": kernel.count // 2, "milliseconds": kernel.device_time_total / 2000}
           for kernel in kernels[:rows]]
    return [{"kernel": "all", "calls": sum(kernel.count for kernel in kernels) // 2, "milliseconds": busy}, *top]


def line(name: str, result: dict[str, Any]) -> str:
    rate, memory = result["tokens_per_second"], result["peak_gib"]
    share = result["share_of_peak"]
    return (f"{name:12s} {rate['median'] / 1000:8.1f}k tokens/s ({rate['min'] / 1000:.1f} .. {rate['max'] / 1000:.1f})"
            f"  {result['milliseconds']:8.2f} ms" + ("" if memory is None else f"  {memory:6.2f} GiB")
            + ("" if share is None else f"  {100 * share:4.1f}% of peak") + f"  first {result['first_update_seconds']:.0f} s"
            + f"  loss {result['loss']:.3f}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--micro-batch", type=int)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--vocabulary", type=int, default=50_258)
    options.add_argument("--branching", type=int, default=512)
    options.add_argument("--stream", choices=["float32", "bfloat16"], default="bfloat16")
    options.add_argument("--memory", choices=["fast", "balanced", "lean"], default="balanced")
    options.add_argument("--float8", action="store_true", help="the blocks' products in eight bits")
    options.add_argument("--updates", type=int, default=20)
    options.add_argument("--warmup", type=int, default=4)
    options.add_argument("--profile", type=int, default=0, metavar="ROWS", help="also list the ROWS kernels that take longest")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="two narrow blocks: try the script")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "throughput.json")
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    tree = complete_tree(chosen.vocabulary, chosen.branching)
    tokens = tokens_of(chosen.vocabulary, chosen.batch, chosen.length)
    results: dict[str, Any] = {"provenance": provenance(device, command="python -m benchmarks.throughput"), "cases": {},
                               "batch": chosen.batch, "length": chosen.length, "stream": chosen.stream, "memory": chosen.memory,
                               "float8": chosen.float8,
                               "updates": chosen.updates, "vocabulary": chosen.vocabulary, "branching": chosen.branching}
    for name in chosen.cases:
        try:
            with tf32(device):
                results["cases"][name] = measure(name, tree, tokens, device, chosen)
            print(line(name, results["cases"][name]), flush=True)
            for row in results["cases"][name].get("kernels", []):
                print(f"    {row['milliseconds']:8.3f} ms x {row['calls']:4d}  {row['kernel']}", flush=True)
        except (torch.OutOfMemoryError, RunError) as error:
            results["cases"][name] = {"what": CASES[name][0], "failed": str(error).splitlines()[0]}
            print(f"{name:12s} {results['cases'][name]['failed']}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_json(chosen.out, results)


if __name__ == "__main__":
    main()
