"""What do the head and attention cost by themselves?   python -m benchmarks.cost [--parts head attention flex]

The head alone: the loss of one training step (bf16, 64 x 512 positions) and its gradient, with the backbone replaced by hidden
states that lie ready, against the vocabulary (50k, 100k, 200k), the branching factor and the depth of the tree; the flat
model's head beside it at its strongest (no logits kept) and as it is usually written. States are drawn by the process, so as
many positions reach the head as in training. Attention alone: every implementation torch has, forward and backward, for as
many tokens at three lengths.

Milliseconds are the device's: before each call it is given something to wait with, so that what the processor prepares is
not counted unless the call itself waits for the device (`host`: how long the processor takes; `waits`: operations of one call
that wait, as far as torch notices them). Memory is the peak above what
lies there before the step: the input table is not in it, and its gradient is told apart. Printed and written after every
case; a case that fails says why, and one that would begin after `--seconds` is left out.

`--device cpu --tiny` tries the script itself.
"""
from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.throughput import tokens_of
from tdlm.files import write_json
from tdlm.model.head import SharedHead, Tied, wider
from tdlm.model.model import Model, autocast
from tdlm.model.transformer import round_up
from tdlm.objectives import GiddMethod, HdlmMethod, MdlmMethod, SeddMethod, TreeMethod, TwoStepMethod
from tdlm.process import Overlapping
from tdlm.rng import Draws
from tdlm.train.loop import tf32
from tdlm.train.plan import complete_tree
from tdlm.train.provenance import provenance
from tdlm.tree.tree import Tree

MIB = 2**20


