"""The sections of one run, from the headline to the provenance of every number."""
from __future__ import annotations

import json
import math
import shlex
import statistics
from typing import Any

from .bars import Bar, bars
from .curves import bound_figure, level_bars, levels_figures, loss_figure
from .player import Trace, player
from .protocol import PAD_MODES
from .ranking import is_bound, judge_name
from .read import Run, dicts, mapping, number
from .svg import inline_svg
from .text import DASH, duration, esc, fixed, label, plus_minus, short, size, whole, words

SHOWN = 4  # samples in view; the others are one click away
ESTIMATORS = {"sampled": "one time per sequence", "count": "one uniform count of masked positions per level"}


def missing(what: str, command: str) -> str:
    return f'<p class="missing">{esc(what)} Make it with <code>{esc(command)}</code></p>'


def headline(run: Run, key: str) -> str:
    """The three figures, and the bound beside models that only count."""
    head = run.headline
    if head is None:
        return missing("No validation bound yet.", f"tdlm eval {run.argument}")
    bound, error = number(head.get("bound")) or 0.0, number(head.get("error")) or 0.0
    perplexity = number(head.get("perplexity")) or (math.exp(bound) if bound < 700 else math.inf)
    byte = number(head.get("bits_per_byte"))
    share = error / bound if bound else 0.0
    holds = is_bound(head)
    leq = "" if not holds else "\N{LESS-THAN OR EQUAL TO}\N{NARROW NO-BREAK SPACE}"
    tiles = [("nats per token", leq + plus_minus(bound, error), "bound"),
             ("perplexity", leq + plus_minus(perplexity, error * perplexity, 2), "perplexity"),
             ("bits per byte", DASH if byte is None else leq + plus_minus(byte, byte * share), "bits-per-byte")]
    shown = "".join(f'<div class="tile"><span class="figure">{value}</span><span class="unit">{unit}</span>'
                    f'<a class="source" href="#{key}-p-{name}">how it was measured</a></div>'
                    for unit, value, name in tiles)
    warning = ('<p class="warning"><b>Not a bound.</b> PAD mode <code>drop</code> leaves the PAD terms out although '
               "visible PADs give the length away; kept for comparison with published numbers.</p>"
               if not holds else "")
    if run.eval is None:
        warning += missing("These are from the last validation during training.", f"tdlm eval {run.argument}")
    rows = [Bar(f"{name} (counting)", value, css="plain", link=f"{key}-p-{name}") for name, value in run.ngrams.items()]
    rows.append(Bar("this model", bound, error, "own", link=f"{key}-p-bound"))
    rows.sort(key=lambda row: -row.value)
    chart = bars(rows, caption="Nats per token on the same tokens: shorter is better") if run.ngrams else ""
    return f'{_sentence(run, bound, head)}{_protocol(head)}<div class="tiles">{shown}</div>{warning}{chart}'


def _sentence(run: Run, bound: float, head: dict[str, Any]) -> str:
    """The result in one sentence."""
    parts = []
    for name, value in run.ngrams.items():
        parts.append(f"{fixed(abs(bound - value), 2)} {'below' if bound < value else 'above'} a {name} model")
    tokens = f" on {whole(head['tokens'])} validation tokens" if number(head.get("tokens")) is not None else ""
    if not parts:
        return f'<p class="lead">{fixed(bound, 2)} nats per token{tokens}.</p>'
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f'<p class="lead">{fixed(bound, 2)} nats per token{tokens}: {text}.</p>'


def _protocol(head: dict[str, Any]) -> str:
    """The PAD mode and the estimator stand beside every figure."""
    items = []
    if "pad" in head:
        meaning = PAD_MODES.get(str(head["pad"]))
        items.append(f"PAD mode {words(head['pad'])}" + (f" ({meaning})" if meaning else ""))
    if head.get("estimator") is not None:
        meaning = ESTIMATORS.get(str(head["estimator"]))
        items.append(f"estimator {words(head['estimator'])}" + (f" ({meaning})" if meaning else ""))
    if number(head.get("step")) is not None:
        items.append(f"step {whole(head['step'])}")
    text = " \N{MIDDLE DOT} ".join(items)
    return f'<p class="settings">{esc(text)}</p>' if items else ""


def training(run: Run, key: str) -> str:
    parts = [bound_figure(run, key), loss_figure(run, key)]
    if not any(parts):
        return missing("No training curve yet.", f"tdlm train RECIPE --data DIR --tree FILE --out {run.argument}")
    return f'<div class="pair">{"".join(parts)}</div>'


def levels(run: Run, key: str) -> str:
    drawn = level_bars(run, f"{key}-p-bound") + levels_figures(run, key)
    if not drawn:
        return missing("No bound per level yet.", f"tdlm eval {run.argument}")
    return ("<p>The model pays for a word in instalments: first for the group it belongs to, then for the word within "
            f"the group. The instalments add up to the bound.</p>{drawn}")


