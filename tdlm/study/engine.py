"""Making the runs of a study, one after another: the tree, the learning rate, the number of steps, training, evaluation.

What is there is not made again: a tree is built once for all runs that ask for the same options, a finished run is not trained
again and an evaluated one not evaluated again. What a run reached stands in its folder, so a finished run needs no weights: a
trial's are thrown away at once, and a study that was carried to another machine without any goes on there. A run that fails is
reported and stops no other; one that does not fit into the time that is left is not begun.
"""
from __future__ import annotations

import contextlib
import gc
import json
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data.batches import eval_rows
from ..data.store import TokenStore
from ..errors import RunError
from ..files import bytes_hash, write_json, write_text
from ..train import checkpoint
from ..train import folder as run_folder
from ..train.loop import tf32, train
from ..train.metrics import Progress, read_metrics
from ..train.pace import Pace, in_minutes, measured
from ..train.provenance import device_name
from ..train.run import Run, open_run
from ..verbs.evaluate import evaluate_run
from ..verbs.tree import build_from
from .entry import Entry, Size, TreeOptions

ROWS: dict[Size, int | None] = {"toy": None, "budget": 4096, "full": None}
"""Validation rows that the final evaluation scores."""
REPEATS, SAMPLED = 4, {"toy": 4, "budget": 16, "full": 4}
"""How often it scores them; more where times are drawn, which scatters several times as much as `count` does."""
BEYOND = 20.0
"""Seconds that a run of so many minutes takes beside its training, until one has shown how many it really takes."""
RUNS, TREES, PACES, FAILED = "runs", "trees", "paces", "failed"
Say = Callable[[str], None]


