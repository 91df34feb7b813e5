"""How fast is a training step, and where does its time go?   python -m benchmarks.train_step [--recipe demo]

Two measurements: whole updates exactly as `tdlm train` does them (rows made by a background thread), and the same
update taken apart (loader, backbone, head, the rest of the loss, backward, optimizer), one timer around each part.
The yardsticks in the same run: the chip's own rate for the product that dominates the network (positions x width x 4
width), and a dense head over all tokens at the same positions, forward and backward, beside the tree head.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from tdlm.assemble import Assembly, assemble
from tdlm.config import RunConfig
from tdlm.data.batches import TrainRows, prefetch
from tdlm.data.prepare import prepare
from tdlm.data.store import TokenStore
from tdlm.files import write_json
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.train.loop import choose_device
from tdlm.train.optimizer import clip_gradients
from tdlm.train.plan import complete_tree, train_flops
from tdlm.train.provenance import provenance
from tdlm.train.step import Trainer, autocast, compile_backbone

PARTS: tuple[str, ...] = ("loader", "backbone", "head", "rest of the loss", "backward", "optimizer")


class Timers:
    """Seconds by part; on a GPU each reading waits for the device."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, part: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            before = self.clock()
            result = act(*arguments, **named)
            self.seconds[part] += self.clock() - before
            return result

        return wrapped


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def whole_updates(trainer: Trainer, rows: TrainRows, updates: int, repeats: int) -> list[float]:
    """Token positions per second of each repeat, after a warm-up of the same length."""
    timers, rates = Timers(trainer.device), []
    with prefetch(rows, range(updates * (repeats + 1)), micros=trainer.micros) as batches:
        for repeat in range(repeats + 1):
            before = timers.clock()
            for _ in range(updates):
                trainer.update(itertools.islice(batches, trainer.micros))
            if repeat:
                rates.append(updates * rows.batch_size * rows.length / (timers.clock() - before))
    return rates


def taken_apart(config: RunConfig, assembly: Assembly, trainer: Trainer, rows: TrainRows,
                updates: int) -> dict[str, float]:
    """Milliseconds per update by part. The loader runs in the foreground here."""
    timers, model, settings = Timers(trainer.device), assembly.model, config.train
    hidden, nll = model.hidden, model.head.nll
    model.hidden, model.head.nll = timers.timed("backbone", hidden), timers.timed("head", nll)  # type: ignore[method-assign]

    def optimize() -> None:
        clip_gradients(trainer.optimizer, settings.grad_clip)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    try:
        for step in range(updates):
            batch = timers.timed("loader", rows.batch)(step)
            tokens, numbers = batch.tokens.to(trainer.device), batch.rows.to(trainer.device)
            inner = timers.seconds["backbone"] + timers.seconds["head"]
            before = timers.clock()
            with autocast(trainer.device, settings.dtype):
                loss = assembly.objective.loss(model, tokens, draws=Draws(1, step, "train", numbers, settings.batch))
            spent = timers.clock() - before - (timers.seconds["backbone"] + timers.seconds["head"] - inner)
            timers.seconds["rest of the loss"] += spent
            timers.timed("backward", loss.train.backward)()
            timers.timed("optimizer", optimize)()
    finally:
        model.hidden, model.head.nll = hidden, nll  # type: ignore[method-assign]
    return {part: round(1000 * seconds / updates, 3) for part, seconds in timers.seconds.items()}


def heads(config: RunConfig, assembly: Assembly, rows: TrainRows, device: torch.device, repeats: int) -> dict[str, Any]:
    """Milliseconds of head and cross-entropy, forward and backward, at one state's active positions: ours and dense."""
    tree, model, timers = assembly.objective.tree, assembly.model, Timers(device)
    tokens = rows.batch(0).tokens.to(device)
    heights = torch.randint(0, tree.height + 1, tokens.shape, generator=torch.Generator().manual_seed(0)).to(device)
    nodes = tree.ancestor[heights, tokens]
    at = (tree.num_children[nodes] > 1).nonzero(as_tuple=True)
    level, parent, target = heights[at] - 1, nodes[at], tokens[at]
    slot = tree.slot[level, target]
    hidden = torch.randn(len(parent), config.backbone.width, device=device, requires_grad=True)
    dense = torch.nn.Linear(config.backbone.width, tree.size, device=device)

    nll: Callable[..., torch.Tensor] = model.head.nll  # type: ignore[assignment]

    def ours() -> None:
        nll(hidden, parent, slot).mean().backward()

    def theirs() -> None:
        F.cross_entropy(dense(hidden).float(), target).backward()

    result: dict[str, Any] = {"active_positions": len(parent), "positions": tokens.numel()}
    for name, act in (("tree", ours), ("dense", theirs)):
        spans = []
        for _ in range(repeats + 2):
            before = timers.clock()
            with autocast(device, config.train.dtype):
                act()
            spans.append(1000 * (timers.clock() - before))
        result[name] = spread(spans[2:])
    return result


