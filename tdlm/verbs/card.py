"""The card of an exported model, in Markdown: what it is, how it was made, what it scores, what it writes, what it cannot.

Every figure comes from the folder's own files; what no file says (whose text it learned from, under which licence) is
the `about` text that the export was given. A number that was never measured has no line.
"""
from __future__ import annotations

import math
from typing import Any

from ..report.read import NGRAMS, dicts, mapping, number

QUOTED = 3
"""Samples quoted of each group."""
LIMITS = ("It is {size}. It writes plausible nonsense: names, dates and facts are invented, long texts wander. It has met no "
          "filter and no instruction: what it writes is what text of its kind looks like, prejudice and error included. It is "
          "for trying the tools on, not for telling anybody anything.")


def card(config: dict[str, Any], state: dict[str, Any], results: dict[str, Any], samples: list[dict[str, Any]], size: int) -> str:
    """`config` is the content of the folder's config.json, `results` that of eval.json, `samples` the groups of
    samples.json, `size` the bytes of the weights."""
    settings, provenance = config["config"], config["provenance"]
    exported = mapping(provenance.get("exported"))
    parts = [f"# {settings['name']}", _about(exported.get("about")), _what(settings, provenance, size, exported),
             _use(settings), _made(settings, provenance, state, exported), _scores(results), _written(samples),
             "## What it cannot\n" + LIMITS.format(size=_parameters(provenance))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(text: Any) -> str:
    return str(text).strip() if text else "Nothing was said about the text it learned from; ask who made it before passing it on."


def _parameters(provenance: dict[str, Any]) -> str:
    total = number(mapping(provenance.get("parameters")).get("total"))
    return "a network of unknown size" if total is None else f"a network of {total / 1e6:.1f} million parameters"


def _what(settings: dict[str, Any], provenance: dict[str, Any], size: int, exported: dict[str, Any]) -> str:
    method, backbone, data = settings["method"], settings["backbone"], settings["data"]
    parts = [str(mapping(method.get(key)).get("kind")) for key in ("process", "head") if key in method]
    rows = [("method", f"{method['kind']} ({', '.join(parts)})" if parts else method["kind"]),
            ("network", f"{backbone['kind']}, {backbone['blocks']} blocks of width {backbone['width']}, "
                        f"{backbone['heads']} heads; {_parameters(provenance).removeprefix('a network of ')}"),
            ("rows", f"{data['length']} tokens, {data['layout']}"),
            ("weights", f"{exported.get('dtype')}, {size / 1e6:.1f} MB"
                        f"{', averaged over the run' if exported.get('averaged') else ''}")]
    return "## What it is\n" + _table(("", ""), rows)


def _use(settings: dict[str, Any]) -> str:
    gaps = "" if settings["backbone"]["kind"] == "causal" else 'tdlm sample FOLDER --infill "The river rises ___ and flows on."\n'
    return ("## How to use it\nFOLDER is where this card lies.\n```\ntdlm sample FOLDER --count 2 --length 128 --steps 64\n"
            f'tdlm sample FOLDER --prompt "The history of"\n{gaps}tdlm eval FOLDER --data DIR\n'
            "tdlm train RECIPE --init FOLDER --data DIR --tree FOLDER/tree.safetensors --out RUN\n```\n"
            "`--data DIR` is text prepared with this model's own tokenizer: "
            "`tdlm prepare TEXT --out DIR --tokenizer FOLDER/tokenizer.json`.")


def _made(settings: dict[str, Any], provenance: dict[str, Any], state: dict[str, Any], exported: dict[str, Any]) -> str:
    train, length = settings["train"], settings["data"]["length"]
    seconds, step = number(state.get("seconds")), exported.get("step", 0)
    rows = [("steps", f"{step:,} of {train['steps']:,}, {train['batch']} rows each: {step * train['batch'] * length:,} tokens"),
            ("device", provenance.get("device")),
            ("time", None if seconds is None else f"{seconds / 60:.1f} minutes of training"),
            ("command", f"`{provenance['command']}`" if provenance.get("command") else None),
            ("commit", provenance.get("commit")),
            ("versions", ", ".join(f"{name} {value}" for name, value in mapping(provenance.get("versions")).items())),
            ("data", f"fingerprint {provenance['data_fingerprint']}" if provenance.get("data_fingerprint") else None),
            ("began", f"with the weights of {provenance['init']}" if provenance.get("init") else None)]
    return "## How it was made\n" + _table(("", ""), [(name, value) for name, value in rows if value])


def _scores(results: dict[str, Any]) -> str:
    bound = number(results.get("bound"))
    if bound is None:
        return ""
    error, tokens, text = number(results.get("error")), results.get("tokens"), number(results.get("bytes"))
    told = f"{'at most ' if results.get('is_a_bound') else ''}{bound:.3f}{f' ± {error:.3f}' if error else ''}"
    rows = [("this model", told, f"{math.exp(bound):.1f}", _bits(results.get("bits_per_byte")))]
    for name in NGRAMS:
        if (nats := number(mapping(results.get("ngrams")).get(name))) is not None:
            share = None if not text else nats * float(tokens or 0) / text / math.log(2)
            rows.append((f"{name} model, counted on the same text", f"{nats:.3f}", f"{math.exp(nats):.1f}", _bits(share)))
    measured = mapping(results.get("provenance"))
    split = {"valid": "validation"}.get(str(results.get("split")), str(results.get("split")))
    said = (f"On the {split} split: {tokens:,} tokens in rows of {results.get('length')}, estimator "
            f"{results.get('estimator')}, {results.get('repeats')} repeats"
            f"{', on ' + str(measured['device']) if measured.get('device') else ''}.")
    return "## What it scores\n" + said + "\n\n" + _table(("", "nats/token", "perplexity", "bits/byte"), rows)


def _bits(value: Any) -> str:
    found = number(value)
    return "" if found is None else f"{found:.3f}"


def _written(groups: list[dict[str, Any]]) -> str:
    """The first samples of every group, as they came."""
    parts = []
    for group in groups:
        settings, drawn = mapping(group.get("settings")), dicts(group.get("samples"))[:QUOTED]
        told = [f"{name} {settings[name]}" for name in ("seed", "steps", "temperature", "top_p", "sampler") if settings.get(name)]
        given = settings.get("prompt") or settings.get("infill")
        head = f"{group.get('title')} ({', '.join(told)}{f'; given: {given!r}' if given else ''})"
        parts.append(f"{head}:\n\n" + "\n\n".join(_quoted(str(sample.get("text", ""))) for sample in drawn))
    return "## What it writes\nThe first samples drawn, not chosen.\n\n" + "\n\n".join(parts) if parts else ""


def _quoted(text: str) -> str:
    """A block that shows the text as it is, whatever stands in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text.strip()}\n{fence}"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)])
