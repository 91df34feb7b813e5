"""The training run: open or continue the folder, do the steps, report, validate, save.

Everything a step needs is a function of (configuration, step): rows, crops, noise and learning rate. So a run that was
killed continues from its newest checkpoint, forgets the metrics lines after it, and writes the same numbers again.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..assemble import Assembly, assemble
from ..config import RunConfig
from ..data.batches import TrainRows, eval_rows, prefetch
from ..data.store import TokenStore
from ..device import choose_device
from ..errors import ConfigError, DataError, RunError
from ..evaluate.likelihood import evaluate_bound
from ..files import bytes_hash
from ..model.model import count_parameters
from ..tree.tree import Tree
from . import checkpoint, folder, metrics
from .optimizer import learning_rate
from .plan import train_flops
from .provenance import device_name, now, provenance, versions
from .step import Trainer, compile_backbone
from .warmstart import source_of, warm_start


def train(config: RunConfig, *, data: Path | str, tree: Path | str | None = None, out: Path | str, device: str | None = None,
          compile: bool | None = None, command: str | None = None, init: Path | str | None = None,
          progress: metrics.Progress | None = None) -> dict[str, Any]:
    """Train a run, or continue the one in `out`; returns a summary.

    A flat method (masked diffusion, autoregressive) takes no tree. `compile` None means: on a GPU yes, on a CPU no.
    `command` is what the user typed (kept as provenance and repeated when the run is interrupted). `init` is a run or a
    checkpoint whose weights the first step begins with (`warmstart.py`).
    """
    data, out = Path(data), Path(out)
    command = shlex.join(sys.argv) if command is None else command
    chosen = choose_device(device)
    progress = metrics.progress() if progress is None else progress
    store = TokenStore(data)
    loaded, tree_bytes = tree_of(config, tree, store)
    source, label = source_of(init, config, store.tokenizer, out, progress.note)
    identity = {"data_fingerprint": store.fingerprint, "tokenizer_hash": store.tokenizer.hash,
                "tree_hash": bytes_hash(tree_bytes), "init": label}
    rows = TrainRows(store, length=config.data.length, layout=config.data.layout, batch=config.train.batch,
                     seed=config.train.seed)
    with folder.hold(out), contextlib.closing(progress), tf32(chosen):
        old = folder.read(out)
        if old is not None:
            folder.compare(out, old, config.to_json(), identity)
        assembly = assemble(config, loaded, pad_id=store.tokenizer.pad_id, counts=torch.from_numpy(store.counts),
                            device=chosen)
        started = {}
        if source is not None and checkpoint.latest(out) is None:
            started["warm_start"] = warm_start(assembly.model, config, loaded, source)
        if old is None:
            folder.create(out, config.to_json(), provenance(
                chosen, command=command, data=os.path.relpath(data, out), **identity, **started,
                parameters=count_parameters(assembly.model)))
        folder.keep_copies(out, tree_bytes, identity["tree_hash"], store.tokenizer.save)
        compile_backbone(assembly.model, chosen, compile, config.train.memory, config.train.float8)
        sitting = Sitting(config, out, store, rows, assembly, chosen, progress, command)
        sitting.resume(old)
        if not sitting.complete:
            sitting.go()
        return sitting.summary()


def tree_of(config: RunConfig, tree: Path | str | None, store: TokenStore) -> tuple[Tree, bytes]:
    """The tree of a run and its file's content: a flat method has the star tree of the vocabulary."""
    if config.method.flat:
        if tree is not None:
            raise ConfigError(f"method {config.method.kind} is flat and takes no tree; leave out --tree")
        star = Tree.star(store.size, store.tokenizer.hash)
        return star, star.to_bytes()
    if tree is None:
        raise ConfigError(f"method {config.method.kind} needs a tree: --tree FILE (make one with: tdlm tree build)")
    return Tree.load(tree, tokenizer_hash=store.tokenizer.hash), Path(tree).read_bytes()


