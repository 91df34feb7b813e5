"""What does a card of a given size have to do, and is that what it then takes?   python -m benchmarks.memory [--cards 6 8 ...]

What `tdlm train --card` chooses for every card, and around it the curve: micro-batches of all sizes, everything kept or `lean`;
trained as `benchmarks/throughput.py` trains. Printed and written after each: the prediction, the peak (all that torch took from
the device; of the first passes, which are not replayed yet, apart), tokens/s, also as a share of those of the first setting.

`--device cpu --tiny` tries the script itself.
"""
from __future__ import annotations

import argparse
import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tdlm.assemble import assemble
from tdlm.config import RunConfig
from tdlm.data.batches import prefetch
from tdlm.errors import RunError
from tdlm.files import write_json
from tdlm.model.model import Model
from tdlm.train.card import CARDS, GIB, choose
from tdlm.train.loop import tf32
from tdlm.train.memory import predicted_memory
from tdlm.train.plan import complete_tree, meta_model
from tdlm.train.provenance import provenance
from tdlm.train.step import Trainer, compile_backbone
from tdlm.tree.tree import Tree

from .throughput import CASES, Same, config_of, spans, tokens_of

CURVE = ((None, "fast"), (None, "lean"), (32, "fast"), (32, "lean"), (16, "fast"), (16, "lean"), (8, "fast"), (8, "lean"))


Setting = tuple[int | None, str]


def settings(config: RunConfig, model: Model, height: int, options: argparse.Namespace) -> list[tuple[Setting, list[float]]]:
    """Micro-batch and memory to be measured, each with the cards that choose them; the fastest ones first."""
    found: dict[Setting, list[float]] = {}
    for size in options.cards:
        choice = choose(config, model, size * GIB, height)
        if choice is None:
            print(f"{config.name:9s} does not fit a card of {size} GiB", flush=True)
            continue
        found.setdefault((choice.config.train.micro_batch, choice.config.train.memory), []).append(size)
    for micro, memory in CURVE if options.curve else ():
        if micro is None or micro < config.train.batch:
            found.setdefault((micro, memory), [])
    return sorted(found.items(), key=lambda item: (-(item[0][0] or config.train.batch), item[0][1]))


def measure(config: RunConfig, tree: Tree, tokens: torch.Tensor, device: torch.device,
            options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second (median) and the peak of steady training, and of the updates before passes are replayed."""
    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device) if gpu else 0
    assembly = assemble(config, tree, pad_id=None, counts=torch.bincount(tokens.flatten(), minlength=tree.size), device=device)
    compile_backbone(assembly.model, device, None if gpu else False, config.train.memory if gpu else "fast", config.train.float8)
    trainer = Trainer(assembly.model, assembly.objective, config.train, device)
    with prefetch(Same(tokens, trainer.micros), itertools.count(), micros=trainer.micros, pin=gpu,
                  prepare=trainer.prepare) as batches:
        def update() -> None:
            trainer.update(itertools.islice(batches, trainer.micros))

        for _ in range(options.warmup):
            update()
        trainer.read()
        first = torch.cuda.max_memory_reserved(device) - before if gpu else None
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        times = sorted(spans(update, options.updates, device))
    peak = torch.cuda.max_memory_reserved(device) - before if gpu else None
    return {"tokens_per_second": tokens.numel() / times[len(times) // 2] * 1000, "peak": peak, "first_peak": first,
            "loss": trainer.read().loss}


def line(name: str, result: dict[str, Any]) -> str:
    peak, cards = result.get("peak"), result["cards"]
    told = [f"{name:9s} micro-batch {result['micro_batch']:4d} {result['memory']:5s}",
            f"predicted {result['predicted'] / GIB:6.2f} GiB"]
    if peak is not None:
        told += [f"measured {peak / GIB:6.2f} ({100 * (result['predicted'] / peak - 1):+.1f}%)",
                 f"first passes {result['first_peak'] / GIB:.2f}"]
    if "failed" in result:
        told.append(result["failed"])
    else:
        told += [f"{result['tokens_per_second'] / 1000:8.1f}k tokens/s ({100 * result['speed']:.0f}%)",
                 f"loss {result['loss']:.3f}"]
    return "  ".join(told) + (f"  cards {cards}" if cards else "")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=["paper", "tied"])
    options.add_argument("--cards", nargs="+", type=float, default=list(CARDS), help="GiB")
    options.add_argument("--no-curve", dest="curve", action="store_false", help="only what the cards choose")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--vocabulary", type=int, default=50_258)
    options.add_argument("--branching", type=int, default=512)
    options.add_argument("--stream", choices=["float32", "bfloat16"], default="bfloat16")
    options.add_argument("--float8", action="store_true", help="the blocks' products in eight bits")
    options.add_argument("--updates", type=int, default=6)
    options.add_argument("--warmup", type=int, default=5, help="kernels are compiled and passes recorded in the first ones")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="two narrow blocks: try the script")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    chosen = options.parse_args()
    chosen.micro_batch, chosen.memory = None, "fast"  # what config_of asks for besides
    device = torch.device(chosen.device)
    tokens = tokens_of(chosen.vocabulary, chosen.batch, chosen.length)
    results: dict[str, Any] = {"provenance": provenance(device, command="python -m benchmarks.memory"), "cases": {},
                               "options": {name: value for name, value in vars(chosen).items() if name not in ("out", "device")}}
    full = complete_tree(chosen.vocabulary, chosen.branching)
    for name in chosen.cases:
        base = config_of(name, chosen)
        tree = Tree.star(full.size) if base.method.flat else full
        model, first = meta_model(base, tree), None
        results["cases"][name] = []
        for (micro, memory), cards in settings(base, model, tree.height, chosen):
            config = replace(base, train=replace(base.train, micro_batch=micro, memory=memory))
            whole = micro or chosen.batch
            result = {"micro_batch": whole, "memory": memory, "cards": cards,
                      "predicted": predicted_memory(config, model, whole, tree.height)["total"]}
            try:
                with tf32(device):
                    result.update(measure(config, tree, tokens, device, chosen))
                first = first or result["tokens_per_second"]
                result["speed"] = result["tokens_per_second"] / first
            except (torch.OutOfMemoryError, RunError) as error:
                result["failed"] = str(error).splitlines()[0]
            results["cases"][name].append(result)
            print(line(name, result), flush=True)
            write_json(chosen.out, results)


if __name__ == "__main__":
    main()
