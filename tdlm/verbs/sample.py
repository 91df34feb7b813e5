"""`tdlm sample`: free samples, continuations of a prompt, and infilling of gaps; samples.json and trace.json for the report."""
from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..console import counter
from ..data.tokenizer import Tokenizer
from ..errors import SampleError
from ..files import write_json
from ..objectives.base import choose_sampler
from ..rng import Draws
from ..sample import Choice, Frame, Sampled
from ..train.provenance import provenance
from ..train.run import Run
from ..tree.tree import Tree

GAP = "___"
MAX_FRAMES = 120


@dataclass(frozen=True)
class Request:
    """What is asked of the sampler; every field is printed with the samples."""

    count: int = 4
    prompt: str | None = None
    infill: str | None = None
    gap: int | None = None
    length: int | None = None
    steps: int | None = None
    per_level: tuple[int, ...] | None = None
    times: tuple[float, ...] | None = None
    sampler: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch: int = 16
    trace: bool = False

    @property
    def title(self) -> str:
        if self.infill is not None:
            return "Infilling"
        return "Continuing a prompt" if self.prompt else "Free samples"


def sample_run(run: Run, request: Request, *, say: Callable[[str], None], keep: bool = True) -> dict[str, Any]:
    """Draw what was asked; `keep` adds the result to the run's samples.json (and trace.json)."""
    length, given, choice = checked(run, request)
    steps = sum(request.per_level) if request.per_level else request.steps or max(length, run.tree.height)
    started, drawn = time.perf_counter(), []
    with counter("sample") as progress:
        for first in range(0, request.count, request.batch):
            index = torch.arange(first, min(first + request.batch, request.count))
            fixed = given.expand(len(index), -1)
            draws = Draws(request.seed, 0, "sample", index.to(run.assembly.objective.tree.ancestor.device))
            drawn.append(run.assembly.objective.sample(
                run.assembly.model, (len(index), length), steps=steps, draws=draws, given=fixed, per_level=request.per_level,
                times=request.times, sampler=request.sampler, choice=choice,
                dtype=precision(run), trace=request.trace and first == 0, progress=progress))
    seconds = time.perf_counter() - started
    result = _result(run, request, drawn, given[0], steps, seconds)
    evaluations = result["evaluations"]
    say(f"{request.count} samples of {length} tokens in {drawn[0].steps} steps, {evaluations['mean']:.0f} network "
        f"evaluations each (most {evaluations['most']}){_together(evaluations)}, {seconds:.1f} s")
    if keep:
        _append(run, "samples.json", "groups", request.title, result)
        if request.trace:
            seen = run.assembly.objective.tree.to("cpu")  # of what is shown: a star where the tree only factors the softmax
            frames = trace_frames(drawn[0].frames, seen, run.tokenizer, given[0])
            _append(run, "trace.json", "traces", request.title, {"prompt": request.prompt or request.infill, "frames": frames})
    return result


def precision(run: Run) -> str:
    """What the network computes in: on a GPU as in training, on a processor, to which narrow numbers are no help, float32."""
    return run.config.train.dtype if run.assembly.objective.tree.ancestor.is_cuda else "float32"


def checked(run: Run, request: Request) -> tuple[int, Tensor, Choice]:
    """The length, the tokens that are fixed and how tokens are drawn; SampleError for what cannot be."""
    if request.count < 1 or request.batch < 1:
        raise SampleError(f"at least one sample is drawn at a time, got --count {request.count} --batch {request.batch}")
    length = run.config.data.length if request.length is None else request.length
    if length < 1 or (request.steps is not None and request.steps < 1):
        raise SampleError(f"at least one token and one step are needed, got --length {length} --steps {request.steps}")
    if sum(way is not None for way in (request.steps, request.per_level, request.times)) > 1:
        raise SampleError("--steps, --per-level and --times each say when the network is asked; give one of them")
    if request.gap is not None and request.infill is None:
        raise SampleError("--gap is the number of tokens in a gap; it needs --infill TEXT with ___ in it")
    choose_sampler(run.assembly.objective.samplers, request.sampler)
    return length, given_tokens(run, request, length), Choice(request.temperature, request.top_p, request.min_p)


