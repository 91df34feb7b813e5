"""The page: one HTML file that needs nothing else - no network, no fonts, no files beside it.

A content security policy within the page forbids every load and every script but the player, which is named by its
hash; escaping makes sample text harmless already, this is the second lock.
"""
from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from ..errors import RunError, TreeError
from ..files import write_text
from . import sections
from .colour import ramp_rules, series_rules
from .compare import comparison
from .player import read_trace
from .read import Run, numbers, read_run
from .text import anchor, esc, fixed, short, whole

TITLES = (("result", "Result"), ("trace", "From coarse to fine"), ("samples", "Samples"), ("training", "Training"),
          ("levels", "Bound per level"), ("tree", "The tree"), ("facts", "Size and speed"))


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Write the page for one run, or for several with a comparison in front; returns `out`."""
    if not runs:
        raise RunError("no run to report on; give one or more run folders: tdlm report RUN...")
    found = [read_run(Path(run)) for run in runs]
    out = Path(out)
    try:
        write_text(out, page(found))
    except OSError as error:
        raise RunError(f"the report cannot be written to {out} ({error.strerror}); choose another --out") from None
    return out


def page(runs: Sequence[Run]) -> str:
    """The HTML of the whole page."""
    heights: set[int] = set()
    bodies = [_run(run, place, len(runs) > 1, heights) for place, run in enumerate(runs)]
    front = ""
    if len(runs) > 1:
        front = comparison(list(runs), "c", lambda entry: anchor("run", runs[entry.place].name, entry.place))
    kicker = "Tree-structured diffusion language model" if len(runs) == 1 else f"{len(runs)} runs"
    title = ", ".join(run.name for run in runs)
    return document(title, kicker, _navigation(runs), front + "".join(bodies), script=_asset("player.js"), heights=heights)


def document(title: str, kicker: str, navigation: str, body: str, *, script: str = "",
             heights: set[int] | None = None, css: str = "") -> str:
    """The HTML around a page's content."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"'sha256-{digest}'" if script else "'none'"
    policy = f"default-src 'none'; base-uri 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{esc(policy)}">
<meta name="color-scheme" content="light dark">
<title>{esc(title)} \N{MIDDLE DOT} TDLM report</title>
<style>{_asset("report.css")}{series_rules()}{ramp_rules((heights or set()) | {1})}</style>
</head><body class="{css}">
<header class="page"><p class="kicker">{esc(kicker)}</p><h1>{esc(title)}</h1>{navigation}</header>
<main>{body}</main>
{f"<script>{script}</script>" if script else ""}
</body></html>
"""


def _asset(name: str) -> str:
    return resources.files("tdlm.report").joinpath("assets", name).read_text(encoding="utf-8")


def _navigation(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        links = [("comparison", "Comparison")]
        links += [(anchor("run", run.name, place), run.name) for place, run in enumerate(runs)]
    else:
        links = [(f"r0-{name}", title) for name, title in TITLES] + [("r0-provenance", "Provenance")]
    return f'<nav>{"".join(f"<a href=#{name}>{esc(title)}</a>" for name, title in links)}</nav>'


def _run(run: Run, place: int, several: bool, heights: set[int]) -> str:
    """All sections of one run; notes the tree heights that need colours."""
    key = f"r{place}"
    tree_facts, height = _tree(run)
    read = [read_trace(data, number, height) for number, data in enumerate(run.traces)]
    traces = [trace for trace in read if trace is not None]
    levels = max([len(numbers(line.get("levels"))) for line in (*run.train, *run.valid, run.headline or {})], default=0)
    top = min(64, max(height or 0, levels, 1))
    heights |= {top} | {trace.top for trace in traces}
    made = {
        "result": sections.headline(run, key), "trace": sections.traces(run, key, traces),
        "samples": sections.samples(run), "training": sections.training(run, key), "levels": sections.levels(run, key),
        "tree": sections.tree(run, key, tree_facts), "facts": sections.facts(run),
    }
    body = "".join(f'<section id="{key}-{name}"><h2>{title}</h2>{made[name]}</section>' for name, title in TITLES)
    body = f'<div class="ramp-{top}">{body}{sections.provenance(run, key)}</div>'
    if not several:
        return body
    name = anchor("run", run.name, place)
    return f'<details class="run" id="{name}"><summary>{esc(run.name)}</summary>{body}</details>'


def _tree(run: Run) -> tuple[list[tuple[str, str]], int | None]:
    """The shape of the tree, and its height."""
    if run.tree_file is None:
        return [], None
    from ..tree.tree import Tree  # torch is loaded only where there is a tree to read

    try:
        tree = Tree.load(run.tree_file)
    except TreeError as error:
        raise RunError(f"the run's tree is damaged: {error}") from None
    node_height = tree.node_height()[tree.size:]
    leaves = tree.leaf_counts()[tree.size:]
    facts = [("tokens (V)", whole(tree.size)), ("branching factor (K)", whole(tree.branching)),
             ("height (H)", whole(tree.height)),
             ("nodes (N)", f"{whole(tree.nodes)} ({short(tree.nodes - tree.size)} inside)")]
    for height in range(tree.height - 1, 0, -1):
        sizes = leaves[node_height == height]
        if len(sizes):
            spread = f"{len(sizes):,} of {int(sizes.min()):,} to {int(sizes.max()):,} tokens"
            mean = fixed(sizes.double().mean().item(), 1)
            facts.append((f"groups at height {height}", f"{spread}, {mean} on average"))
    return facts, tree.height
