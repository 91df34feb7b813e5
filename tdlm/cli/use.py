"""The verbs that use a run: numbers, samples, the page; and the demo."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg

from ..errors import ConfigError
from .words import File, Flag, Folder, Plugins, Several, Text, Whole, import_plugins, say, show_json, typed


@dataclass
class Eval:
    """The bound of a run on held-out text: nats/token, perplexity, bits/byte, per level, with error bars; under a named
    protocol, on other people's text (--on), or of any causal language model of the hub on the same rows (hf:MODEL)."""

    path: Annotated[Positional[str], arg(metavar="RUN")]
    """The run folder; or hf:MODEL (a name of the hub or a folder), gguf:FILE, hf:smollm2."""
    data: Folder = None
    """A prepared folder (default: the one it was trained on)."""
    split: str = "valid"
    protocol: str = "strict"
    """strict, gidd-512-nopack or mdlm-1024-pack: what the number is about (docs/evaluation.md)."""
    on: Annotated[Several, arg(metavar="NAME[=PATH]")] = ()
    """Named text instead of a split: wikitext-103, wikitext-2, lambada, ptb, lm1b, ag_news, arxiv, pubmed; from the hub
    or, with =PATH, from a file."""
    length: Whole = None
    """Tokens per row, instead of the protocol's (its name will say so)."""
    layout: Literal["document", "packed"] | None = None
    """Rows of one document, or of the stream, instead of the protocol's."""
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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights of a hub model."""
    out: File = None
    """Where the result of a hub model is written (a run keeps its own as eval.json)."""
    plugin: Plugins = ()
    json: Flag = False

    def run(self) -> dict[str, Any]:
        import_plugins(self.plugin)
        foreign = self.path.startswith(("hf:", "gguf:"))
        results = self._model() if foreign else self._run()
        if not self.json:
            from ..console import show_bound

            for result in results.values():
                show_bound(result)
        return {"sets": results} if self.on else next(iter(results.values()))

    def _run(self) -> dict[str, dict[str, Any]]:
        from ..train.run import open_run
        from ..verbs.evaluate import evaluate_run, evaluate_sets

        if self.out is not None or self.dtype != "float32":
            raise ConfigError("--out and --dtype are for hub models (hf:MODEL); a run keeps its results in its own eval.json")
        if self.on and self.data is not None:
            raise ConfigError("--on reads text of its own; give either --on or --data")
        run = open_run(Path(self.path), self.device, warn=say)
        if self.on:
            return evaluate_sets(run, self.on, estimator=self.estimator, pad=self.pad, repeats=self.repeats, limit=self.rows,
                                 batch=self.batch, seed=self.seed, protocol=self.protocol, length=self.length,
                                 layout=self.layout)
        return {self.split: evaluate_run(run, data=self.data, split=self.split, estimator=self.estimator, pad=self.pad,
                                         repeats=self.repeats, limit=self.rows, batch=self.batch, seed=self.seed, say=say,
                                         protocol=self.protocol, length=self.length, layout=self.layout)}

    def _model(self) -> dict[str, dict[str, Any]]:
        from ..files import write_json
        from ..verbs.evaluate import evaluate_model

        if self.estimator not in ("auto", "exact") or self.pad is not None:
            raise ConfigError("a causal language model has one exact number and pays nothing for PAD; leave out --estimator "
                              "and --pad")
        if self.repeats != Eval.repeats or self.seed != Eval.seed:
            raise ConfigError("the number of a causal language model is exact: nothing is drawn or repeated; leave out --repeats "
                              "and --seed")
        results = evaluate_model(self.path, data=self.data, split=self.split, limit=self.rows, batch=self.batch,
                                 device=self.device, sets=self.on, protocol=self.protocol, length=self.length,
                                 layout=self.layout, dtype=self.dtype)
        if self.out is not None:
            write_json(self.out, {"sets": results} if self.on else results[self.split])
        return results


@dataclass
class Quality:
    """Generative perplexity of samples by another language model, with entropy, distinct-n and human text beside it."""

    path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder."""
    judge: str = "gpt2-large"
    """A causal language model: a name of the hub, a folder, gguf:FILE, or smollm2 (needs no network)."""
    samples: File = None
    """Samples to judge: a samples.json, or .jsonl with a text a line."""
    count: Whole = None
    """Or draw so many now."""
    max_length: int = 512
    """Judge tokens per text at most."""
    mauve: Flag = False
    """MAUVE against the human text too (hundreds of samples; pip install 'tdlm[eval]')."""
    data: Folder = None
    """A prepared folder for the human text (default: the one it was trained on)."""
    length: Whole = None
    """Tokens per sample (default: as in training)."""
    steps: Whole = None
    """Steps of the sampler (default: the length)."""
    sampler: Text = None
    """How to draw (docs/sampling.md)."""
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    batch: int = 8
    """Texts drawn and judged at once."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the judge's weights."""
    plugin: Plugins = ()
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from ..train.run import open_run
        from ..verbs.quality import quality_run
        from ..verbs.sample import Request

        import_plugins(self.plugin)
        request = Request(length=self.length, steps=self.steps, sampler=self.sampler, temperature=self.temperature,
                          top_p=self.top_p, min_p=self.min_p, seed=self.seed)
        if self.count is None and request != Request():
            raise ConfigError("--length, --steps, --sampler, --temperature, --top-p, --min-p and --seed say how samples are "
                              "drawn; they need --count N")
        request = None if self.count is None else replace(request, count=self.count, batch=self.batch)
        result = quality_run(open_run(self.path, self.device, warn=say), judge=self.judge, samples=self.samples,
                             request=request, data=self.data, max_length=self.max_length, batch=self.batch,
                             device=self.device, dtype=self.dtype, mauve=self.mauve, say=say)
        if not self.json:
            from ..console import show_quality

            show_quality(result)
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
    """Tokens per gap (default: 12, or what is left of the length, shared equally)."""
    length: Whole = None
    """Tokens per sample (default: as in training)."""
    steps: Whole = None
    """Steps in all, shared equally over the levels (default: the length)."""
    per_level: Annotated[tuple[int, ...] | None, arg(metavar="N", help_behavior_hint="")] = None
    """Steps by level, top level first, for example: --per-level 256 256."""
    times: Annotated[tuple[float, ...] | None, arg(metavar="T", help_behavior_hint="")] = None
    """Any grid of times from 1 to 0 instead of steps."""
    sampler: Text = None
    """How to draw: a sampler of the method by name (docs/sampling.md, docs/rivals.md; default: the method's first)."""
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
        from ..train.run import open_run
        from ..verbs.sample import Request, sample_run

        import_plugins(self.plugin)
        request = Request(count=self.count, prompt=typed(self.prompt), infill=typed(self.infill), gap=self.gap,
                          length=self.length, steps=self.steps, per_level=self.per_level, times=self.times,
                          sampler=self.sampler, temperature=self.temperature, top_p=self.top_p, min_p=self.min_p,
                          seed=self.seed, batch=self.batch, trace=self.trace)
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
        from ..report import write_report

        if not self.paths:
            raise ConfigError("give at least one run folder: tdlm report RUN...")
        page = write_report(list(self.paths), self.out or self.paths[0] / "report.html")
        say(f"{page}: open it in a browser")
        return {"report": str(page)}