def product_rate(config: RunConfig, device: torch.device, repeats: int) -> dict[str, float]:
    """FLOP/s of the MLP's first product alone, the ceiling of everything above."""
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    positions, width = config.train.batch * config.data.length, config.backbone.width
    left = torch.randn(positions, width, device=device, dtype=dtype)
    right = torch.randn(width, 4 * width, device=device, dtype=dtype)
    timers, rates = Timers(device), []
    for _ in range(repeats + 3):
        before = timers.clock()
        torch.mm(left, right)
        rates.append(2 * positions * width * 4 * width / (timers.clock() - before))
    return spread(rates[3:])


def demo_store(folder: Path) -> TokenStore:
    """The demo's corpus, prepared with the demo's kind of tokenizer."""
    corpus = resources.files("tdlm") / "assets" / "novels.train.jsonl.xz"
    with resources.as_file(corpus) as path:
        prepare([path], folder / "data", tokenizer="bpe:4096", valid=0.02)
    return TokenStore(folder / "data")


def measure(config: RunConfig, store: TokenStore, branching: int, device: torch.device, updates: int, repeats: int,
            compiled: bool | None) -> dict[str, Any]:
    tree = complete_tree(store.size, branching)
    assembly = assemble(config, tree, pad_id=store.pad_id, counts=torch.from_numpy(store.counts), device=device)
    trainer = Trainer(assembly.model, assembly.objective, config.train, device)
    compiled = compile_backbone(assembly.model, device, compiled)
    rows = TrainRows(store, length=config.data.length, layout=config.data.layout, batch=config.train.batch, seed=1)
    rates = whole_updates(trainer, rows, updates, repeats)
    flops, ceiling = train_flops(assembly.model, config)["train"], product_rate(config, device, 10)
    return {
        "tokens_per_second": spread(rates), "compiled": compiled,
        "milliseconds_per_update": 1000 * config.train.batch * config.data.length / statistics.median(rates),
        "parts_milliseconds": taken_apart(config, assembly, trainer, rows, updates),
        "head_milliseconds": heads(config, assembly, rows, device, 10),
        "product_flops": ceiling, "flops_per_token": flops,
        "share_of_product_rate": statistics.median(rates) * flops / ceiling["median"],
        "tree": {"tokens": tree.size, "branching": branching, "height": tree.height, "kind": "complete, ids in order"},
    }


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--recipe", default="demo")
    options.add_argument("--data", type=Path, help="a prepared folder (default: the demo's corpus)")
    options.add_argument("--branching", type=int, default=64)
    options.add_argument("--batch", type=int)
    options.add_argument("--device")
    options.add_argument("--updates", type=int, default=20)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--compile", action=argparse.BooleanOptionalAction)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "train_step.json")
    chosen = options.parse_args()
    config, device = recipe(chosen.recipe), choose_device(chosen.device)
    if chosen.batch:
        config = replace(config, train=replace(config.train, batch=chosen.batch, micro_batch=None))
    load = [round(value, 2) for value in os.getloadavg()]  # other work on the machine would spoil the figures
    with tempfile.TemporaryDirectory() as folder:
        store = TokenStore(chosen.data) if chosen.data else demo_store(Path(folder))
        result = measure(config, store, chosen.branching, device, chosen.updates, chosen.repeats, chosen.compile)
    result |= {"recipe": chosen.recipe, "updates": chosen.updates, "repeats": chosen.repeats,
               "load_average_before": load, "config": config.to_json(), "provenance": provenance(device)}
    write_json(chosen.out, result)
    print(json.dumps({name: value for name, value in result.items() if name not in ("config", "provenance")}, indent=1))


if __name__ == "__main__":
    main()