def given_tokens(run: Run, request: Request, length: int) -> Tensor:
    """The tokens that are fixed (1, S), -1 where text is to be made."""
    tokenizer, start = run.tokenizer, []
    if run.config.data.layout == "document" and run.tokenizer.bos_id is not None:
        start = [run.tokenizer.bos_id]
    if request.infill is not None:
        if request.prompt is not None:
            raise SampleError("give either --prompt or --infill, not both")
        if GAP not in request.infill:
            raise SampleError(f"--infill needs at least one gap {GAP} in its text")
        texts = request.infill.split(GAP)
        texts[:-1] = [text.removesuffix(" ") for text in texts[:-1]]  # a token brings its own space: the gap's first does
        parts = [tokenizer.encode(text).tolist() for text in texts]
        room = length - len(start) - sum(map(len, parts))
        gaps = len(parts) - 1
        size = request.gap if request.gap is not None else min(room // gaps, 12)
        if request.gap is not None and request.gap < 1:
            raise SampleError(f"a gap has at least one token, got --gap {request.gap}")
        if size < 1 or gaps * size > room:
            raise SampleError(f"the given text has {sum(map(len, parts))} tokens; {gaps} gaps of {max(size, 1)} do not fit "
                              f"the length {length}: ask for a longer --length or a smaller --gap")
        fixed = [*start, *parts[0]]
        for part in parts[1:]:
            fixed += [-1] * size + part
    else:
        fixed = [*start, *(tokenizer.encode(request.prompt).tolist() if request.prompt else [])]
    if len(fixed) > length:
        raise SampleError(f"the prompt has {len(fixed)} tokens, more than the length {length}; shorten it or ask for a "
                          "longer --length")
    return torch.tensor([fixed + [-1] * (length - len(fixed))])


def _result(run: Run, request: Request, drawn: list[Sampled], given: Tensor, steps: int, seconds: float) -> dict[str, Any]:
    tokens = torch.cat([part.tokens for part in drawn]).cpu()
    evaluations = torch.cat([part.evaluations for part in drawn])
    settings = {**asdict(request), "steps": steps, "length": tokens.shape[1], "step_of_weights": run.step,
                "dtype": f"network {precision(run)}, draws float64"}
    together = [part.together for part in drawn if part.together is not None]
    samples = []
    for row in tokens:
        ids = row.tolist()
        text = run.tokenizer.decode(ids)
        samples.append({"text": text, "tokens": ids, "spans": _spans(run.tokenizer, ids, (given >= 0).tolist(), text)})
    return {"title": request.title, "settings": settings, "samples": samples, "seconds": seconds,
            "evaluations": {"mean": float(evaluations.double().mean()), "most": int(evaluations.max()),
                            **({"together": int(torch.cat(together).max())} if together else {})},
            "provenance": provenance(run.assembly.objective.tree.ancestor.device, command=shlex.join(["tdlm", *sys.argv[1:]]),
                                     seed=request.seed)}


def _together(evaluations: dict[str, Any]) -> str:
    """For samplers that are exact when every evaluation serves one choice."""
    most = evaluations.get("together")
    return "" if most is None else f", at most {most} choices drawn from one" + (" (exact)" if most == 1 else "")


def _spans(tokenizer: Tokenizer, ids: list[int], given: list[bool], text: str) -> list[tuple[int, int, str]]:
    """Character ranges of the text that were given or made."""
    spans: list[tuple[int, int, str]] = []
    start = position = 0
    while position < len(ids):
        end = position
        while end < len(ids) and given[end] == given[position]:
            end += 1
        stop = min(len(tokenizer.decode(ids[:end])), len(text)) if end < len(ids) else len(text)
        if stop > start:
            spans.append((start, stop, "given" if given[position] else "made"))
        start, position = max(start, stop), end
    return spans


def trace_frames(frames: list[Frame], tree: Tree, tokenizer: Tokenizer, given: Tensor) -> list[dict[str, Any]]:
    """Frames for display: at most MAX_FRAMES, each with a short label per position."""
    keep = {round(i * (len(frames) - 1) / max(1, MAX_FRAMES - 1)) for i in range(MAX_FRAMES)}
    labels = node_labels(tree, tokenizer)
    shown, before = [], None
    for number, frame in enumerate(frames):
        if number not in keep:
            continue
        moved = [before is not None and a != b for a, b in zip(frame.heights, before.heights if before else frame.heights)]
        shown.append({"evaluations": frame.evaluations, "time": frame.time, "height": frame.heights, "moved": moved,
                      "pieces": [labels(node) for node in frame.nodes], "given": (given >= 0).tolist()})
        before = frame
    return shown


def node_labels(tree: Tree, tokenizer: Tokenizer) -> Callable[[int], str]:
    """Readable text for a node: a token's own text, or the first (most frequent) tokens below it."""
    known: dict[int, str] = {}

    def label(node: int) -> str:
        if node not in known:
            if node < tree.size:
                known[node] = tokenizer.piece(node)
            elif node == tree.root:
                known[node] = "…"
            else:
                height = int((tree.ancestor == node).any(1).nonzero()[0])
                below = (tree.ancestor[height] == node).nonzero()[:, 0].tolist()
                order = sorted(below, key=lambda x: tree.slot[:height, x].flip(0).tolist())
                words = [piece for token in order if (piece := tokenizer.piece(token).strip())][:4]
                known[node] = "·".join(words) or "…"
        return known[node]

    return label


def _append(run: Run, name: str, key: str, title: str, entry: dict[str, Any]) -> None:
    """Keep results beside one another: a group with the same title is replaced."""
    path = run.path / name
    try:
        groups = json.loads(path.read_text(encoding="utf-8")).get(key, []) if path.is_file() else []
    except ValueError:
        groups = []  # a damaged file of samples is not worth stopping for: it is written anew
    groups = [group for group in groups if group.get("title") != title]
    write_json(path, {key: [*groups, {"title": title, **entry}]})