class Ready(nn.Module):
    """A backbone that has nothing to do: an embedding for the head, and hidden states that were there before."""

    conditioning = "none"
    blocks = ()

    def __init__(self, nodes: int, hidden: Tensor):
        super().__init__()
        self.width, self.leaf = hidden.shape[-1], hidden
        self.embedding = nn.Embedding(round_up(nodes), self.width, device=hidden.device)

    def forward(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return self.leaf


class WideHead(SharedHead):
    """One logit a token, all of them kept for the backward pass (but of active positions only, which is not usual)."""

    def weighted(self, hidden: Tensor, parent: Tensor, slot: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        nll = F.cross_entropy(wider(self.logits(hidden, parent)), slot, reduction="none")
        return (nll * share.to(nll.dtype)).sum(), nll.detach()


@dataclass(frozen=True)
class Wide:
    def build(self, tree: Tree, embedding: nn.Embedding, mass: Tensor | None) -> WideHead:
        return WideHead(tree, embedding.embedding_dim)


METHODS: dict[str, Any] = {
    "tied": TreeMethod(head=Tied()), "shared": TreeMethod(), "overlapping": TreeMethod(process=Overlapping(), head=Tied()),
    "mdlm": MdlmMethod(), "mdlm-tied": MdlmMethod(head=Tied()), "mdlm-wide": MdlmMethod(head=Wide()),
    "gidd": GiddMethod(), "gidd-masks": GiddMethod(p_uniform=0.0), "hdlm": HdlmMethod(), "hdlm-astray": HdlmMethod(xi=0.9),
    "two-step": TwoStepMethod(), "sedd": SeddMethod(), "sedd-uniform": SeddMethod(graph="uniform")}
VOCABULARIES = (50_258, 100_278, 200_020)
"""GPT-2, cl100k and o200k, with PAD."""


def cases(tiny: bool) -> Iterator[tuple[str, int, int]]:
    """(method, vocabulary, K; 0 without a tree), what decides most first."""
    sizes = (100, 200, 400) if tiny else VOCABULARIES
    for method in ("tied", "shared", "mdlm", "mdlm-tied"):
        for size in sizes:
            yield method, size, (32 if tiny else 512) if method in ("tied", "shared") else 0
    for k in (17, 64, 5) if tiny else (225, 1024, 37):
        for method in ("tied", "shared"):
            yield method, sizes[0], k
    for method in ("overlapping", "hdlm", "gidd", "two-step", "gidd-masks", "sedd", "hdlm-astray", "sedd-uniform"):
        yield method, sizes[0], (32 if tiny else 512) if method in ("overlapping", "hdlm", "hdlm-astray", "two-step") else 0
    for size in sizes:
        yield "mdlm-wide", size, 0


def timed(act: Callable[[], Any], count: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of `count` calls: the device's, and the processor's (which does not wait for it in between)."""
    for _ in range(6):  # the number of active positions varies, and with it which kernels and pieces of memory there must be
        act()
    if device.type != "cuda":
        times = [_seconds(act) for _ in range(count)]
        return {"milliseconds": _spread(times), "host": _spread(times)}
    torch.cuda.synchronize(device)
    ahead = int(min(0.2, 3 * _seconds(act)) * 2e9)  # cycles, at 2 GHz
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    host = []
    for start, end in marks:
        torch.cuda.synchronize(device)
        torch.cuda._sleep(ahead)
        start.record()
        host.append(_seconds(act))
        end.record()
    torch.cuda.synchronize(device)
    return {"milliseconds": _spread([start.elapsed_time(end) / 1000 for start, end in marks]), "host": _spread(host)}


def _seconds(act: Callable[[], Any]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"median": 1000 * statistics.median(seconds), "min": 1000 * min(seconds), "max": 1000 * max(seconds)}


def peak(act: Callable[[], Any], device: torch.device) -> float | None:
    """MiB that a call takes at most, above what is there before."""
    if device.type != "cuda":
        act()
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    act()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MIB


def waits(act: Callable[[], Any], device: torch.device) -> int | None:
    """How many operations of a call make the processor wait for the device."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in said)


@functools.cache
def tree_of(size: int, k: int) -> Tree:
    return complete_tree(size, k) if k else Tree.star(size)


def prepare_head(name: str, size: int, k: int, options: argparse.Namespace,
                 device: torch.device) -> tuple[Model, Callable[[], None]]:
    """A model without a backbone, and what makes its gradient anew for states that were not seen before."""
    tree, method = tree_of(size, k), METHODS[name]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.batch, options.length, options.width, generator=generator)
    hidden = hidden.to(device, torch.bfloat16).requires_grad_()
    objective = method.objective(tree.to(device), None)
    backbone = Ready(objective.num_states, hidden)
    model = Model(backbone, method.head.build(tree, backbone.embedding, None)).to(device)
    torch.manual_seed(0)
    for weight in model.parameters():  # no zeros: a chip that multiplies nothing draws less power, and runs faster
        nn.init.normal_(weight, std=options.width**-0.5)
    tokens = tokens_of(size, options.batch, options.length)
    tokens = tokens if getattr(objective, "prepares", False) else tokens.to(device)
    step = iter(range(1_000_000))

    def act() -> None:
        model.zero_grad(set_to_none=True)
        hidden.grad = None
        draws = Draws(0, next(step), "train", torch.arange(options.batch), options.batch, device)
        with autocast(device, "bfloat16"):
            loss = objective.loss(model, tokens, draws=draws)
        loss.train.backward()

    return model, act


def measure_head(name: str, size: int, k: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model, act = prepare_head(name, size, k, options, device)
    tree, table, leaf = tree_of(size, k), model.backbone.embedding.weight, model.backbone.leaf
    found = {**timed(act, options.repeats, device), "waits": waits(act, device)}
    model.zero_grad(set_to_none=True)
    leaf.grad = None
    most = peak(act, device)
    gradient = 0 if table.grad is None else _mib(table.grad)
    if gradient:  # what the input needs anyway, whatever the head does
        found["table_fill"] = timed(lambda: torch.zeros_like(table), options.repeats, device)["milliseconds"]
    return {"method": name, "vocabulary": size, "K": k, "height": tree.height, "nodes": tree.nodes, **found, "memory": {
        "peak": most, "table_gradient": gradient, "head": None if most is None else most - gradient,
        "head_weights": sum(_mib(weight) for weight in model.predictor.parameters()), "table": _mib(table)}}


def _mib(values: Tensor) -> float:
    return values.numel() * values.element_size() / MIB


SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
        "memory-efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


@functools.cache
def flexible() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)  # type: ignore[return-value]


def measure_attention(name: str, length: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Queries, keys and values as one product makes them: (B, S, 3, heads, width)."""
    batch, heads = options.batch * options.length // length, options.width // 64 or 1
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(batch, length, 3, heads, 64, generator=generator).to(device, torch.bfloat16)
    q, k, v = (part.detach().requires_grad_() for part in made.transpose(1, 3).unbind(2))
    out = torch.randn(batch, length, heads, 64, generator=generator).to(device, torch.bfloat16).transpose(1, 2)

    def attend() -> Tensor:
        if name == "flex":
            return flexible()(q, k, v)
        with sdpa_kernel(SDPA[name]):
            return F.scaled_dot_product_attention(q, k, v)

    def both() -> None:
        q.grad = k.grad = v.grad = None
        attend().backward(out)

    with torch.no_grad():
        forward = timed(attend, options.repeats, device)
    whole = timed(both, options.repeats, device)
    one = 4 * batch * heads * length**2 * 64 / 1e9  # of two products; the backward pass has five
    spans = {"forward": forward["milliseconds"]["median"], "both": whole["milliseconds"]["median"]}
    back = spans["both"] - spans["forward"]
    q.grad = k.grad = v.grad = None
    return {"backend": name, "length": length, "batch": batch, "heads": heads, "forward": forward, "both": whole,
            "backward_milliseconds": back, "tflops": {"forward": one / spans["forward"], "backward": 2.5 * one / back},
            "memory": peak(both, device)}


def growth(heads: dict[str, Any]) -> dict[str, Any]:
    """What a vocabulary costs against the smallest one, by method: time; time without filling a gradient of the input table
    with zeros; memory without that gradient."""
    found: dict[str, Any] = {}
    rows = [row for row in heads.values() if "failed" not in row]
    for method in METHODS:
        for k in sorted({row["K"] for row in rows}):
            some = sorted((r for r in rows if (r["method"], r["K"]) == (method, k)), key=lambda row: row["vocabulary"])
            costs = [(row["milliseconds"]["median"], row.get("table_fill", {}).get("median", 0), row["memory"]["head"])
                     for row in some]
            for row, (spent, fill, memory) in list(zip(some, costs))[1:]:
                spent_first, fill_first, memory_first = costs[0]
                found[f"{method}, K={k}, {row['vocabulary']:,} tokens"] = {
                    "time": spent / spent_first, "time_without_table": (spent - fill) / (spent_first - fill_first),
                    "memory": None if memory is None else memory / memory_first}
    return found


def head_line(row: dict[str, Any]) -> str:
    memory, spans = row["memory"], row["milliseconds"]
    line = (f"V={row['vocabulary']:7,d} H={row['height']} {spans['median']:8.3f} ms ({spans['min']:.3f} .. {spans['max']:.3f})"
            f"  host {row['host']['median']:6.2f} ms")
    line += f", waits {row['waits']} times" if row["waits"] else ""
    return line if memory["peak"] is None else (
        f"{line}  {memory['head']:8.1f} MiB + {memory['table_gradient']:.1f} of the table's gradient")


def attention_line(row: dict[str, Any]) -> str:
    speed = row["tflops"]
    return (f"S={row['length']:5d} forward {row['forward']['milliseconds']['median']:7.3f} ms ({speed['forward']:5.1f} TFLOP/s)"
            f"  backward {row['backward_milliseconds']:7.3f} ms ({speed['backward']:5.1f})"
            + ("" if row["memory"] is None else f"  {row['memory']:8.1f} MiB"))


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--parts", nargs="+", choices=["head", "attention", "flex"], default=["head", "attention", "flex"])
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--width", type=int, default=768)
    options.add_argument("--repeats", type=int, default=12)
    options.add_argument("--seconds", type=float, default=60, help="begin no case after so long")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="small everything: try the script")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cost.json")
    chosen = options.parse_args()
    if chosen.tiny:
        chosen.batch, chosen.length, chosen.width, chosen.repeats = 4, 32, 64, 2
    device, begun = torch.device(chosen.device), time.perf_counter()
    results: dict[str, Any] = {"provenance": provenance(device, command="python -m benchmarks.cost"), "head": {}, "attention": {},
                               "sizes": {name: getattr(chosen, name) for name in ("batch", "length", "width", "repeats")}}

    def case(part: str, name: str, act: Callable[[], dict[str, Any]], line: Callable[[dict[str, Any]], str]) -> None:
        left_out = time.perf_counter() - begun > chosen.seconds
        try:
            with tf32(device):
                row = {"failed": f"left out, {chosen.seconds:.0f} s are over"} if left_out else act()
        except Exception as error:  # whatever breaks one case, the others are still wanted
            row = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
        results[part][name] = row
        print(f"{part:9s} {name:28s} {row.get('failed') or line(row)}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results["growth"], results["seconds"] = growth(results["head"]), time.perf_counter() - begun
        write_json(chosen.out, results)

    if "head" in chosen.parts:
        for method, size, k in cases(chosen.tiny):
            name = f"{method}{f', K={k}' if k else ''}, {size:,} tokens"
            case("head", name, functools.partial(measure_head, method, size, k, chosen, device), head_line)
    lengths = [chosen.length * factor for factor in (1, 2, 4)]
    for part, names in (("attention", list(SDPA)), ("flex", ["flex"])):
        for length in lengths if part in chosen.parts else ():
            for name in names:
                act = functools.partial(measure_attention, name, length, chosen, device)
                case("attention", f"{name}, {length} positions", act, attention_line)
    for name, ratio in results.get("growth", {}).items():
        memory = "" if ratio["memory"] is None else f"   head's memory x {ratio['memory']:.3f}"
        print(f"{name:40s} time x {ratio['time']:.3f}, without the table x {ratio['time_without_table']:.3f}{memory}")
    print(f"{results.get('seconds', 0):.0f} s")


if __name__ == "__main__":
    main()
