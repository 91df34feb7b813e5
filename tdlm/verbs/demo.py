"""`tdlm demo`: the whole method once, on three novels, in minutes on a laptop; ends with a page to look at."""
from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..data.prepare import prepare
from ..data.store import TokenStore
from ..errors import ConfigError
from ..recipes import DEMO
from ..report import write_report
from ..train import folder
from ..train.loop import train
from ..train.pace import measured
from ..train.run import open_run
from .evaluate import evaluate_run
from .sample import GAP, Request, sample_run
from .tree import build_from, write_picture

VOCABULARY = 2048
BRANCHING = 64
LONG = 8.0
"""From so many minutes on: larger batches and a lower rate, which end lower but begin slower."""
PROMPT = "The old man looked at the sea and said"
INFILL = f"Mary opened the door of the{GAP} and saw a{GAP} standing in the garden."


def demo(out: Path, *, minutes: float, say: Callable[[str], None],
         show: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything in one folder; run again, it continues where it was and shows the same. `show` gets the results."""
    if not 0 < minutes <= 24 * 60:
        raise ConfigError(f"--minutes must lie between 0 and 1440, got {minutes}")
    if out.is_dir() and any(out.iterdir()) and not ((out / "data").exists() or (out / "data.partial").exists()):
        raise ConfigError(f"{out} holds something else than a demo; choose a new folder with --out")
    started = time.monotonic()
    data, tree_file = out / "data", out / "tree.safetensors"
    say("1/6 prepare: three novels -> tokens")
    assets = resources.files("tdlm") / "assets"
    with (resources.as_file(assets / "novels.train.jsonl.xz") as text,
          resources.as_file(assets / "novels.valid.jsonl.xz") as held):
        manifest = prepare([text], data, tokenizer=f"bpe:{VOCABULARY}", valid_inputs=[held])
    say(f"    {manifest['tokens']:,} tokens of a vocabulary of {manifest['vocabulary']:,}")
    say("2/6 tree: how the novels use their tokens decides who is whose sibling")
    if not tree_file.exists():
        tree, _ = build_from(data=data, branching=BRANCHING, say=lambda line: None)
        tree.save(tree_file)
    with measured(DEMO, data, tree_file).kept() as seconds:
        config = _config(out, minutes, seconds)
        say(f"3/6 train: {config.train.steps:,} steps of {config.train.batch} x {config.data.length} tokens, "
            f"about {minutes:g} minutes")
        train(config, data=data, tree=tree_file, out=out / "run", device="cpu",
              command=shlex.join(["tdlm", "demo", "--minutes", f"{minutes:g}", "--out", str(out)]))
        run = open_run(out / "run")
        write_picture(out / "run" / "tree.svg", run.tree, TokenStore(data))
        say("4/6 evaluate: the bound beside n-gram models on the same tokens")
        bound = evaluate_run(run, data=data, split="valid", estimator="auto", pad=None, repeats=8, limit=None, batch=32,
                             seed=0, say=lambda line: None)
        say("5/6 sample, continue a prompt, fill gaps")
        free = sample_run(run, Request(count=4, steps=128, trace=True, temperature=0.8), say=lambda line: None)
        more = sample_run(run, Request(count=2, prompt=PROMPT, steps=128, trace=True, temperature=0.8), say=lambda line: None)
        filled = sample_run(run, Request(count=3, infill=INFILL, gap=4, steps=64, trace=True, temperature=0.8),
                            say=lambda line: None)
        page = write_report([out / "run"], out / "report.html")
    say("6/6 report")
    _show(bound, free, more, filled, show)
    show(f"\n{page} holds the curves, the tree, the samples and the film of a text that appears from coarse to fine."
         f"\n({time.monotonic() - started:.0f} seconds)")
    return {"bound": bound["bound"], "error": bound["error"], "ngrams": bound["ngrams"], "report": str(page),
            "steps": config.train.steps, "seconds": time.monotonic() - started}


def _config(out: Path, minutes: float, seconds: float) -> RunConfig:
    """The run that is already there, or one whose number of steps fits the time on this machine, where a step takes so
    many seconds (the schedule needs the number in advance)."""
    name = f"demo-{minutes:g}min"
    if (old := folder.read(out / "run")) is not None:
        config = RunConfig.from_json(old["config"])
        if config.name != name:
            raise ConfigError(f"{out} holds a demo of {config.name.removeprefix('demo-')}; choose another folder: "
                              f"tdlm demo --minutes {minutes:g} --out {out}-{minutes:g}")
        return config
    settings = DEMO.train if minutes < LONG else replace(DEMO.train, batch=64, lr=2e-3)
    steps = max(40, round(60 * minutes / (seconds * settings.batch / DEMO.train.batch)))
    steps = steps if steps < 100 else round(steps, -1)
    settings = replace(settings, steps=steps, warmup=min(steps // 12, 200), valid_every=max(10, steps // 10),
                       save_every=max(10, steps // 5))
    return replace(DEMO, name=name, train=settings)


def _show(bound: dict[str, Any], free: dict[str, Any], more: dict[str, Any], filled: dict[str, Any],
          show: Callable[[str], None]) -> None:
    ngrams = bound["ngrams"]
    show(f"\nvalidation bound {bound['bound']:.3f} nats/token (error {bound['error']:.3f}), "
         f"perplexity <= {bound['perplexity']:.1f}")
    for name, value in ngrams.items():
        show(f"  {name:8s} {value:.3f} nats/token: the model is {abs(value - bound['bound']):.3f} "
             f"{'better' if bound['bound'] < value else 'worse'}")
    show(f"\na sample:\n{free['samples'][0]['text'][:400]}\n\na continued prompt:\n{more['samples'][0]['text'][:300]}\n")
    show("filled gaps:")
    for sample in filled["samples"]:
        end = max(stop for start, stop, kind in sample["spans"] if kind == "given")
        pieces = [(sample["text"][a:b], kind) for a, b, kind in sample["spans"] if b <= end]
        show("  " + "".join(f"[{text}]" if kind == "made" else text for text, kind in pieces).replace("\n", " "))