@dataclass
class Compare:
    """One table and one figure for many runs: compare.html, .md, .csv, .json and pictures; runs that were not measured
    alike get a table each. (`tdlm report compare` is the same.)"""

    paths: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN")]
    """Run folders."""
    out: Path
    """The folder for the comparison."""
    one_protocol: Flag = False
    """End with an error instead of a second table when the runs were not measured alike."""
    protocol: Text = None
    """Compare the numbers of this protocol (tdlm eval --protocol NAME)."""
    on: Text = None
    """Compare the numbers on this text set (tdlm eval --on NAME)."""
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from ..report import compare_runs

        result = compare_runs(list(self.paths), self.out, one_protocol=self.one_protocol, protocol=self.protocol, on=self.on)
        for difference in result["differences"]:
            say(difference)
        say(f"{result['files']['html']}: open it in a browser")
        return result


@dataclass
class Demo:
    """Everything once, on three novels that come with the package: prepare, tree, train, evaluate, sample, report."""

    minutes: float = 2.0
    """Training time; the rest takes about half a minute."""
    out: Path = field(default_factory=lambda: Path("runs/demo"))
    """The folder everything goes to."""
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from ..verbs.demo import demo

        return demo(self.out, minutes=self.minutes, say=say, show=say if self.json else print)


