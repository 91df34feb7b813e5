"""What the command line shows a person: progress while something runs, and results as a few lines. All on stderr but
the results. Without a terminal progress is a plain line now and then."""
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

QUIET_SECONDS = 10.0
"""Without a terminal: at most one progress line in so many seconds."""


class Ticker:
    """One line that is rewritten on a terminal, and printed rarely elsewhere."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.last = time.monotonic() - (QUIET_SECONDS - 1 if not self.live else 1)
        self.width = 0

    def show(self, line: str) -> None:
        now = time.monotonic()
        if now - self.last < (0.1 if self.live else QUIET_SECONDS):
            return
        self.last = now
        if self.live:
            sys.stderr.write("\r" + line.ljust(self.width))
            self.width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        if self.live and self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()


@contextlib.contextmanager
def counter(what: str) -> Iterator[Callable[[int, int], None]]:
    """Progress of something with a known number of parts: `with counter("evaluate") as tell: tell(done, of)`."""
    ticker, started = Ticker(), time.monotonic()

    def tell(done: int, of: int) -> None:
        left = (time.monotonic() - started) / max(done, 1) * (of - done)
        ticker.show(f"{what} {done}/{of} ({100 * done // max(of, 1)}%), {left:.0f} s left")

    try:
        yield tell
    finally:
        ticker.clear()


def prepare_line() -> Callable[[Any], None]:
    """The progress of `prepare` as one line."""
    ticker = Ticker()

    def tell(progress: Any) -> None:
        share = "" if progress.fraction is None else f" ({100 * progress.fraction:.0f}%)"
        speed = progress.tokens / progress.seconds if progress.seconds > 0 and not progress.resumed else None
        rate = "" if speed is None else f", {speed / 1e6:.2f}M tokens/s"
        ticker.show(f"prepare: {progress.documents:,} documents, {progress.tokens:,} tokens{share}{rate}")
        if progress.fraction == 1.0:
            ticker.clear()

    return tell


def show_bound(result: dict[str, Any]) -> None:
    """The published number, what stands beside it, and under which protocol it was taken."""
    exact = result["estimator"] == "exact"
    mark = "(not a bound)" if not result["is_a_bound"] else "=" if exact else "<="
    levels, protocol = result["levels"], result["protocol"]
    print(f"{'NLL  ' if exact else 'bound'}   {result['bound']:.4f} nats/token, " +
          ("exact" if exact else f"Monte-Carlo error {result['error']:.4f}"))
    print(f"        perplexity {mark} {result['perplexity']:.2f}" +
          (f", {result['bits_per_byte']:.4f} bits/byte" if "bits_per_byte" in result else ""))
    for level in range(len(levels) - 1, -1, -1) if len(levels) > 1 else ():
        name = "root" if level == len(levels) - 1 else "leaf" if level == 0 else f"level {level}"
        print(f"  {name:8s}{levels[level]:.4f}  error {result['level_errors'][level]:.4f}")
    for name, value in result.get("ngrams", {}).items():
        print(f"{name:8s}{value:.4f} nats/token  ({value - result['bound']:+.3f} beside the bound)")
    text = result.get("set")
    of = f"{text['name']} ({text['source']}, detokeniser {text['detokeniser']})" if text else f"split {result['split']}"
    print(f"on {result['tokens']:,} real tokens in {result['documents']:,} rows of {result['length']}, {of}, layout "
          f"{result['layout']}, PAD mode {result['pad']}, estimator {result['estimator']} x {result['repeats']}" +
          (f", weights of step {result['step']:,}" if "step" in result else ""))
    kinds = {"tokens": "tokens", "batches": f"batches of {protocol['batch']} rows"}
    own = kinds.pop(protocol["average"])
    (other, words), = kinds.items()
    print(f"protocol {protocol['name']}: average over {own} (over {words}: {result['averages'][other]:.4f}); "
          f"{protocol['normaliser']}")
    if "how" in result:
        print(f"scored as {result['how']['scored_as']}, {result['how']['judge_tokens']:,} tokens of {result['model']['name']}; "
              f"numbers are per {result['how']['per']}")


def show_quality(result: dict[str, Any]) -> None:
    """Samples beside human text, measure by measure."""
    samples, human, judge, drawn = result["samples"], result["human"], result["judge"], result["settings"]
    columns = (samples, human)
    print(f"{'':26s}{'samples':>12s}{'human':>12s}")
    for name, key in (("perplexity, corpus", "perplexity"), ("perplexity, mean of texts", "perplexity_per_text"),
                      ("entropy of a text, nats", "entropy"), ("entropy of all, nats", "corpus_entropy")):
        print(f"{name:26s}" + "".join(f"{column[key]:12.3f}" for column in columns))
    for order in samples["distinct"]:
        values = ["-" if (value := column["distinct"][order]) is None else f"{value:.4f}" for column in columns]
        print(f"{'distinct-' + order:26s}" + "".join(f"{value:>12s}" for value in values))
    for name, key in (("texts", "count"), ("judge tokens a text", "tokens_per_text")):
        print(f"{name:26s}" + "".join(f"{column[key]:12,.0f}" for column in columns))
    if "mauve" in result:
        print(f"{'MAUVE':26s}{result['mauve']:12.4f}")
    facts = ("steps", "evaluations", "temperature", "top_p", "min_p", "sampler", "dtype")
    shown = ", ".join(f"{name.replace('_', ' ')} {drawn[name]}" for name in facts if drawn.get(name) is not None)
    print(f"judge {judge['name']} ({judge['dtype']}), at most {result['max_length']} of its tokens a text" +
          (f"; samples: {shown}" if shown else ""))


def show_plan(plan: dict[str, Any]) -> None:
    """A dry run as a short table."""
    parts, tree, memory, logits = plan["parameters"], plan["tree"], plan["memory"], plan["logits"]
    print(f"{plan['name']}: tree of {tree['tokens']:,} tokens, K={tree['branching']}, H={tree['height']}, "
          f"{tree['nodes']:,} nodes ({tree['source']})")
    print(f"parameters  {parts['total'] / 1e6:.2f}M: blocks {parts['blocks'] / 1e6:.2f}M, elsewhere "
          f"{parts['elsewhere'] / 1e6:.2f}M (embedding {parts['embedding'] / 1e6:.2f}M, head {parts['head'] / 1e6:.2f}M)")
    flops = plan["flops_per_token"]
    print(f"FLOPs/token forward {flops['forward'] / 1e6:.0f}M, training {flops['train'] / 1e6:.0f}M")
    print(f"logits      {_size(logits['tree'])} for {logits['micro_batch']} sequences; a dense head over the vocabulary "
          f"{_size(logits['dense'])} ({logits['ratio']:.0f} x)")
    print(f"memory      {_size(memory['total'])} at micro-batch {logits['micro_batch']}: {_size(memory['fixed'])} fixed, "
          f"{_size(memory['per_sequence'])} a sequence ({memory['means']})")
    training = plan["training"]
    print(f"training    {training['steps']:,} steps x {training['batch']} x {training['length']} = "
          f"{training['token_positions'] / 1e9:.2f}B token positions")
    for chip in plan["time"]["chips"]:
        fits = f"micro-batch up to {chip['largest_micro_batch']}" if chip.get("largest_micro_batch") else "does not fit"
        print(f"  {chip['chip']:12s} {_hours(chip['hours']):>10s} at {100 * plan['time']['assumed_mfu']:.0f}% of peak, {fits}")
    for card in plan["cards"]:
        choice = "does not fit" if card["micro_batch"] is None else \
            f"micro-batch {card['micro_batch']}, memory {card['memory']}: {_size(card['predicted'])}"
        print(f"  --card {card['gib']:<5d} {choice}")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return ""


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"


def show_study(result: dict[str, Any]) -> None:
    """Every run's number, best first, and what counting reaches on the same tokens."""
    scores = result["scores"]
    lines = [(score["bound"], name, score) for name, score in scores.items()]
    lines += [(value, name, None) for name, value in next(iter(scores.values()))["ngrams"].items()]
    for value, name, score in sorted(lines, key=lambda entry: entry[0]):
        if score is None:
            print(f"{name:18s} {value:.4f} nats/token   (counting)")
        else:
            mark = "  not a bound" if not score["is_a_bound"] else "  exact" if score["estimator"] == "exact" else ""
            print(f"{name:18s} {value:.4f} nats/token   error {score['error']:.4f}{mark}")
