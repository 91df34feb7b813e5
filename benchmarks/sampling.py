"""How fast do methods draw text on a GPU?   python -m benchmarks.sampling [--cases tied gidd ...]

Networks of 12 blocks with random weights (what they say does not change how much there is to do in a tree, whose schedule does
not depend on the network) draw 64 x 512 tokens in 512, 128 and 32 steps, and one sequence by itself; all in one process. The
rivals are at their best here; `gidd-dense` and `gidd-shipped` are what GIDD costs without deciding beforehand who may change.

    seconds      of a whole batch, all steps. The two slow ways of GIDD are timed over single steps spread over the way down,
                 with large steps in between that are not counted (`timed_steps` says how many)
    network      milliseconds of a step within the network, `rest` is everything else; by the device's clock
    evaluations  of the network, per sequence
    calls        of the network with a batch

Before anything is timed the network has been asked about every number of sequences and of columns that can occur (cuDNN's
attention makes a plan for each, which takes longer than the call), and a short run has been made.

`--device cpu --tiny` tries the script itself.
"""
from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig
from tdlm.files import write_json
from tdlm.model.causal import Causal
from tdlm.model.head import Tied
from tdlm.model.model import autocast
from tdlm.objectives import ar, gidd, mdlm
from tdlm.objectives.tree import TreeMethod
from tdlm.process import Overlapping
from tdlm.process.flat import Hybrid
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.sample import draw, plan, replay
from tdlm.sample.flat import generate_flat
from tdlm.train.loop import tf32
from tdlm.train.plan import complete_tree
from tdlm.train.provenance import provenance
from tdlm.train.step import compile_backbone
from tdlm.tree.tree import Tree

from . import dense_gidd

SMALL = BackboneConfig(blocks=12, width=768, heads=12, conditioning="none")
LEVEL, TIME = replace(SMALL, conditioning="level"), replace(SMALL, conditioning="time")
GIDD = (gidd.GiddMethod(), TIME)
CASES: dict[str, tuple[str, Any, Any]] = {
    "tied": ("tree, cascade, tied head, told the level", TreeMethod(head=Tied()), LEVEL),
    "gidd": ("GIDD, told the time: who may change is decided beforehand", *GIDD),
    "gidd-dense": ("GIDD, told the time: the head at every position, one pass over its logits", *GIDD),
    "gidd-shipped": ("GIDD, told the time: as shipped, float32 probabilities of all tokens at all positions", *GIDD),
    "mdlm": ("MDLM, tied head", mdlm.MdlmMethod(head=Tied()), SMALL),
    "overlapping": ("tree, overlapping levels, tied head", TreeMethod(process=Overlapping(), head=Tied()), SMALL),
    "shared": ("tree, cascade, shared head, told the level", TreeMethod(), LEVEL),
    "ar": ("autoregressive (Llama style), keys and values kept", ar.Autoregressive(), Causal(blocks=12, width=768, heads=12)),
}
SLOW = ("gidd-dense", "gidd-shipped")
WARM = 8
"""Steps of a first run, which are not counted."""