@dataclass
class StudyVerb:
    """Many runs by one command: train, evaluate and compare them; stopped, the same command goes on where it was."""

    name: Annotated[Positional[str | None], arg(metavar="NAME", help_behavior_hint="")] = None
    """Which study (docs/studies.md, or: tdlm study --list)."""
    out: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """The study's folder: data, trees, runs, tables, comparison."""
    list: Flag = False
    """Say what the studies are, what they need and how long they take at this size; with NAME, every run of one."""
    size: Literal["toy", "budget", "full"] = "toy"
    """toy: minutes on a CPU, on three novels; budget: one GPU, minutes a run; full: the paper's settings."""
    data: Folder = None
    """A prepared folder (toy: three novels that come with the package)."""
    only: Annotated[Several, arg(metavar="RUN")] = ()
    """Only these runs of the study, in this order (also patterns: 'mdlm*'); tables are made of all that are finished."""
    minutes: Annotated[float | None, arg(metavar="N", help_behavior_hint="")] = None
    """Training time of each run that is bounded by minutes; its number of steps is measured where it runs."""
    set: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FIELD=VALUE", help_behavior_hint="")] = ()
    """Change settings of every run, as in tdlm train; --set train.steps=N bounds every run by steps."""
    finished: Annotated[tuple[Path, ...], UseAppendAction, arg(metavar="RUN", help_behavior_hint="")] = ()
    """Study these finished runs instead of training any."""
    vectors: Annotated[Several, arg(metavar="FILE")] = ()
    """Study trees: token vectors for one more tree (a file, a model's folder, hf:OWNER/MODEL)."""
    judge: Text = None
    """Who reads generated text: as tdlm quality --judge, or the folder of a left-to-right run (default: gpt2-large)."""
    trees_only: Flag = False
    """Prepare data and trees, which needs no GPU, and train nothing."""
    within: Annotated[float | None, arg(metavar="N", help_behavior_hint="")] = None
    """Begin no run that would not be done in so many minutes from now (0: only make the tables of what is finished)."""
    pack: File = None
    """At the end, put all but the weights into this .tar.gz; tar -xzf FILE -C DIR brings it to another machine's folder."""
    device: Text = None
    """cpu, cuda or cuda:N (default: a GPU if there is one)."""
    json: Flag = False

    def run(self) -> dict[str, Any]:
        from ..study import STUDIES, Wishes, conduct, study
        from ..study.conductor import chosen_runs
        from ..study.pack import pack

        chosen = None if self.name is None else study(self.name)
        wishes = Wishes(self.minutes, self.set, self.vectors, self.judge)
        if self.list:
            return self._list([chosen] if chosen is not None else [*STUDIES.values()], wishes)
        if chosen is None or self.out is None:
            raise ConfigError("give a study and a folder for it: tdlm study NAME --out DIR; the studies are: "
                              f"{', '.join(STUDIES)} (tdlm study --list)")
        self._check([] if self.finished else chosen_runs(chosen.runs(self.size, wishes), self.only))
        try:
            result = conduct(chosen, self.out, size=self.size, data=self.data, only=self.only, device=self.device, say=say,
                             wishes=wishes, finished=self.finished, trees_only=self.trees_only, within=self.within)
        finally:
            if self.pack is not None and self.out.is_dir():  # also when it was stopped
                say(f"{self.pack}: {pack(self.out, self.pack) / 2**20:.1f} MiB, everything but the weights")
        if not self.json:
            self._show(result)
        if result["failed"]:
            if self.json:
                show_json(result)  # what did not fail is there all the same
            raise ConfigError(f"failed: {', '.join(result['failed'])}; the others are done, the same command tries these again "
                              f"(why: {self.out / 'failed'})")
        return result

    def _check(self, runs: Sequence[Any]) -> None:
        """What is asked in vain, or is not there, is told before hours of work."""
        from ..study import study
        from ..train import folder

        if self.out is not None and self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file; a study needs a folder: choose another --out")
        by_steps = [run.name for run in runs if run.minutes is None]
        if self.minutes is not None and len(by_steps) == len(runs):
            raise ConfigError(f"--minutes bounds no run of study {self.name} at size {self.size}: their steps do, which "
                              "--set train.steps=N changes; leave out --minutes")
        if self.minutes is not None and by_steps:
            say(f"bounded by steps, not by --minutes: {', '.join(by_steps)}")
        self._check_vectors(runs)
        if self.judge is not None and not study(self.name or "").judged:
            raise ConfigError(f"study {self.name} generates no text for a judge; leave out --judge")
        if self.judge is not None and not (Path(self.judge) / folder.METRICS).is_file():
            from ..evaluate.judge import check_judge

            check_judge(self.judge)

    def _check_vectors(self, runs: Sequence[Any]) -> None:
        """Vectors whose tree is built already may be gone by now."""
        from ..data.store import TokenStore
        from ..data.tokenizer import Tokenizer
        from ..study import study
        from ..study.engine import TREES, tree_name
        from ..verbs.tree import check_vectors

        assert self.name is not None and self.out is not None
        for run in runs if self.data is not None or self.size == "toy" else ():  # the others need data, which is said elsewhere
            wanted = (run.tree or {}).get("vectors")
            if wanted in self.vectors and not (self.out / TREES / f"{tree_name(run.tree)}.safetensors").is_file():
                check_vectors(wanted, Tokenizer.load(study(self.name).tokenizer) if self.data is None else
                              TokenStore(self.data).tokenizer)

    def _list(self, studies: Sequence[Any], wishes: Any) -> dict[str, Any]:
        from ..study.predict import described, predict

        found = {}
        for one in studies:
            found[one.name] = predict(one, self.size, wishes if len(studies) == 1 else replace(wishes, vectors=()))
            if not self.json:
                print("\n".join(described(found[one.name], every=self.name is not None)))
        return {"studies": found}

    def _show(self, result: dict[str, Any]) -> None:
        from ..console import show_study

        if result["scores"]:
            show_study(result)
        for what in ("table", "trees"):
            if what in result:
                say(f"{what}: {result[what] if what == 'table' else ', '.join(result[what])}")