@dataclass
class Engine:
    """The place and the means; `failed` and `scores` fill as runs are attempted."""

    size: Size
    out: Path
    data: Path | None
    entries: list[Entry]
    """All of the study, also those that are not attempted now."""
    device: str
    say: Say
    command: str | None
    progress: Callable[[], Progress] | None
    until: float | None = None
    """When to be done, on time.monotonic's clock."""
    beyond: float = 0.0
    """The most seconds that a run of this command has taken beside its training."""
    failed: dict[str, str] = field(default_factory=dict)
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)

    def attempt(self, entry: Entry, count: str, trees_only: bool) -> None:
        """One run; whatever goes wrong with it is told, kept, and stops no other."""
        try:
            started = time.monotonic()
            if trees_only:
                if entry.tree is not None:
                    self.tree(entry.tree)
            elif not self.done_before(entry):
                self.run(entry, None if entry.tree is None else self.tree(entry.tree), count)
                self.beyond = max(self.beyond, time.monotonic() - started - 60 * (entry.minutes or 0.0))
            self.succeed(entry.name)
        except Exception as error:
            self.fail(entry.name, error)
        finally:
            _clear(self.device)

    def has_time(self, entry: Entry) -> bool:
        """Whether a run can be done in what is left of the time: its minutes, and what others took beside theirs."""
        if self.until is None or self.reached(entry) is not None:
            return True
        beyond = self.beyond or (0.0 if entry.minutes is None else BEYOND)
        return time.monotonic() + 60 * (entry.minutes or 0.0) + beyond < self.until

    def fail(self, name: str, error: Exception) -> None:
        """Called while the error is being handled."""
        note = self.out / FAILED / f"{name}.txt"
        self.failed[name] = f"{type(error).__name__}: {error}"
        write_text(note, traceback.format_exc())
        self.say(f"    {name} failed: {error}\n    the others go on; details: {note}")

    def succeed(self, name: str) -> None:
        (self.out / FAILED / f"{name}.txt").unlink(missing_ok=True)

    def run(self, entry: Entry, tree: Path | None, count: str) -> None:
        assert self.data is not None
        where = self.folder(entry)
        with self.settled(entry, tree) as config:
            time = "" if entry.minutes is None else f", {entry.minutes:g} minutes"
            self.say(f"{count}{entry.name}: {config.train.steps:,} steps of {config.method.kind}{time}")
            train(config, data=self.data, tree=tree, out=where, device=self.device, command=self.command,
                  progress=None if self.progress is None else self.progress())
            if entry.trial_of is not None:
                shutil.rmtree(where / checkpoint.FOLDER, ignore_errors=True)
                return
            self.scores[entry.name] = score = self.evaluated(where)
        bound = "no finite bound" if score["bound"] is None else f"{score['bound']:.3f} nats/token"
        self.say(f"    {bound} (unigram {score['ngrams']['unigram']:.3f})")

    def done_before(self, entry: Entry) -> bool:
        """Whether the run is complete, as the one that is asked for now: of other settings or other data it is refused."""
        score = self.reached(entry)
        if score is None:
            return False
        assert self.data is not None
        old = run_folder.read(where := self.folder(entry))
        with self.settled(entry, None) as config:
            run_folder.compare(where, old or {}, config.to_json(), {"data_fingerprint": TokenStore(self.data).fingerprint})
        if entry.trial_of is None:
            self.scores[entry.name] = score
        return True

    def reached(self, entry: Entry) -> dict[str, Any] | None:
        """What a complete run scored (a trial: its validation bound); None where something is left to do."""
        old = run_folder.read(where := self.folder(entry))
        if old is None:
            return None
        if entry.trial_of is not None:
            bound = last_bound(where)
            return None if bound is None else {"bound": bound}
        kept = where / "eval.json"
        score = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
        return score if score.get("step") == old["config"]["train"]["steps"] else None

    @contextlib.contextmanager
    def settled(self, entry: Entry, tree: Path | None) -> Iterator[RunConfig]:
        """The run's configuration with what only shows on the way: its learning rate from the trials, and the steps that fill
        its minutes here. A run that was begun keeps both."""
        assert self.data is not None
        settings, name = entry.config.train, entry.config.name
        old = run_folder.read(self.folder(entry))
        begun = None if old is None else RunConfig.from_json(old["config"]).train
        if entry.rates or entry.rate_of:
            settings = replace(settings, lr=self.best_rate(entry) if begun is None else begun.lr)
        if entry.minutes is None:
            yield replace(entry.config, train=settings)
            return
        name = f"{name}-{entry.minutes:g}min"
        if begun is not None:
            yield replace(entry.config, name=name, train=in_minutes(settings, begun.steps / 60, 1.0))
            return
        with self.pace(entry, tree).kept() as seconds:
            yield replace(entry.config, name=name, train=in_minutes(settings, entry.minutes, seconds))

    def pace(self, entry: Entry, tree: Path | None) -> Pace:
        """How long a step takes here, measured once for all runs that differ in their learning rate and length alone."""
        assert self.data is not None
        same = replace(entry.config.train, steps=1, warmup=0, lr=1.0, valid_every=1, save_every=1)
        config = replace(entry.config, name="", train=same).to_json()
        what = [config, None if tree is None else tree.name, device_name(self.device)]
        path = self.out / PACES / f"{bytes_hash(json.dumps(what, sort_keys=True).encode())[:16]}.json"
        if path.is_file():
            return Pace(**json.loads(path.read_text(encoding="utf-8"))["pace"])
        self.say(f"{entry.name}: a few steps to see how long one takes")
        pace = measured(entry.config, self.data, tree, self.device)
        write_json(path, {"pace": asdict(pace), "of": what})
        return pace

    def best_rate(self, entry: Entry) -> float:
        """The rate whose trial has the lowest bound at its end."""
        trials = [trial for trial in self.entries if trial.trial_of == (entry.rate_of or entry.name)]
        bounds = [last_bound(self.folder(trial)) for trial in trials]
        if missing := [trial.name for trial, bound in zip(trials, bounds) if bound is None]:
            raise RunError(f"{entry.name} takes its learning rate from runs that are not finished; make them first: "
                           + " ".join(f"--only {name}" for name in missing))
        return min(zip(bounds, (trial.config.train.lr for trial in trials)))[1]

    def folder(self, entry: Entry) -> Path:
        return self.out / RUNS / entry.name

    def tree(self, options: TreeOptions) -> Path:
        """The tree with these options, built once."""
        path = self.out / TREES / f"{tree_name(options)}.safetensors"
        if not path.is_file():
            self.say(f"tree: {', '.join(f'{name} {value}' for name, value in options.items())}")
            path.parent.mkdir(parents=True, exist_ok=True)
            tree, _ = build_from(data=self.data, say=lambda line: None, **options)
            tree.save(path)
        return path

    def evaluated(self, where: Path) -> dict[str, Any]:
        """The run's eval.json, computed with the numbers that it was trained and validated with (bfloat16 at budget size)."""
        run, device = open_run(where, self.device), torch.device(self.device)
        sampled = next(iter(run.assembly.objective.estimators(run.assembly.model))) == "sampled"
        with tf32(device):
            return evaluate_run(run, data=self.data, split="valid", estimator="auto", pad=None,
                                repeats=SAMPLED[self.size] if sampled else REPEATS, limit=ROWS[self.size], batch=64, seed=0,
                                dtype=run.config.train.dtype, say=lambda line: None, counted=self.counted(run))

    def counted(self, run: Run) -> dict[str, Any] | None:
        """What n-gram models scored beside another run of this study on the same rows: counting takes longer than evaluating."""
        store, data = run.store(self.data), run.config.data
        rows = len(eval_rows(store, length=data.length, layout=data.layout, limit=ROWS[self.size]))
        same = {"split": "valid", "length": data.length, "layout": data.layout, "documents": rows}
        for entry in self.entries:
            found = None if entry.trial_of is not None else self.reached(entry)
            if found is not None and "ngrams" in found and same.items() <= found.items() \
                    and found["provenance"]["data_fingerprint"] == store.fingerprint:
                return {name: found[name] for name in ("ngrams", "ngram_tokens")}
        return None


def tree_name(options: TreeOptions) -> str:
    """A file name that tells the options; of vectors from elsewhere their name and a hash of where they came from."""
    def value(option: Any) -> str:
        text = str(option)
        plain = "".join(letter if letter.isalnum() or letter in ".+-" else "-" for letter in Path(text).name)
        return plain if plain == text else f"{plain}-{bytes_hash(text.encode())[:8]}"

    return "_".join(f"{name}-{value(option)}" for name, option in options.items())


def last_bound(where: Path) -> float | None:
    """The validation bound at the end of a finished run."""
    old = run_folder.read(where)
    if old is None:
        return None
    steps = RunConfig.from_json(old["config"]).train.steps
    lines = read_metrics(where / run_folder.METRICS)
    bounds = [line["bound"] for line in lines if line["kind"] == "valid" and line["step"] == steps]
    return bounds[-1] if bounds else None


def _clear(device: str) -> None:
    """What a run leaves on a GPU, and the compiler's count of how often it has seen the same code."""
    if device.startswith("cuda"):
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