class Clock:
    """Marks on the device's time line: steps, and the network's calls within them."""

    def __init__(self, device: torch.device):
        self.gpu, self.device = device.type == "cuda", device
        self.steps, self.calls = [self.now()], list[tuple[int, int, Any, Any]]()

    def now(self) -> Any:
        if not self.gpu:
            return time.perf_counter()
        mark = torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def tick(self, done: int = 0, total: int = 0) -> None:
        self.steps.append(self.now())

    def milliseconds(self, first: Any, last: Any) -> float:
        return first.elapsed_time(last) if self.gpu else 1000 * (last - first)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Every call of a network while a sampler runs."""
        plain = replay.Replay.hidden

        def timed(network: replay.Replay, nodes: Tensor, when: Tensor, *rest: Tensor | None) -> Tensor:
            start = self.now()
            answer = plain(network, nodes, when, *rest)
            self.calls.append((len(self.steps) - 1, len(nodes), start, self.now()))
            return answer

        replay.Replay.hidden = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            replay.Replay.hidden = plain  # type: ignore[method-assign]
            if self.gpu:
                torch.cuda.synchronize(self.device)


def dense(model: Any, objective: Any, shape: tuple[int, int], times: list[float], draws: Draws, clock: Clock) -> None:
    dense_gidd.padded.cache_clear()
    plain, draw.LIMIT = draw.LIMIT, dense_gidd.ROWS * objective.tree.size
    try:
        generate_flat(model, dense_gidd.Everywhere(objective.process), objective.tree, shape, steps=len(times) - 1, times=times,
                      draws=draws, dtype="bfloat16", progress=clock.tick)
    finally:
        draw.LIMIT = plain
        dense_gidd.padded.cache_clear()


@torch.no_grad()
def shipped(model: Any, objective: Any, shape: tuple[int, int], times: list[float], draws: Draws, clock: Clock) -> None:
    """Each step makes x_theta, q_s, q_t, the kernel's row and their product over all tokens and MASK at every position."""
    process, device = objective.process, objective.tree.ancestor.device
    state = torch.full((shape[0] * shape[1], 1), process.size, device=device)
    network = replay.Replay(model, shape[0])
    with autocast(device, "bfloat16"):
        for t, s in itertools.pairwise(times):
            hidden = network.hidden(state.view(shape), torch.full((shape[0],), t, device=device), None)
            logits = model.head.logits(hidden.flatten(0, 1), state[:, 0])
            state = _bayes(process, F.pad(logits.float().softmax(-1), (0, 1)), state, t, s)
            clock.tick()


def _bayes(process: Hybrid, p: Tensor, state: Tensor, t: float, s: float) -> Tensor:
    kernel, at_s, at_t = (tuple(map(float, mix)) for mix in (
        process.between(*torch.tensor([s, t], dtype=torch.float64)), *map(process.at, torch.tensor([s, t], dtype=torch.float64))))

    def noise(mix: tuple[float, ...]) -> Tensor:
        return torch.cat([p.new_full((process.size,), mix[2]), p.new_full((1,), mix[1])])

    q_s, q_t = p * at_s[0] + noise(at_s), p * at_t[0] + noise(at_t)
    row = torch.zeros_like(p).scatter_(1, state, kernel[0]) + noise(kernel)[state[:, 0]][:, None]
    cumulative = (row * q_s / q_t.gather(1, state)).cumsum(-1)
    cumulative[:, -1] = 1 + 1e-4
    return torch.searchsorted(cumulative, torch.rand(len(state), 1, device=state.device))


def sampler(model: Any, objective: Any, shape: tuple[int, int], times: list[float], draws: Draws, clock: Clock) -> None:
    objective.sample(model, shape, steps=len(times) - 1, times=times, draws=draws, dtype="bfloat16", progress=clock.tick)


def left_to_right(model: Any, objective: Any, shape: tuple[int, int], times: list[float], draws: Draws, clock: Clock) -> None:
    objective.sample(model, shape, steps=1, draws=draws, dtype="bfloat16", progress=clock.tick)


RUNNERS: dict[str, Callable[..., None]] = {"gidd-dense": dense, "gidd-shipped": shipped, "ar": left_to_right}


