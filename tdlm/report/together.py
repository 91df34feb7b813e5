"""`tdlm report compare RUN... --out DIR`: many runs as one page, and the same table and figure as files to keep.

`compare.html` stands alone; `compare.md` is made to be committed; `compare.json` and `compare.csv` hold the numbers unrounded;
`compare.svg` and `compare.png` are the figure and need matplotlib, without which they are left out and the page shows bars.
Runs that were not measured alike never share a table; with `one_protocol` they are an error and nothing is written.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..files import json_text, write_bytes, write_text
from .compare import can_draw, comparison
from .dots import drawable, figure_file
from .html import document
from .protocol import in_words
from .ranking import Section, rank
from .read import Run, read_run
from .tables import as_csv, as_json, markdown


def compare_runs(paths: Sequence[Path | str], out: Path | str, *, one_protocol: bool = False, protocol: str | None = None,
                 on: str | None = None) -> dict[str, Any]:
    """Write the comparison into the folder `out`; returns the groups, what they differ in, and the files written.

    Without a wish the runs' own results are compared (or the last validation of those that were not evaluated); with
    `protocol` or `on` those of a named protocol or a named text set, which every run must have.
    """
    if not paths:
        raise RunError("no run to compare; give run folders: tdlm report compare RUN... --out DIR")
    runs, out = [read_run(Path(path)) for path in paths], Path(out)
    if protocol is not None or on is not None:
        runs = [run.under(protocol or "strict", on) for run in runs]
    sections = rank(runs)
    differences = in_words([section.protocol for section in sections]) if len(sections) > 1 else []
    if one_protocol and differences:
        raise RunError(f"the runs were not measured alike: {' '.join(differences)} Evaluate them alike with tdlm eval, or "
                       "compare without asking for one protocol: each group then has a table of its own")
    result = {"groups": as_json(sections), "differences": differences}
    return {**result, "files": _write(out, runs, sections, result)}


def _write(out: Path, runs: list[Run], sections: list[Section], result: dict[str, Any]) -> dict[str, str]:
    body = comparison(runs, "c", lambda entry: "")
    made: dict[str, bytes | str] = {
        "html": document(f"{len(runs)} runs side by side", "Tree-structured diffusion language models", "", body, css="broad"),
        "md": markdown(sections),
        "json": json_text(result, indent=1, ensure_ascii=False) + "\n",
        "csv": as_csv(sections),
    }
    if drawable(sections) and can_draw():
        made |= {form: figure_file(sections, form) for form in ("svg", "png")}
    files = {}
    try:
        for kind, content in made.items():
            path = out / f"compare.{kind}"
            (write_bytes if isinstance(content, bytes) else write_text)(path, content)  # type: ignore[arg-type]
            files[kind] = str(path)
    except OSError as error:
        raise RunError(f"the comparison cannot be written to {out} ({error.strerror}); choose another --out") from None
    return files
