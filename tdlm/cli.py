"""The command line: parse, call one function a verb, print what came of it.

Mistakes of the user (TdlmError, unreadable or unwritable files) are one line on stderr and exit code 2, never a
traceback; Ctrl-C is 130. `--json` prints one machine-readable result on stdout; everything else goes to stderr.
Heavy imports happen inside the verbs, so that `tdlm --help` answers at once.
"""
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import (
    FlagCreatePairsOff,
    OmitArgPrefixes,
    OmitSubcommandPrefixes,
    Positional,
    UseAppendAction,
    arg,
    subcommand,
)

from .errors import ConfigError, TdlmError

Flag = Annotated[bool, FlagCreatePairsOff]
Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Text = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")]
Whole = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Several = Annotated[tuple[str, ...], UseAppendAction, arg(help_behavior_hint="")]
Plugins = Annotated[tuple[str, ...], UseAppendAction, arg(metavar="MODULE", help_behavior_hint="")]


@dataclass
class Prepare:
    """Turn text into token shards: .txt, .jsonl, .parquet (also .gz .bz2 .xz .zst), folders, or hf:DATASET."""

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT")]
    """Files, folders or Hugging Face dataset ids (hf:NAME)."""
    out: Path
    """The prepared folder."""
    tokenizer: str = "bpe:4096"
    """A tokenizer.json, bytes, or bpe:SIZE to train one on this text."""
    valid: Text = None
    """The last documents as validation: a number, or a fraction such as 0.01 (default; OpenWebText: 100000)."""
    valid_input: Annotated[Several, arg(metavar="FILE")] = ()
    """Validation text in files of its own, instead of --valid."""
    text_field: str = "text"
    """Which field of a record holds the text."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: end with an error that says where, or replace it."""
    workers: Whole = None
    """Tokenizing threads (default: all cores)."""
    json: Flag = False
    """Print the manifest on stdout."""

    def run(self) -> dict[str, Any]:
        from .console import prepare_line
        from .data.prepare import prepare

        manifest = prepare(self.inputs, self.out, tokenizer=self.tokenizer, valid=_number(self.valid),
                           valid_inputs=self.valid_input, workers=self.workers, text_field=self.text_field, errors=self.errors,
                           progress=prepare_line())
        train, valid = manifest["splits"]["train"], manifest["splits"]["valid"]
        say(f"{self.out}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens of a vocabulary of "
            f"{manifest['vocabulary']:,}; {train[1] - train[0]:,} documents to train on, {valid[1] - valid[0]:,} to validate")
        return manifest


@dataclass
class TreeBuild:
    """Build a tree over a tokenizer's vocabulary: recursive balanced K-means on token vectors."""

    out: Path
    """The tree file (.safetensors)."""
    data: Folder = None
    """A prepared folder: gives the tokenizer and, unless --vectors says otherwise, the corpus statistics."""
    tokenizer: Text = None
    """A tokenizer.json, when there is no --data (needs --vectors or --method random)."""
    vectors: Text = None
    """Token vectors: corpus (default), an array (.npy .npz .safetensors), or a checkpoint folder or hf:MODEL."""
    tensor: Text = None
    """Which tensor of a checkpoint is the input embedding, when its name is not one of the usual ones."""
    branching: int = 512
    """K: the most children a node may have."""
    min_ratio: float = 0.8
    """The smallest child, as a share of the mean size."""
    max_ratio: float = 1.2
    """The largest child, as a share of the mean size."""
    height: Whole = None
    """Ask for exactly this height; sizes are then capped so that it is reached."""
    max_depth: int = 32
    """Give up (with an error) below this depth."""
    complete: bool = True
    """Pad short paths so that every leaf has the same depth."""
    method: Literal["kmeans", "random", "frequency", "hdlm"] = "kmeans"
    """kmeans, the controls random and frequency, or the hierarchical baseline's routine with its soft bounds."""
    metric: Literal["cosine", "euclidean"] = "cosine"
    """How vectors are compared."""
    seed: int = 0
    device: str = "cpu"
    json: Flag = False
    """Print the description on stdout."""

    def run(self) -> dict[str, Any]:
        from .verbs.tree import build_from

        tree, description = build_from(
            data=self.data, tokenizer=self.tokenizer, vectors=self.vectors, branching=self.branching,
            min_ratio=self.min_ratio, max_ratio=self.max_ratio, height=self.height, max_depth=self.max_depth,
            complete=self.complete, method=self.method, metric=self.metric, seed=self.seed, device=self.device,
            tensor=self.tensor, say=say)
        tree.save(self.out)
        say(f"{self.out}: height {tree.height}, {tree.size:,} tokens, {tree.nodes - tree.size:,} inner nodes; "
            f"look at it: tdlm tree show {self.out}")
        return description