def grid(steps: int, some: int | None) -> tuple[list[float], list[int]]:
    """Times from 1 to 0, and which of their steps count: all, or `some` steps of 1 / steps spread evenly."""
    if some is None or 2 * some >= steps:
        return [1 - i / steps for i in range(steps)] + [0.0], list(range(steps))
    begins = [(2 * j + 1) * steps // (2 * some) for j in range(some)]
    points = sorted({0, steps, *begins, *(i + 1 for i in begins)})
    counted = [number for number, point in enumerate(points[:-1]) if point in begins]
    return [1 - i / steps if i < steps else 0.0 for i in points], counted


def run(name: str, model: Any, objective: Any, batch: int, steps: int, some: int | None,
        options: argparse.Namespace) -> dict[str, Any]:
    """One way down of a batch."""
    device, causal = objective.tree.ancestor.device, objective.causal
    times, counted = grid(steps, some)
    draws = Draws(1, 0, "benchmark", torch.arange(batch))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before, clock = time.perf_counter(), Clock(device)
    with clock.listening():
        RUNNERS.get(name, sampler)(model, objective, (batch, options.length), times, draws, clock)
        end = clock.now()
    wall = time.perf_counter() - before
    if len(counted) == steps:  # everything, whether or not the sequences go in step
        inside, whole = clock.calls, clock.milliseconds(clock.steps[0], end)
    else:
        spans = [clock.milliseconds(a, b) for a, b in itertools.pairwise(clock.steps)]
        inside, whole = [call for call in clock.calls if call[0] in set(counted)], sum(spans[number] for number in counted)
    network, count = sum(clock.milliseconds(*call[2:]) for call in inside), options.length if causal else len(counted)
    every = 1.0 if causal else steps / count
    seconds = every * whole / 1000
    return {"steps": count if causal else steps, "timed_steps": count, "seconds": seconds, "wall_seconds": wall,
            "tokens_per_second": batch * options.length / seconds, "milliseconds_per_step": whole / count,
            "network": None if causal else network / count, "rest": None if causal else (whole - network) / count,
            "evaluations": float(count) if causal else every * sum(call[1] for call in inside) / batch,
            "calls": None if causal else round(every * len(inside)),
            "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None}


@torch.no_grad()
def warm(model: Any, batch: int, length: int, device: torch.device) -> None:
    """The network is asked once about every shape that may occur."""
    widths = [None, *(plan.FEW << power for power in range(length.bit_length()) if plan.FEW << power + 1 <= length)]
    network = replay.Replay(model, batch)
    with autocast(device, "bfloat16"), recordings(False):
        for rows in sorted({replay.round_up(count, batch) for count in range(1, batch + 1)}):
            nodes, time = torch.zeros(rows, length, dtype=torch.int64, device=device), torch.zeros(rows, device=device)
            for width in widths:
                columns = None if width is None else nodes[:, :width]
                network.hidden(nodes, time.double(), nodes[:, 0], columns)


def measure(name: str, model: Any, objective: Any, batch: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """A short run to warm up, then the run that counts."""
    if objective.causal:
        short = argparse.Namespace(**{**vars(options), "length": min(WARM, options.length)})
        run(name, model, objective, batch, steps, None, short)
        return run(name, model, objective, batch, steps, None, options)
    some = options.some if name in SLOW else None
    run(name, model, objective, batch, WARM, None, options)
    return run(name, model, objective, batch, steps, some, options)


def line(name: str, batch: int, result: dict[str, Any]) -> str:
    split = "" if result["network"] is None else f" = network {result['network']:.2f} + rest {result['rest']:.2f}"
    memory = "" if result["peak_gib"] is None else f"  {result['peak_gib']:.1f} GiB"
    return (f"{name:14s} {batch:3d} x {result['steps']:4d} steps  {result['seconds']:8.2f} s  {result['tokens_per_second']:9.0f} "
            f"tokens/s  {result['milliseconds_per_step']:8.2f} ms a step{split}  {result['evaluations']:6.1f} evaluations"
            f" in {result['calls'] or result['steps']} calls  ({result['timed_steps']} timed){memory}")


def ratios(cases: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """How many times as long as the tied tree each case takes for the large batch in the most steps."""
    seconds = {name: case["runs"][0]["seconds"] for name, case in cases.items() if case.get("runs")}
    ours = seconds.get(options.cases[0])
    return {} if ours is None else {name: value / ours for name, value in seconds.items()}


def runs_of(name: str, options: argparse.Namespace) -> list[tuple[int, int, bool]]:
    """(batch, steps, with recordings) of a case."""
    many = [(options.batch, steps, True) for steps in options.steps]
    if name in SLOW:
        return many[:1]
    if name == "ar":
        return [many[0], (1, options.steps[0], True)]
    one = [(1, options.steps[0], True), (1, options.steps[0], False)]
    return [*many, *(one if name in ("tied", "gidd") else one[:1])]


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--steps", type=int, nargs="+", default=[512, 128, 32])
    options.add_argument("--vocabulary", type=int, default=50_258)
    options.add_argument("--branching", type=int, default=512)
    options.add_argument("--some", type=int, default=32, help="steps that are timed of the slow ways of GIDD")
    options.add_argument("--budget", type=float, default=110.0, help="seconds after which no further measurement begins")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="two narrow blocks, short texts: try the script")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sampling.json")
    chosen = options.parse_args()
    if chosen.tiny:
        chosen.batch, chosen.length, chosen.steps = 8, 32, [32, 8]
        chosen.vocabulary, chosen.branching = min(chosen.vocabulary, 5000), min(chosen.branching, 100)
    device, began = torch.device(chosen.device), time.perf_counter()
    if device.type == "cpu":
        torch.set_num_threads(1)  # a trial: steady numbers beside other work
    results: dict[str, Any] = {
        "provenance": provenance(device, command="python -m benchmarks.sampling"), "cases": {}, "ratios": {},
        **{key: getattr(chosen, key) for key in ("batch", "length", "vocabulary", "branching", "some", "tiny")}}
    trees = {False: complete_tree(chosen.vocabulary, chosen.branching), True: Tree.star(chosen.vocabulary)}
    before: tuple[Any, Any, Any] = (None, None, None)
    for name in chosen.cases:
        what, method, backbone = CASES[name]
        case = results["cases"][name] = {"what": what, "runs": []}
        try:
            if before[0] != (method, backbone):
                before = ((method, backbone), *build(method, backbone, trees[method.flat], device, chosen))
                for batch in () if method.causal else (chosen.batch, 1):
                    warm(before[1], batch, chosen.length, device)
            for batch, steps, recorded in runs_of(name, chosen):
                if time.perf_counter() - began > chosen.budget:
                    case["cut"] = "the time that was given is over"
                    break
                with tf32(device), recordings(recorded):
                    result = measure(name, *before[1:], batch, steps, chosen)
                case["runs"].append({"batch": batch, "recorded": recorded and batch * chosen.length <= replay.TOKENS, **result})
                print(line(name, batch, result) + ("" if recorded else "  without recordings"), flush=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            case["failed"] = str(error).splitlines()[0]
            print(f"{name:14s} {case['failed']}", flush=True)
        results["ratios"], results["seconds"] = ratios(results["cases"], chosen), time.perf_counter() - began
        write_json(chosen.out, results)
    print(f"seconds of {chosen.batch} x {chosen.length} tokens in {chosen.steps[0]} steps, {chosen.cases[0]} = 1:  "
          + "  ".join(f"{name} {value:.2f}" for name, value in results["ratios"].items()))


@contextmanager
def recordings(wanted: bool) -> Iterator[None]:
    plain = replay.TOKENS
    replay.TOKENS = plain if wanted else 0
    try:
        yield
    finally:
        replay.TOKENS = plain


def build(method: Any, backbone: Any, tree: Tree, device: torch.device, options: argparse.Namespace) -> tuple[Any, Any]:
    """A network with random weights, and the objective."""
    if options.tiny:
        backbone = replace(backbone, blocks=2, width=64, heads=2)
    base = recipe("small")
    config = replace(base, method=method, backbone=backbone, data=replace(base.data, length=options.length),
                     train=replace(base.train, stream="bfloat16"))
    made = assemble(config, tree, pad_id=None, device=device)
    made.model.eval()
    if not method.causal:  # its calls change their length with every token: a compiler would begin anew each time
        compile_backbone(made.model, device, None if device.type == "cuda" else False)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return made.model, made.objective


if __name__ == "__main__":
    main()
