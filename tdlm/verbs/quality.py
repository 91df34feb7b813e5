"""`tdlm quality`: samples judged by another language model, beside held-out human text; keep it as quality.json."""
from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..console import counter
from ..data.batches import eval_rows
from ..errors import ConfigError
from ..evaluate.judge import load_judge
from ..evaluate.quality import judge_texts, mauve_score
from ..files import write_json
from ..train.provenance import provenance
from ..train.run import Run
from .sample import Request, checked, sample_run

DRAWN, FREE = "quality-samples.json", "Free samples"


def quality_run(run: Run, *, judge: str, samples: Path | None = None, request: Request | None = None, data: Path | None = None,
                max_length: int = 512, batch: int = 8, device: str = "cpu", dtype: str = "float32", mauve: bool = False,
                say: Callable[[str], None]) -> dict[str, Any]:
    """Either `samples`, a file, or `request`, to draw them now (they are kept in the run folder as quality-samples.json)."""
    if (samples is None) == (request is None):
        raise ConfigError("quality needs samples: --samples FILE (samples.json, or .jsonl with a text a line), or --count N "
                          "to draw them; not both")
    for name, value in (("count", 1 if request is None else request.count), ("batch", batch), ("max-length", max_length)):
        if value < 1:
            raise ConfigError(f"at least 1 is expected, got --{name} {value}")
    if request is not None:
        checked(run, request)
    group = read_samples(samples) if samples is not None else None
    held = human_texts(run, data, count=len(group["texts"]) if group else request.count if request else 0,
                       length=(group or {}).get("length") or (request.length if request else None))
    reader = load_judge(judge, device=device, dtype=dtype)
    if group is None:
        assert request is not None
        drawn = sample_run(run, request, say=say, keep=False)
        write_json(run.path / DRAWN, {"groups": [drawn]})
        group = _group(drawn)
    with counter("judge samples") as progress:
        own, ids = judge_texts(reader, group["texts"], max_length=max_length, batch=batch, progress=progress)
    with counter("judge human text") as progress:
        human, human_ids = judge_texts(reader, held, max_length=max_length, batch=batch, progress=progress)
    result = {"samples": own, "human": human, "judge": reader.to_json(), "max_length": max_length,
              "text_path": "decoded without PAD, EOS and BOS, encoded again by the judge; counted in its tokens",
              "human_text": "the first rows of the validation split, as evaluation cuts them; none chosen",
              "settings": group["settings"], "step": run.step}
    if mauve:
        result["mauve"] = mauve_score(reader, ids, human_ids)
    result["provenance"] = provenance(reader.device, command=shlex.join(["tdlm", *sys.argv[1:]]))
    write_json(run.path / "quality.json", result)
    return result


def human_texts(run: Run, data: Path | None, *, count: int, length: int | None) -> list[str]:
    """As many rows of the validation split as there are samples, of the samples' length: what the model was trained to make
    more of."""
    store = run.store(data)
    rows = eval_rows(store, length=length or run.config.data.length, layout=run.config.data.layout, limit=max(1, count))
    return [store.tokenizer.decode(row) for row in rows.batch(0, len(rows)).tokens.tolist()]


def read_samples(path: Path) -> dict[str, Any]:
    """`texts`, `settings` and `length` of a samples.json of this package, or the texts of a .jsonl."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file of samples; draw some: tdlm sample RUN, or use --count N")
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            return {"texts": [row if isinstance(row, str) else row["text"] for row in rows], "settings": {}}
        value = json.loads(content)
        groups = value.get("groups", [value])
        chosen = groups[0] if len(groups) == 1 else next((group for group in groups if group.get("title") == FREE), None)
        if chosen is None:
            raise ConfigError(f"{path} holds {len(groups)} groups of samples and none is called {FREE!r}; keep the one to judge "
                              "in a file of its own, or use --count N")
        return _group(chosen)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path}: these are no samples ({type(error).__name__}: {error}); expected is a samples.json of "
                          "tdlm sample, or .jsonl with a text a line") from None


def _group(group: dict[str, Any]) -> dict[str, Any]:
    settings = {"dtype": "network float32, draws float64", **group.get("settings", {}),
                "evaluations": group.get("evaluations", {}).get("mean")}
    return {"texts": [sample["text"] for sample in group["samples"]], "settings": settings, "length": settings.get("length")}