@dataclass
class TreeShow:
    """Describe a tree: sizes, utilisation, entropy per level, example clusters, a picture."""

    tree: Annotated[Positional[Path], arg(metavar="TREE")]
    """A tree file, or a run folder."""
    data: Folder = None
    """A prepared folder: adds token frequencies and readable tokens."""
    svg: File = None
    """Write the picture here."""
    json: Flag = False
    """Print the description on stdout."""

    def run(self) -> dict[str, Any]:
        from .verbs.tree import show

        return show(self.tree, data=self.data, svg=self.svg, quiet=self.json)


@dataclass
class TreeVerb:
    """Build or look at a vocabulary tree."""

    what: Annotated[TreeBuild, subcommand(name="build")] | Annotated[TreeShow, subcommand(name="show")]

    @property
    def json(self) -> bool:
        return self.what.json

    def run(self) -> dict[str, Any]:
        return self.what.run()


@dataclass
class Train:
    """Train a recipe (demo, tiny, small, base), or continue the run in --out; with --dry-run only say what it costs."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """The name of a recipe."""
    data: Folder = None
    """A prepared folder."""
    tree: File = None
    """A tree file."""
    out: Folder = None
    """The run folder."""
    set: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FIELD=VALUE", help_behavior_hint="")] = ()
    """Change settings, for example: --set train.lr=3e-4 --set method.head=tied."""
    steps: Whole = None
    """Short for --set train.steps=N (the warm-up shrinks to a tenth if it would not fit)."""
    batch: Whole = None
    """Short for --set train.batch=N."""
    seed: Whole = None
    """Short for --set train.seed=N."""
    device: Text = None
    """cpu, cuda or cuda:N (default: a GPU if there is one)."""
    compile: Annotated[bool | None, arg(metavar="True|False", help_behavior_hint="")] = None
    """torch.compile the backbone (default: on a GPU)."""
    dry_run: Flag = False
    """Parameters, FLOPs, memory and time; needs neither data nor tree."""
    vocabulary: int = 50_258
    """With --dry-run and no --tree: tokens with PAD (default: GPT-2)."""
    branching: int = 512
    """With --dry-run and no --tree: K."""
    plugin: Plugins = ()
    """Python modules to import first: they register processes, heads or methods of their own."""
    json: Flag = False
    """Print the result on stdout."""

    def config(self) -> Any:
        from dataclasses import replace

        from .config import override
        from .recipes import recipe

        import_plugins(self.plugin)
        config = recipe(self.recipe)
        if self.steps is not None:
            if self.steps < 1:
                raise ConfigError(f"--steps must be at least 1, got {self.steps}")
            warmup = config.train.warmup if config.train.warmup <= self.steps // 2 else self.steps // 10
            config = replace(config, train=replace(config.train, steps=self.steps, warmup=warmup))
        shorts = [f"train.{name}={value}" for name, value in (("batch", self.batch), ("seed", self.seed)) if value is not None]
        for item in [*shorts, *self.set]:
            name, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"--set {item}: FIELD=VALUE is expected, for example --set train.lr=3e-4")
            config = override(config, name, value)
        return config

    def run(self) -> dict[str, Any]:
        config = self.config()
        if self.dry_run:
            from .console import show_plan
            from .train.plan import plan
            from .tree.tree import Tree

            result = plan(config, vocabulary=self.vocabulary, branching=self.branching,
                          tree=Tree.load(self.tree) if self.tree else None)
            if not self.json:
                show_plan(result)
            return result
        needed = ("data", "out") if config.method.flat else ("data", "tree", "out")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"training needs {' and '.join('--' + name for name in missing)} (only --dry-run does without)")
        from .train.loop import train

        assert self.data and self.out
        return train(config, data=self.data, tree=self.tree, out=self.out, device=self.device, compile=self.compile)


@dataclass
class Eval:
    """The bound of a run on held-out text: nats/token, perplexity, bits/byte, per level, with error bars."""

    path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder."""
    data: Folder = None
    """A prepared folder (default: the one it was trained on)."""
    split: str = "valid"
    estimator: Literal["auto", "sampled", "count", "exact"] = "auto"
    """sampled: the paper's; count: low variance (cascade, network not told the time); auto: count where it is valid."""
    pad: Literal["count", "given-length", "drop"] | None = None
    """How PAD counts (default: as in training; drop is no bound)."""
    repeats: int = 4
    """Independent estimates per row: more of them, smaller error."""
    rows: Whole = None
    """Only the first rows of the split."""
    batch: int = 32
    seed: int = 0
    device: str = "cpu"
    plugin: Plugins = ()
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from .train.run import open_run
        from .verbs.evaluate import evaluate_run

        import_plugins(self.plugin)
        run = open_run(self.path, self.device, warn=say)
        result = evaluate_run(run, data=self.data, split=self.split, estimator=self.estimator, pad=self.pad,
                              repeats=self.repeats, limit=self.rows, batch=self.batch, seed=self.seed, say=say)
        if not self.json:
            from .console import show_bound

            show_bound(result)
        return result