def tree(run: Run, key: str, facts: list[tuple[str, str]]) -> str:
    """The picture and the shape of the tree."""
    shape = _rows(facts)
    if run.tree_svg is None:
        file = shlex.quote(str(run.tree_file)) if run.tree_file else "TREE"
        picture = missing("No picture of the tree.", f"tdlm tree show {file} --svg {run.argument}/tree.svg")
    else:
        drawn = inline_svg(run.tree_svg, f"{key}-tree", title="The tree of tokens")
        picture = f'<figure class="plate">{drawn}</figure>'
    return f'{picture}{f"<table class=facts>{shape}</table>" if shape else ""}'


def traces(run: Run, key: str, found: list[Trace]) -> str:
    if not found:
        return missing("No trace of the denoising.", f"tdlm sample {run.argument} --trace")
    return ("<p>Every position starts as a blot that could be any word. Step by step the network decides which "
            "<em>group</em> of words belongs there, then which word of the group. Press play, drag the slider, or use "
            "the space bar and the keys J and L.</p>"
            + "".join(player(trace, f"{key}-trace-{place}") for place, trace in enumerate(found)))


def samples(run: Run) -> str:
    """All samples in the order in which they came."""
    if not run.samples:
        return missing("No samples yet.", f"tdlm sample {run.argument}")
    parts = []
    for place, group in enumerate(run.samples):
        items = [_sample(sample) for sample in dicts(group.get("samples"))]
        title = words(group.get("title") or ("Samples" if len(run.samples) == 1 else f"Samples {place + 1}"))
        rest = f"<div class=samples>{''.join(items[SHOWN:])}</div>" if len(items) > SHOWN else ""
        if rest:
            rest = f"<details><summary>{len(items) - SHOWN} more</summary>{rest}</details>"
        settings = f'<p class="settings">{esc(_settings(group))}</p>' if _settings(group) else ""
        key = ('<p class="legend"><span><mark class="given">text</mark> given</span>'
               "<span>text &ensp;made by the model</span></p>" if any("<mark" in item for item in items) else "")
        parts.append(f'<h3>{esc(title)}</h3>{settings}{key}<div class="samples">{"".join(items[:SHOWN])}</div>{rest}')
    picked = "<p>Nothing was picked: these are the first samples of the seeds shown, as they came.</p>"
    return judged(run) + picked + "".join(parts)


def judged(run: Run) -> str:
    """What another language model says of the samples, beside human text of the same kind."""
    judge, own, human = judge_name(run.quality), *(mapping(run.quality.get(name)) for name in ("samples", "human"))
    if judge is None or number(own.get("perplexity")) is None:
        return ""
    rows = [("", f"{whole(own.get('count'))} samples", "human text")]
    rows += [(name, *(fixed(value(texts), digits) for texts in (own, human))) for name, digits, value in (
        ("generative perplexity", 1, lambda texts: texts.get("perplexity")),
        ("entropy, nats", 2, lambda texts: texts.get("entropy")),
        ("distinct-2", 3, lambda texts: mapping(texts.get("distinct")).get("2")))]
    table = "".join(f"<tr><th>{esc(name)}</th><td>{esc(made)}</td><td>{esc(held)}</td></tr>" for name, made, held in rows)
    return (f"<p>Judged by {esc(judge)}. The numbers to come near to are those of human text, from either side: repetition "
            f'makes a perplexity lower without making a text better.</p><table class="facts">{table}</table>')


def _settings(group: dict[str, Any]) -> str:
    settings = mapping(group.get("settings"))
    items = [f"{label(name)} {words(value)}" for name, value in settings.items() if value is not None]
    made = group.get("evaluations")
    if (count := number(mapping(made).get("mean") if isinstance(made, dict) else made)) is not None:
        items.append(f"{whole(count)} network evaluations")
    if number(group.get("seconds")) is not None:
        items.append(duration(group["seconds"]))
    return " \N{MIDDLE DOT} ".join(items)


def _sample(sample: dict[str, Any]) -> str:
    text = sample.get("text")
    text = text if isinstance(text, str) else words(text)
    count = len(sample["tokens"]) if isinstance(sample.get("tokens"), list) else None
    size_note = f"<footer>{count} tokens</footer>" if count is not None else ""
    return f'<blockquote><p>{marked(text, sample.get("spans"))}</p>{size_note}</blockquote>'


def marked(text: str, spans: Any) -> str:
    """The text with its given parts marked; spans are [start, end, "given" | "made"] in characters of the text."""
    pieces, place = [], 0
    for span in spans if isinstance(spans, list) else []:
        if not (isinstance(span, list) and len(span) == 3 and all(isinstance(end, int) for end in span[:2])):
            continue
        start, end = max(place, span[0]), min(len(text), span[1])
        if start >= end or span[2] != "given":
            continue
        pieces.append(f'{esc(text[place:start])}<mark class="given">{esc(text[start:end])}</mark>')
        place = end
    return "".join(pieces) + esc(text[place:])


