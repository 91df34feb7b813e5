"""`tdlm export`: a trained run as a folder to hand on - averaged weights, tree, tokenizer, numbers, and a card.

    model.safetensors   the weights that `eval` and `sample` use (averaged ones where the run kept them), in one dtype
    state.json          the step they come from and the seconds they took
    manifest.json       size and hash of the weights, the tree and the tokenizer; checked whenever the folder is opened
    tree.safetensors, tokenizer.json, config.json, metrics.jsonl, eval.json, quality.json   the run's own, where it has them
    README.md           the card (`card.py`)

The folder is one that every verb opens as a run: it is itself a checkpoint. It has no optimizer state, so it cannot be
continued; another run can begin with it (`tdlm train ... --init`). Samples stay behind, the card quotes them. What would
name a place on this machine (commands, the way to the data) is taken out.
"""
from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import RunError
from ..files import sync, write_bytes, write_json, write_text
from ..report.read import read_run
from ..train import checkpoint, folder
from ..train.provenance import now, versions
from ..train.run import open_run
from .card import card

Dtype = Literal["float32", "bfloat16"]
NUMBERS = ("eval.json", "quality.json")


def export_run(run: Path | str, out: Path | str, *, dtype: Dtype = "bfloat16", about: str | None = None) -> dict[str, Any]:
    """Write the folder `out`, which must not exist yet; returns a summary. `about` opens the card: what the model is, whose
    text it learned from, under which licence."""
    run, out = Path(run), Path(out)
    if out.exists():
        raise RunError(f"{out} exists already; choose a new --out, or delete it first")
    found = _newest(run)
    beside = out.with_name(f".{out.name}.exporting")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
        result = _write(run, found, beside, dtype, about)
        open_run(beside)  # what cannot be opened is not handed on
        os.rename(beside, out)
        sync(out.parent)
    except OSError as error:
        raise RunError(f"cannot write {out} ({error.strerror or error}); make room, or choose another --out") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return {"model": str(out), **result}


def _newest(run: Path) -> checkpoint.Checkpoint:
    """The newest intact checkpoint of a run; an exported folder is its own."""
    folder.read_config(run)
    found = checkpoint.load(run) if (run / checkpoint.MANIFEST).is_file() else checkpoint.newest(run, lambda line: None)
    if found is None:
        raise RunError(f"{run} holds no checkpoint yet, so there are no weights to export; train it first")
    return found


def weights(found: checkpoint.Checkpoint, dtype: Dtype) -> dict[str, Tensor]:
    """What `eval` and `sample` use of a checkpoint; whole numbers (a head's order of tokens) stay as they are."""
    tensors = found.tensors("model") | (found.tensors("ema") if "ema" in found.names else {})
    return {name: value.to(getattr(torch, dtype)) if value.is_floating_point() else value for name, value in tensors.items()}


def _write(run: Path, found: checkpoint.Checkpoint, out: Path, dtype: Dtype, about: str | None) -> dict[str, Any]:
    old = folder.read(run)
    assert old is not None
    tensors = weights(found, dtype)
    for name in (folder.TREE, folder.TOKENIZER):
        write_bytes(out / name, (run / name).read_bytes())
    checkpoint.write(out, found.step, {"model": tensors}, {"seconds": found.state.get("seconds")})
    shown = read_run(run)
    for name in NUMBERS:
        if (run / name).is_file():
            write_json(out / name, placeless(getattr(shown, "results" if name == "eval.json" else "quality")))
    if (run / folder.METRICS).is_file():
        write_bytes(out / folder.METRICS, (run / folder.METRICS).read_bytes())
    provenance = {key: value for key, value in old["provenance"].items() if key != "data"}
    before = provenance.get("exported", {})
    exported = {"at": now(), "step": found.step, "dtype": dtype, "versions": versions(),
                "averaged": "ema" in found.names or before.get("averaged", False),
                "about": before.get("about") if about is None else about}
    config = {"config": old["config"], "provenance": placeless({**provenance, "exported": exported})}
    write_json(out / folder.CONFIG, config)
    write_text(out / "README.md", card(config, found.state, placeless(shown.results), shown.samples,
                                       (out / "model.safetensors").stat().st_size))
    sync(out)
    return {"step": found.step, "dtype": dtype, "averaged": exported["averaged"],
            "weights": sum(value.numel() for value in tensors.values()), "bytes": (out / "model.safetensors").stat().st_size}


_PLACE = re.compile(r"(?<![\w.:/])(?:~|\.\.|\.)?/(?:[^\s'\"/]+/)*([^\s'\"/]+)/?")


def placeless(value: Any) -> Any:
    """The same data, where a path that begins at the root, at home or above keeps its last part only."""
    if isinstance(value, dict):
        return {key: item if key == "about" else placeless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [placeless(item) for item in value]
    return _PLACE.sub(r"\1", value) if isinstance(value, str) else value