@dataclass
class Sample:
    """Draw text from a run; with --prompt or --infill around given text."""

    path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder."""
    count: int = 4
    """How many samples."""
    prompt: Text = None
    """Text that every sample begins with."""
    infill: Text = None
    """Text with a gap marked by ___ (three underscores), for example: "It was ___ night." """
    gap: Whole = None
    """Tokens per gap (default: what is left of the length, shared equally)."""
    length: Whole = None
    """Tokens per sample (default: as in training)."""
    steps: Whole = None
    """Steps in all, shared equally over the levels (default: the length)."""
    per_level: Annotated[tuple[int, ...] | None, arg(metavar="N", help_behavior_hint="")] = None
    """Steps by level, top level first, for example: --per-level 256 256."""
    times: Annotated[tuple[float, ...] | None, arg(metavar="T", help_behavior_hint="")] = None
    """Any grid of times from 1 to 0 instead of steps."""
    sampler: Text = None
    """How to draw: ancestral (default) or another sampler of the method (docs/sampling.md)."""
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch: int = 16
    """Samples drawn at once."""
    trace: Flag = False
    """Keep how the first sample came about, for the report."""
    device: str = "cpu"
    plugin: Plugins = ()
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from .train.run import open_run
        from .verbs.sample import Request, sample_run

        import_plugins(self.plugin)
        request = Request(count=self.count, prompt=self.prompt, infill=self.infill, gap=self.gap, length=self.length,
                          steps=self.steps, per_level=self.per_level, times=self.times, sampler=self.sampler,
                          temperature=self.temperature, top_p=self.top_p, min_p=self.min_p, seed=self.seed,
                          batch=self.batch, trace=self.trace)
        result = sample_run(open_run(self.path, self.device, warn=say), request, say=say)
        if not self.json:
            for number, sample in enumerate(result["samples"]):
                print(f"--- sample {number} (seed {self.seed})\n{sample['text']}")
        return result


@dataclass
class Report:
    """One self-contained page about one or several runs."""

    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """Run folders."""
    out: File = None
    """Where the page goes (default: report.html in the first run's folder)."""
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from .report import write_report

        if not self.paths:
            raise ConfigError("give at least one run folder: tdlm report RUN...")
        page = write_report(list(self.paths), self.out or self.paths[0] / "report.html")
        say(f"{page}: open it in a browser")
        return {"report": str(page)}


@dataclass
class Demo:
    """Everything once, on three novels that come with the package: prepare, tree, train, evaluate, sample, report."""

    minutes: float = 2.0
    """Training time; the rest takes about half a minute."""
    out: Path = field(default_factory=lambda: Path("runs/demo"))
    """The folder everything goes to."""
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from .verbs.demo import demo

        return demo(self.out, minutes=self.minutes, say=say)


Verb = (Annotated[Prepare, subcommand(name="prepare")] | Annotated[TreeVerb, subcommand(name="tree")]
        | Annotated[Train, subcommand(name="train")] | Annotated[Eval, subcommand(name="eval")]
        | Annotated[Sample, subcommand(name="sample")] | Annotated[Report, subcommand(name="report")]
        | Annotated[Demo, subcommand(name="demo")])
VERBS = ("prepare", "tree", "train", "eval", "sample", "report", "demo")


def say(line: str) -> None:
    """Everything that is not the result."""
    print(line, file=sys.stderr, flush=True)


def _number(text: str | None) -> float | int | None:
    if text is None:
        return None
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        raise ConfigError(f"--valid is a number of documents or a fraction such as 0.01, got {text!r}") from None


def import_plugins(names: Sequence[str]) -> None:
    """Import modules that register their own parts; the current folder counts as a place to find them."""
    import importlib

    for name in names:
        sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise
            raise ConfigError(f"--plugin {name}: no such module here or among the installed packages") from None
        finally:
            sys.path.pop(0)


def parse(arguments: Sequence[str]) -> Any:
    from .registry import suggest

    if arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
        raise ConfigError(f"no command {arguments[0]!r}{suggest(arguments[0], VERBS)}")
    if not arguments:
        arguments = ["--help"]
    if list(arguments) in (["--version"], ["-V"]):
        from . import __version__

        print(f"tdlm {__version__}")
        raise SystemExit(0)
    return tyro.cli(Verb, prog="tdlm", args=list(arguments), config=(OmitArgPrefixes, OmitSubcommandPrefixes),
                    description="Tree-structured diffusion language models: build a tree, train, bound, sample, compare.")


def main(arguments: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII locale shows ?, it does not end the run
    sys.exit(_guarded(sys.argv[1:] if arguments is None else arguments))


def _guarded(arguments: Sequence[str]) -> int:
    try:
        verb = parse(arguments)
        result = verb.run()
        if verb.json:
            import json

            print(json.dumps(result, ensure_ascii=False))
        sys.stdout.flush()
        return 0
    except TdlmError as error:
        say(f"tdlm: {error}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        return 141
    except KeyboardInterrupt:
        say("tdlm: stopped")
        return 130
    except OSError as error:
        say(f"tdlm: {error.filename or 'a file'}: {error.strerror or error}")
        return 2
    except MemoryError:
        say("tdlm: out of memory; a smaller batch (--batch, --set train.micro_batch=N) needs less")
        return 2
