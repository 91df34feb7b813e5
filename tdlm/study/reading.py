"""Generated text in a study: drawn once from fixed seeds, read once by one judge, and kept, so that a stopped study goes on.

The judge is a model of the transformers library as in `tdlm quality` (gpt2-large is the paper's), or a left-to-right run of this
package: at toy size the study trains one, so that nothing has to be fetched. What such a small judge says shows only that
everything works together.
"""
from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..console import counter
from ..errors import ConfigError
from ..evaluate.judge import Judge, load_judge
from ..evaluate.quality import judge_texts
from ..files import write_json
from ..train import folder
from ..train.run import Run, open_run
from ..verbs.quality import human_texts
from ..verbs.sample import Request, sample_run
from .collect import Collection, Row

USUAL = "gpt2-large"
"""The paper's judge."""


class Reading:
    """Draws and judges for the runs of a study."""

    def __init__(self, found: Collection):
        self.found, self.human = found, {}

    @cached_property
    def spec(self) -> str:
        """Who judges: as wished, else a left-to-right run of the study at toy size, else the paper's judge."""
        if self.found.wishes.judge is not None:
            return self.found.wishes.judge
        own = [row for row in self.found.rows if is_judge(row)]
        if self.found.size == "toy" and own:
            return own[-1].run.folder
        if self.found.size == "toy":
            raise ConfigError("no left-to-right run of this study is finished that could read the samples; make it first, or "
                              "name a judge: --judge smollm2")
        return USUAL

    @property
    def label(self) -> str:
        """Who judges, as results may say it: a run of this package by its folder's name."""
        return f"run {Path(self.spec).resolve().name}" if self.is_run else self.spec

    @property
    def is_run(self) -> bool:
        return (Path(self.spec) / folder.CONFIG).is_file() and (Path(self.spec) / folder.METRICS).is_file()

    @cached_property
    def judge(self) -> Judge:
        if self.is_run:
            return run_judge(open_run(self.spec, self.found.device))
        return load_judge(self.spec, device=self.found.device)

    def draw(self, row: Row, request: Request) -> dict[str, Any]:
        """The samples of a run for a request, kept in OUT/texts."""
        path = self.place(row, request)
        asked = {**json.loads(json.dumps(asdict(request))), "step": (row.run.headline or {}).get("step")}
        kept = _read(path)
        if kept.get("asked") != asked:
            run = open_run(row.run.folder, self.found.device)
            self.found.say(f"{request.count} samples: {path.stem}")
            kept = {"asked": asked, **sample_run(run, request, say=lambda line: None, keep=False)}
            write_json(path, kept)
        return kept

    def place(self, row: Row, request: Request) -> Path:
        way = "-".join(map(str, request.per_level)) if request.per_level else f"{request.steps}-steps"
        return self.found.out / "texts" / f"{row.name}-{way}.json"

    def quality(self, row: Row, request: Request) -> dict[str, Any]:
        """The samples' measures beside those of human text, as `tdlm quality` writes them."""
        drawn = self.draw(row, request)
        read = drawn.get("read") or {}
        if read.get("asked_of") != self.label:
            with counter("judge samples") as progress:
                samples, _ = judge_texts(self.judge, [sample["text"] for sample in drawn["samples"]],
                                         max_length=self.longest, progress=progress)
            read = {"asked_of": self.label, "samples": samples, "human": self._human(row, request), "judge": self.judge.to_json(),
                    "max_length": self.longest, "step": drawn["asked"]["step"],
                    "text_path": "decoded without PAD, EOS and BOS, encoded again by the judge; counted in its tokens",
                    "human_text": "the first rows of the validation split, as evaluation cuts them; none chosen",
                    "settings": {"dtype": "network float32, draws float64", **drawn["settings"],
                                 "evaluations": drawn["evaluations"]["mean"]}}
            write_json(self.place(row, request), {**drawn, "read": read})
        return read

    longest = 512
    """Judge tokens per text at most."""

    def _human(self, row: Row, request: Request) -> dict[str, Any]:
        key = (row.entry.config.data.length, row.entry.config.data.layout, request.count)
        if key not in self.human:
            texts = human_texts(open_run(row.run.folder, "cpu"), None, count=request.count, length=None)
            self.human[key] = judge_texts(self.judge, texts, max_length=self.longest)[0]
        return self.human[key]


def is_judge(row: Row) -> bool:
    method = row.entry.config.method
    return method.causal and method.flat


def run_judge(run: Run) -> Judge:
    """A left-to-right run called as transformers' models are called; it reads its own tokens."""
    if not (run.config.method.causal and run.config.method.flat):
        raise ConfigError(f"{run.path} does not read from left to right; a judge is a run of method ar, or a model's name")
    model, root = run.assembly.model, run.tree.root

    def call(input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        del attention_mask, use_cache  # PAD stands behind the text, where a causal network does not look; nothing is kept
        hidden = model.hidden(input_ids, torch.zeros(len(input_ids), dtype=torch.float64, device=input_ids.device), None)
        parent = torch.full_like(input_ids, root).flatten()
        return SimpleNamespace(logits=model.head.log_probs(hidden.flatten(0, 1), parent).unflatten(0, input_ids.shape))

    names = {f"token {number}": number for number in range(run.tree.size)}
    return Judge(f"run {run.path.name}", call, lambda text: run.tokenizer.encode(text).tolist(), names, root,
                 run.tokenizer.eos_id, run.config.data.length, run.assembly.objective.tree.ancestor.device, "float32", "tdlm")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        return {}  # a damaged file of samples is written anew
    return value if isinstance(value, dict) else {}