@contextlib.contextmanager
def tf32(device: torch.device) -> Iterator[None]:
    """TF32 for float32 products on a GPU, the caller's setting afterwards. A CPU keeps plain float32: asked for TF32 it
    emulates it, 2.5 times slower."""
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass
class Interrupt:
    """The first Ctrl-C or SIGTERM asks politely, the second one stops at once."""

    asked: bool = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[Interrupt]:
        if threading.current_thread() is not threading.main_thread():
            yield self  # only the main thread may install handlers
            return
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class Stopwatch:
    """Seconds of training: validation and saving stop it."""

    def __init__(self, before: float):
        self.before, self.since = before, time.perf_counter()

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.since

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.before = self.seconds()
        try:
            yield
        finally:
            self.since = time.perf_counter()


class Sitting:
    """One sitting of a run, with the folder's lock held."""

    def __init__(self, config: RunConfig, out: Path, store: TokenStore, rows: TrainRows, assembly: Assembly,
                 device: torch.device, progress: metrics.Progress, command: str):
        self.config, self.out, self.store, self.rows, self.assembly = config, out, store, rows, assembly
        self.trainer = Trainer(assembly.model, assembly.objective, config.train, device)
        self.progress, self.command = progress, command
        self.device, self.chip = device, device_name(device)
        self.watch = Stopwatch(0.0)
        self.saved = -1
        """The step of the newest checkpoint."""
        self.last: dict[str, dict[str, Any]] = {}
        """The newest record of each kind."""

    @property
    def complete(self) -> bool:
        return self.trainer.done >= self.config.train.steps

    def resume(self, old: dict[str, Any] | None) -> None:
        """Continue from the newest intact checkpoint; without one from the start."""
        path = self.out / folder.METRICS
        found = checkpoint.newest(self.out, self.progress.note)
        if found is not None:
            self.trainer.restore(found)
            self.watch, self.saved = Stopwatch(float(found.state["seconds"])), found.step
            for damaged in checkpoint.checkpoints(self.out, after=found.step):
                checkpoint.set_aside(damaged)
        checkpoint.clean(self.out)
        metrics.truncate(path, self.trainer.done)
        self.last = {record["kind"]: record for record in metrics.read_metrics(path)}
        if old is None:
            return
        if self.complete:
            self.progress.note(f"{self.out} is complete ({self.trainer.done} steps); "
                               "choose another --out to train again")
            return
        self.progress.note(f"continuing {self.out} at step {self.trainer.done}/{self.config.train.steps}")
        folder.note_continuation(self.out, old, self.config.to_json(), {
            "step": self.trainer.done, "started": now(), "command": self.command, "versions": versions(),
            "device": self.chip})

    def go(self) -> None:
        """All remaining steps."""
        settings, trainer = self.config.train, self.trainer
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        peak = metrics.peak_flops(self.chip)
        flops = train_flops(trainer.model, self.config, self.assembly.objective.tree.height)
        self.cost = flops["train"] / peak if peak else None
        self.held_out = self.valid_rows()
        self.file = metrics.MetricsFile(self.out / folder.METRICS)
        with (contextlib.closing(self.file), Interrupt().watching() as interrupt,
              prefetch(self.rows, range(trainer.done, settings.steps), micros=trainer.micros,
                       pin=self.device.type == "cuda", prepare=trainer.prepare) as batches):
            self.watch = Stopwatch(self.watch.before)
            self.logged = (trainer.done, self.watch.seconds())
            while not self.complete:
                with explained(settings.micro_batch or settings.batch):
                    trainer.update(itertools.islice(batches, trainer.micros))
                leaving = interrupt.asked  # a signal that comes while this step is saved waits for the next one
                self.after_step(leaving)
                if leaving and not self.complete:
                    self.progress.note(f"stopped at step {trainer.done}; everything is saved, "
                                       f"continue with: {self.command}")
                    raise KeyboardInterrupt

    def after_step(self, leaving: bool) -> None:
        """Log, validate and save when this step is due. What a checkpoint refers to is written before it."""
        settings, done = self.config.train, self.trainer.done

        def due(every: int) -> bool:
            return done % every == 0 or self.complete

        if due(settings.log_every) or done == 1:
            self.log()
        if due(settings.valid_every):
            with self.watch.paused():
                self.validate()
        if due(settings.save_every) or leaving:
            with self.watch.paused():
                self.save()

    def log(self) -> None:
        """One line of the loss curve: means over the steps since the last one."""
        settings, done, sums = self.config.train, self.trainer.done, self.trainer.read()
        seconds, positions = self.watch.seconds(), settings.batch * self.config.data.length
        steps, elapsed = done - self.logged[0], seconds - self.logged[1]
        self.logged = (done, seconds)
        rate = steps * positions / max(elapsed, 1e-9)
        self.record({
            "kind": "train", "step": done, "loss": sums.loss, "bound": metrics.number(sums.bound),
            "levels": [metrics.number(level) for level in sums.levels], "lr": learning_rate(done - 1, settings),
            "grad_norm": sums.grad_norm, "tokens": done * positions, "seconds": round(seconds, 3),
            "tokens_per_second": round(rate, 1), "memory": metrics.memory(self.device)})
        text = metrics.line(self.last["train"], settings.steps, remaining=(settings.steps - done) * positions / rate,
                            utilisation=None if self.cost is None else rate * self.cost)
        self.progress.update(text, done, settings.steps)

    def valid_rows(self) -> torch.Tensor | None:
        """The rows of every validation point; None, said once, where there are none."""
        data = self.config.data
        try:
            rows = eval_rows(self.store, length=data.length, layout=data.layout,
                             limit=self.config.train.valid_documents)
        except DataError as error:
            self.progress.note(f"no validation: {error}")
            return None
        return rows.batch(0, len(rows)).tokens

    def validate(self) -> None:
        """The bound of the validation split with the same rows and the same noise every time."""
        settings, rows = self.config.train, self.held_out
        if rows is None:
            return
        self.trainer.check()
        model, objective = self.assembly.model, self.assembly.objective
        averaged = self.trainer.average.applied() if self.trainer.average else contextlib.nullcontext()
        with averaged:
            bound = evaluate_bound(model, objective, rows, seed=settings.seed, dtype=settings.dtype,
                                   batch=settings.micro_batch or settings.batch)
        self.record({"kind": "valid", "step": self.trainer.done, "bound": metrics.number(bound.nats),
                     "error": metrics.number(bound.error), "levels": [metrics.number(level) for level in bound.levels],
                     "tokens": int(bound.tokens)})
        self.progress.note(f"step {self.trainer.done}  validation bound {bound.nats:.3f} +- {bound.error:.3f} "
                           f"nats/token ({metrics.levels_text(self.last['valid']['levels'])})")

    def record(self, record: dict[str, Any]) -> None:
        self.file.write(record)
        self.last[record["kind"]] = record

    def save(self) -> None:
        if self.trainer.done <= self.saved:
            return
        self.trainer.check()
        self.file.sync()
        checkpoint.save(self.out, self.trainer.done, self.trainer.tensors(), keep=self.config.train.keep,
                        state={**self.trainer.state(), "seconds": self.watch.before})
        self.saved = self.trainer.done

    def summary(self) -> dict[str, Any]:
        newest = checkpoint.latest(self.out)
        return {"run": str(self.out), "name": self.config.name, "steps": self.trainer.done,
                "tokens": self.trainer.done * self.config.train.batch * self.config.data.length,
                "train": self.last.get("train"), "valid": self.last.get("valid"),
                "seconds": round(self.watch.before, 3),
                "parameters": count_parameters(self.trainer.model), "device": self.chip,
                "checkpoint": None if newest is None else str(newest)}


@contextlib.contextmanager
def explained(micro: int) -> Iterator[None]:
    """A full GPU is the user's to mend."""
    try:
        yield
    except torch.OutOfMemoryError:
        hint = f"--set train.micro_batch={micro // 2}" if micro > 1 else "a smaller model or --set data.length"
        raise RunError(f"the device's memory is full with {micro} sequences at once; continue with {hint} "
                       "(the same results, in more passes)") from None