def facts(run: Run) -> str:
    """Speed, size and time."""
    rows: list[tuple[str, str]] = []
    last = run.train[-1] if run.train else {}
    speeds = [value for line in run.train if (value := number(line.get("tokens_per_second"))) is not None]
    memory = [value for line in run.train if (value := number(line.get("memory"))) is not None]
    if run.train:
        rows += [("steps", whole(last.get("step"))), ("tokens seen", short(last.get("tokens"))),
                 ("time", duration(last.get("seconds")))]
    if speeds:
        rows.append(("speed, median", f"{short(statistics.median(speeds))} tokens/s"))
    if memory:
        rows.append(("peak memory", size(max(memory))))
    if run.provenance.get("device"):
        rows.append(("device", esc(words(run.provenance["device"]))))
    table = f"<table class=facts>{_rows(rows)}</table>" if rows else ""
    parts = {name: value for name, item in mapping(run.provenance.get("parameters")).items()
             if (value := number(item)) is not None}
    parts.pop("elsewhere", None)  # a sum of other parts
    total = parts.pop("total", sum(parts.values()))
    chart = bars([Bar(label(name), value, css="plain", text=f"{whole(value)} ({100 * value / (total or 1):.1f}%)")
                  for name, value in sorted(parts.items(), key=lambda item: -item[1]) if value],
                 caption=f"Parameters: {whole(total)} in all") if parts else ""
    return f'<div class="pair">{table}{chart}</div>' if table or chart else missing(
        "No training record.", f"tdlm train RECIPE --data DIR --tree FILE --out {run.argument}")


def provenance(run: Run, key: str) -> str:
    """How each number came about; the headline's figures link here."""
    head = run.headline or {}
    names = ("step", "estimator", "repeats", "pad", "tokens", "documents", "bytes")
    how = {name: head[name] for name in names if name in head}
    text = _dict(how)
    error = "the error is one Monte-Carlo standard error, over the noise, on these rows"
    kind = "continuous-time bound on -log p" if is_bound(head) else "not a bound (PAD mode drop)"
    figures = [("bound", plus_minus(head.get("bound"), head.get("error")), f"nats/token, {kind}; {error}; {text}"),
               ("perplexity", fixed(head.get("perplexity"), 2), "exp(bound)"),
               ("bits-per-byte", fixed(head.get("bits_per_byte")), "bound x tokens / bytes / ln 2")]
    counting = "interpolated Kneser-Ney, counted on the train split, scored on the same tokens as the bound"
    figures += [(name, fixed(value), counting) for name, value in run.ngrams.items()]
    rows = "".join(f'<tr id="{key}-p-{name}"><th>{esc(name.replace("-", " "))}</th><td>{value}</td><td>{esc(how)}</td>'
                   "</tr>" for name, value, how in figures)
    shown = f'<h4>The figures</h4><div class="scroll"><table class="facts figures">{rows}</table></div>' if head else ""
    origins = [("Training", run.provenance)]
    if run.eval is not None:
        origins.append(("Evaluation", mapping(run.eval.get("provenance"))))
    origins += [(f"Samples {place + 1}", mapping(group.get("provenance"))) for place, group in enumerate(run.samples)]
    seed = run.setting("train", "seed")
    tables = ""
    for name, origin in origins:
        items = [(esc(label(field)), f"<code>{esc(words(value))}</code>") for field, value in _flat(origin)]
        if name == "Training" and seed is not None:
            items.append(("seed", f"<code>{esc(words(seed))}</code>"))
        tables += f"<h4>{esc(name)}</h4><table class=facts>{_rows(items)}</table>" if items else ""
    files = "".join(f"<tr><th>{esc(name)}</th><td>{size(count)}</td><td><code>{digest}</code></td></tr>"
                    for name, count, digest in run.files)
    config = json.dumps(run.config, indent=2, ensure_ascii=False, sort_keys=False)
    return (f'<details class="provenance" id="{key}-provenance"><summary>Where every number comes from</summary>'
            f"{shown}{tables}"
            "<h4>Files this page was made from (xxh3-128)</h4>"
            f'<div class="scroll"><table class="facts">{files}</table></div>'
            f"<h4>Configuration</h4><pre>{esc(config)}</pre></details>")


def _flat(origin: dict[str, Any], where: str = "") -> list[tuple[str, Any]]:
    """Nested provenance as one list of names and values."""
    found: list[tuple[str, Any]] = []
    for name, value in origin.items():
        if isinstance(value, dict) and name != "parameters":
            found += _flat(value, f"{where}{name} ")
        elif name != "parameters":
            found.append((f"{where}{name}", value))
    return found


def _dict(values: dict[str, Any]) -> str:
    return "; ".join(f"{label(name)} {whole(value) if number(value) is not None else words(value)}"
                     for name, value in values.items())


def _rows(rows: list[tuple[str, str]]) -> str:
    return "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
