"""A run folder as plain data for the page: what is there, what is missing, and what every number was made from.

Nothing here is required: a run that was stopped before its first validation is shown too, with the command that makes
what is missing. Only a file that is there and cannot be read is an error.
"""
from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..files import file_hash

FILES = ("config.json", "metrics.jsonl", "eval.json", "quality.json", "samples.json", "trace.json", "tree.safetensors",
         "tree.svg")
NGRAMS = ("unigram", "bigram", "trigram")


@dataclass(frozen=True)
class Run:
    """What the files of one run folder say."""

    name: str
    folder: str
    parent: str
    """The name of the folder that the run stands in."""
    config: dict[str, Any]
    provenance: dict[str, Any]
    train: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    eval: dict[str, Any] | None
    """The run's own result (protocol `strict`), or the one that was chosen; None where there is none."""
    results: dict[str, Any]
    """All of eval.json: other protocols and other people's text too."""
    quality: dict[str, Any]
    samples: list[dict[str, Any]]
    traces: list[dict[str, Any]]
    tree_svg: str | None
    tree_file: Path | None
    files: list[tuple[str, int, str]]

    @property
    def headline(self) -> dict[str, Any] | None:
        """eval.json, or the last validation during training where the run was not evaluated yet."""
        return self.eval or next((point for point in reversed(self.valid) if number(point.get("bound")) is not None), None)

    @property
    def argument(self) -> str:
        """The folder as one writes it on a command line."""
        return shlex.quote(self.folder)

    @property
    def ngrams(self) -> dict[str, float]:
        found = mapping((self.eval or {}).get("ngrams"))
        return {name: value for name in NGRAMS if (value := number(found.get(name))) is not None}

    @property
    def tree_shape(self) -> str | None:
        """`K=512, H=2`, or `star` for the tree of a flat method; from the sizes of the tables alone."""
        if self.tree_file is None:
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.tree_file, framework="np") as file:
                height = file.get_slice("ancestor").get_shape()[0] - 1
                branching = file.get_slice("children").get_shape()[1]
        except (SafetensorError, OSError) as error:
            raise RunError(f"{self.tree_file} is damaged ({error}); restore it from a copy") from None
        return "star" if height == 1 else f"K={branching}, H={height}"

    def under(self, protocol: str, text: str | None = None) -> Run:
        """The same run with the result under a named protocol, on its own text or on a named set; RunError without one."""
        if text is None:
            known = {"strict": self.eval, **mapping(self.results.get("protocols"))}
        else:
            known = mapping(mapping(self.results.get("sets")).get(text))
        found = mapping(known.get(protocol))
        if number(found.get("bound")) is None:
            on = f" on {text}" if text else ""
            has = " and ".join(key for key, value in known.items() if number(mapping(value).get("bound")) is not None)
            name, _, changes = protocol.partition(" with ")
            options = [f" --{change.replace('=', ' ')}" for change in changes.split(", ") if change]
            raise RunError(f"{self.name} has no result under protocol {protocol}{on}{', but under ' if has else ''}{has}; "
                           f"make it: tdlm eval {self.argument} --protocol {name}{''.join(options)}{on and f' --on {text}'}")
        return replace(self, eval=found, valid=[])

    def setting(self, *path: str) -> Any:
        """A value of the nested configuration, None where it is not there."""
        value: Any = self.config
        for name in path:
            value = mapping(value).get(name)
        return value


def number(value: Any) -> float | None:
    """A finite number, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(value: Any) -> list[float]:
    """A list of finite numbers; anything else is an empty list."""
    found = [number(item) for item in value] if isinstance(value, list) else []
    return [] if None in found else [item for item in found if item is not None]


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_run(folder: Path) -> Run:
    """Everything the page shows of one run."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"no run folder {folder}; give the folder that `tdlm train ... --out RUN` wrote")
    present = [name for name in FILES if (folder / name).is_file()]
    if not {"config.json", "metrics.jsonl", "eval.json"} & set(present):
        raise RunError(f"{folder} holds neither config.json nor metrics.jsonl nor eval.json, so it is no run folder; "
                       "give the folder that `tdlm train ... --out RUN` wrote")
    held = {name: _json(folder / name) for name in present if name.endswith(".json")}
    config = mapping(held.get("config.json"))
    results = mapping(held.get("eval.json"))
    train, valid = _metrics(folder / "metrics.jsonl") if "metrics.jsonl" in present else ([], [])
    return Run(
        name=folder.resolve().name or str(folder), folder=str(folder), parent=folder.resolve().parent.name,
        config=mapping(config.get("config", config)), provenance=mapping(config.get("provenance")),
        train=train, valid=valid,
        eval=results if number(results.get("bound")) is not None else None, results=results,
        quality=mapping(held.get("quality.json")),
        samples=_groups(held.get("samples.json"), "groups", "samples"),
        traces=_groups(held.get("trace.json"), "traces", "frames"),
        tree_svg=_text(folder / "tree.svg") if "tree.svg" in present else None,
        tree_file=folder / "tree.safetensors" if "tree.safetensors" in present else None,
        files=[(name, (folder / name).stat().st_size, file_hash(folder / name)) for name in present],
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read ({error}); make it again") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise RunError(f"{path} is not valid JSON ({error}); make it again or delete it") from None


def _groups(value: Any, many: str, one: str) -> list[dict[str, Any]]:
    """A file holds either a list of groups under `many`, or a single group with `one` in it."""
    if isinstance(value, list):
        return dicts(value)
    value = mapping(value)
    return dicts(value[many]) if many in value else [value] if one in value else []


def _metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation points, one per step: where a run was continued, the later line holds.

    A line without its end is what a kill leaves behind, and is passed over; a broken line elsewhere is damage.
    """
    points: dict[str, dict[float, dict[str, Any]]] = {"train": {}, "valid": {}}
    text = _text(path)
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            point = mapping(json.loads(line))
        except ValueError as error:
            if place == len(lines) - 1:
                continue
            raise RunError(f"{path} line {place + 1} is not valid JSON ({error}); remove that line") from None
        step, kind = number(point.get("step")), point.get("kind")
        if step is not None and kind in points:
            points[kind][step] = point
    return tuple([line for _, line in sorted(points[kind].items())] for kind in ("train", "valid"))  # type: ignore
