"""Checkpoints that survive a kill at any moment and a flipped bit on the disk.

A checkpoint `checkpoints/step-00001000/` is written under a hidden name, every file and the folder are fsynced, then
one rename makes it visible: what has the final name is whole. `manifest.json` holds the size and hash of every file
and is checked on every load, because tensor formats load a flipped bit silently as a wrong weight. Older checkpoints
go only after the new one is durable. Tensors are safetensors and the rest is JSON: nothing here can execute code.
"""
from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import RunError
from ..files import file_hash, sync, write_json, write_text

FORMAT = "tdlm-checkpoint-1"
FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED, _DISCARDED, _DAMAGED = ".saving-", ".discarded-", "damaged-"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file had the hash that was written down when it was saved."""

    path: Path
    step: int
    state: dict[str, Any]
    names: tuple[str, ...]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part (`model`, `optimizer`, `ema`) on the CPU."""
        if name not in self.names:
            raise RunError(f"{self.path} holds no {name!r}; it has {', '.join(self.names)}")
        try:
            return load_file(self.path / f"{name}.safetensors")
        except (SafetensorError, OSError) as error:
            raise RunError(f"{self.path / name}.safetensors cannot be read ({error})") from None


def checkpoints(run: Path, *, after: int = -1) -> list[Path]:
    """The complete checkpoints of a run beyond a step, oldest first (not yet verified)."""
    folder = Path(run) / FOLDER
    found = [(int(match[1]), path) for path in (folder.iterdir() if folder.is_dir() else ())
             if (match := _NAME.fullmatch(path.name))]
    return [path for step, path in sorted(found) if step > after]


def latest(run: Path) -> Path | None:
    """The newest checkpoint, None when the run has none yet."""
    found = checkpoints(run)
    return found[-1] if found else None


def save(run: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *,
         keep: int | None = None) -> Path:
    """Write a checkpoint durably, then drop all but the `keep` newest. The caller holds the run's lock."""
    folder = Path(run) / FOLDER
    final = folder / f"step-{step:08d}"
    beside = folder / f"{_UNFINISHED}{final.name}"
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync(folder.parent)
        clean(run)
        if final.exists():
            raise RunError(f"{final} exists already; a checkpoint is never overwritten")
        beside.mkdir()
        write(beside, step, tensors, state)
        os.rename(beside, final)
        sync(folder)
        for old in checkpoints(run)[:-keep] if keep is not None else ():
            _discard(old)
    except OSError as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(f"cannot write the checkpoint {final} ({error.strerror or error}); "
                       "make room or check the permissions, then run the same command again") from None
    return final


def write(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
    """The files of a checkpoint; the manifest answers for everything that lies in the folder by then."""
    own = folder / "state.json"
    write_text(own, json.dumps({"step": step, **state}) + "\n")  # no write_json: a sum may be infinite and stays so
    for name, part in tensors.items():
        path = folder / f"{name}.safetensors"
        save_file({key: value.detach().contiguous() for key, value in part.items()}, path)
        shutil.copymode(own, path)  # the library lets nobody else read
        sync(path)
    files = {path.name: {"bytes": path.stat().st_size, "hash": file_hash(path)} for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"format": FORMAT, "step": step, "files": files})
    sync(folder)


def _discard(path: Path) -> None:
    """Remove a folder so that a kill on the way leaves no half checkpoint under its final name."""
    aside = path.with_name(_DISCARDED + path.name)
    os.rename(path, aside)
    shutil.rmtree(aside)


def clean(run: Path) -> None:
    """Remove what killed saves and removals left. The caller holds the run's lock."""
    folder = Path(run) / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith((_UNFINISHED, _DISCARDED)):
            shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it is neither loaded nor in the way, nor lost to whoever wants to look."""
    aside = path.with_name(_DAMAGED + path.name)
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    return aside


def load(path: Path) -> Checkpoint:
    """A checkpoint after checking every file against the manifest; RunError names the first file that is wrong."""
    path = Path(path)
    manifest = _json(path / MANIFEST)
    files = manifest.get("files")
    if manifest.get("format") != FORMAT or not isinstance(files, dict) or "state.json" not in files:
        raise RunError(f"{path / MANIFEST} is no manifest of format {FORMAT} (found {manifest.get('format')!r})")
    for name, entry in files.items():
        if not isinstance(entry, dict) or Path(name).name != name:
            raise RunError(f"{path / MANIFEST} is damaged at {name!r}")
        _check(path / name, entry)
    state = _json(path / "state.json")
    if not state.get("step") == manifest.get("step") == _step_of(path, manifest):
        raise RunError(f"{path} says step {manifest.get('step')} in {MANIFEST} and {state.get('step')} in state.json")
    names = tuple(name.removesuffix(".safetensors") for name in files if name.endswith(".safetensors"))
    return Checkpoint(path, state["step"], state, names)


def _step_of(path: Path, manifest: dict[str, Any]) -> Any:
    match = _NAME.fullmatch(path.name)  # a copy under another name is allowed
    return int(match[1]) if match else manifest.get("step")


def _check(path: Path, entry: dict[str, Any]) -> None:
    if not path.is_file():
        raise RunError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry.get("bytes"):
        raise RunError(f"{path} is damaged: {size} bytes, {entry.get('bytes')} were written")
    if file_hash(path) != entry.get("hash"):
        raise RunError(f"{path} is damaged: its content no longer has the hash it was written with")


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: an object is expected, it holds {type(value).__name__}")
    return value


def newest(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint; damaged ones are passed over with a warning. None: the run has none at all."""
    found = checkpoints(run)
    failures: list[str] = []
    for path in reversed(found):
        try:
            loaded = load(path)
        except RunError as error:
            failures.append(str(error))
            continue
        for failure in failures:
            warn(f"warning: {failure}; falling back to {path.name}")
        return loaded
    if failures:
        raise RunError(f"{failures[0]}; no intact checkpoint is left in {Path(run) / FOLDER}: restore one from a copy, "
                       "or train again into a new folder")
    return None


def load_model(path: Path, model: nn.Module, *, ema: bool = True,
               warn: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Fill a model from a checkpoint, or from a run's newest intact one; returns the checkpoint's state.

    When the run kept averaged weights they are used, unless `ema` is False.
    """
    path = Path(path)
    checkpoint = load(path) if (path / MANIFEST).exists() else newest(path, warn or (lambda line: None))
    if checkpoint is None:
        raise RunError(f"{path} holds no checkpoint yet; train it first: tdlm train RECIPE --out {path}")
    fill(model, checkpoint.tensors("model"), checkpoint.path)
    if ema and "ema" in checkpoint.names:
        fill(model, checkpoint.tensors("ema"), checkpoint.path, parameters_only=True)
    return checkpoint.state


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state, each storage once: a weight that two modules share is saved under its first name."""
    seen: set[int] = set()
    tensors = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen or value.numel() == 0:
            seen.add(value.data_ptr())
            tensors[name] = value
    return tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor], source: Path, *, parameters_only: bool = False) -> None:
    """Copy tensors into the model; names and shapes must be the model's own."""
    wanted = dict(model.named_parameters()) if parameters_only else model_tensors(model)
    for name in [*wanted, *tensors]:
        mine, theirs = wanted.get(name), tensors.get(name)
        if mine is None or theirs is None or mine.shape != theirs.shape:
            raise RunError(f"{source} does not fit the model at {name!r}: it has "
                           f"{'nothing' if theirs is None else tuple(theirs.shape)}, the model "
                           f"{'nothing' if mine is None else tuple(mine.shape)}")
    for name, value in tensors.items():
        wanted[name].detach().copy_(value)
