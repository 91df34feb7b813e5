"""A run folder: one writer at a time, what the run is (`config.json`), and copies of its tree and tokenizer.

`config.json` is written before anything else and says what the run is for good: the same command continues the run,
another configuration, tree or data set is an error that lists every difference.
"""
from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config import RunConfig, difference
from ..errors import RunError
from ..files import file_hash, lock, write_bytes, write_json

CONFIG, TREE, TOKENIZER, METRICS = "config.json", "tree.safetensors", "tokenizer.json", "metrics.jsonl"
LOCK = ".lock"

FREE = frozenset(("train.micro_batch", "train.memory", "train.log_every", "train.valid_every", "train.save_every", "train.keep"))
"""What may change when a run continues: how often it reports and saves, and how many sequences go through at once."""


@contextlib.contextmanager
def hold(out: Path) -> Iterator[Path]:
    """The run folder with its lock held; a folder with other people's files in it is refused. One that was made here and
    that nothing was put into is taken away again."""
    with contextlib.ExitStack() as stack:
        try:
            refuse_foreign(out)
            if not out.exists():
                out.mkdir(parents=True, exist_ok=True)
                stack.callback(_remove_empty, out)
            stack.enter_context(lock(out / LOCK, f"the run {out}"))
        except OSError as error:
            raise RunError(f"cannot write the run folder {out} ({error.strerror or error}); "
                           "choose another --out") from None
        yield out


def _remove_empty(out: Path) -> None:
    if [path.name for path in out.iterdir()] == [LOCK]:
        (out / LOCK).unlink()
        out.rmdir()


def refuse_foreign(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file; a run needs a folder")
    if out.is_dir() and not (out / CONFIG).exists():
        inside = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
        if inside:
            raise RunError(f"{out} holds {inside[0]!r} but no {CONFIG}, so it is no run; choose a new folder")


def read(out: Path) -> dict[str, Any] | None:
    """`{"config": ..., "provenance": ...}` of a run, None when there is none."""
    path = Path(out) / CONFIG
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or not {"config", "provenance"} <= set(value):
            raise ValueError("config and provenance are missing")
        return value
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}); restore it from a copy, or train into a new folder") from None


def read_config(out: Path) -> RunConfig:
    """The configuration of a run that was trained before."""
    value = read(out)
    if value is None:
        raise RunError(f"{out} is no run (no {CONFIG}); train one: tdlm train RECIPE --out {out}")
    return RunConfig.from_json(value["config"])


def compare(out: Path, old: dict[str, Any], config: dict[str, Any], identity: Mapping[str, str | None]) -> None:
    """Refuse to continue a run as another one; the error lists every field that differs. A setting that did not exist
    when the run was begun had its default value."""
    if "exported" in old["provenance"]:
        raise RunError(f"{out} is an exported model without the state of its optimizer, so its run cannot go on; train into a "
                       f"new folder, beginning with its weights: --init {out}")
    was = RunConfig.from_json(old["config"]).to_json()
    lines = [line for line in difference(was, config) if line.split(":", 1)[0] not in FREE]
    lines += difference({name: old["provenance"].get(name) for name in identity}, dict(identity))
    if lines:
        raise RunError(f"{out} was made with other settings (run -> now): {'; '.join(lines)}; "
                       "repeat the run's own command to continue it, or choose a new --out")


def create(out: Path, config: dict[str, Any], provenance: dict[str, Any]) -> None:
    write_json(out / CONFIG, {"config": config, "provenance": {**provenance, "continued": []}})


def note_continuation(out: Path, old: dict[str, Any], config: dict[str, Any], entry: dict[str, Any]) -> None:
    """Keep who continued the run with what (versions and devices may change between sittings)."""
    provenance = dict(old["provenance"])
    provenance["continued"] = [*provenance.get("continued", []), entry]
    write_json(out / CONFIG, {"config": config, "provenance": provenance})


def keep_copies(out: Path, tree: bytes, tree_hash: str, save_tokenizer: Callable[[Path], Any]) -> None:
    """The tree and the tokenizer beside the weights, so that a run folder can be moved on its own."""
    if not (out / TREE).exists() or file_hash(out / TREE) != tree_hash:
        write_bytes(out / TREE, tree)
    if not (out / TOKENIZER).exists():
        save_tokenizer(out / TOKENIZER)
