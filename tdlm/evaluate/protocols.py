"""What a perplexity is about, by name: which rows, which tokens count, how rows are averaged, what becomes of PAD.

Published perplexities differ in all of these, so a number is worth nothing without them. With R_d the nats of row d and
T_d its real tokens (all but PAD; BOS and EOS count):

    average over tokens    exp( sum_d R_d / sum_d T_d )
    average over batches   exp( mean over batches of (sum_d R_d / sum_d T_d in the batch) ), weighted by the batches' rows

The second one depends on the batch size, which therefore belongs to the protocol. Rows are `document` (one document, BOS
and EOS where the tokenizer has them, one window of a long one, PAD behind a short one), `packed` (the stream of documents
joined by EOS, cut) or `framed` (the same stream cut into pieces of S - 2, each between a BOS and an EOS).

  strict            this package's own: rows as the run was trained on, average over tokens, and a true bound
  gidd-512-nopack   GIDD, HDLM and the paper: documents in rows of 512, PAD mode `drop` (not a bound), average over batches
                    of 64 rows. Theirs crops at random anew in every run; here the window is a function of the document's
                    number. Theirs draws t from [1e-4, 1 - 1e-4]; here from all of (0, 1).
  mdlm-1024-pack    MDLM, DUO, BD3: framed rows of 1024, average over tokens
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast
from typing import Protocol as Shape

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..config import DataConfig
from ..data.batches import eval_rows
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..errors import ConfigError, DataError
from ..objectives.base import Pad
from ..registry import suggest
from .likelihood import Bound, bound_of

NORMALISER = "real tokens: all but PAD, BOS and EOS included"
Layout = Literal["document", "packed", "framed"]


class Text(Shape):
    """What rows are made of: a prepared folder (`TokenStore`), or texts in memory (`sets.TextStore`)."""

    eos_id: int | None
    bos_id: int | None

    def token_range(self, split: str) -> tuple[int, int]:
        ...

    def stream(self, start: int, stop: int) -> np.ndarray:
        ...


@dataclass(frozen=True)
class Protocol:
    name: str
    layout: Layout | None = None
    """None, here and below: as the run was trained."""
    length: int | None = None
    pad: Pad | None = None
    average: Literal["tokens", "batches"] = "tokens"
    batch: int = 64
    """Rows a batch of the average over batches; both averages are recorded."""
    estimator: str | None = None
    """None: the most precise one that is valid. A method that does not have it uses its own."""
    marks: bool = False
    """Whether rows need BOS and EOS."""

    def changed(self, **wishes: Any) -> Protocol:
        """With some settings different; the name then says so, so that nobody takes it for the original."""
        wishes = {key: value for key, value in wishes.items() if value is not None and value != getattr(self, key)}
        name = f"{self.name} with {', '.join(f'{key}={value}' for key, value in wishes.items())}" if wishes else self.name
        return replace(self, name=name, **wishes)

    def of(self, data: DataConfig, pad: Pad) -> Protocol:
        """With what the protocol leaves to the run filled in. `strict` is no longer strict where PAD is dropped."""
        if self.pad is None and pad == "drop":
            return self.changed(pad=pad).of(data, pad)
        length = data.length if self.length is None else self.length
        return replace(self, layout=self.layout or data.layout, length=length, pad=self.pad or pad)

    def to_json(self) -> dict[str, Any]:
        """What is printed with every number (of a protocol that was filled in)."""
        return {"name": self.name, "layout": self.layout, "length": self.length, "normaliser": NORMALISER, "pad": self.pad,
                "average": self.average, "batch": self.batch, "estimator": self.estimator or "best"}


PROTOCOLS = {protocol.name: protocol for protocol in (
    Protocol("strict"),
    Protocol("gidd-512-nopack", "document", 512, "drop", "batches", estimator="sampled", marks=True),
    Protocol("mdlm-1024-pack", "framed", 1024, "count", "tokens", estimator="sampled", marks=True),
)}


def protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise ConfigError(f"no evaluation protocol {name!r}{suggest(name, PROTOCOLS)}")
    return PROTOCOLS[name]


def check(protocol: Protocol, tokenizer: Tokenizer, *, longest: int | None, who: str) -> None:
    """Refuse what does not fit: marks that the tokenizer lacks, rows longer than the network knows."""
    assert protocol.length is not None
    if protocol.length < 1:
        raise ConfigError(f"a row has at least one token, got --length {protocol.length}")
    missing = [name for name, number in (("BOS", tokenizer.bos_id), ("EOS", tokenizer.eos_id)) if number is None]
    if protocol.marks and missing:
        raise ConfigError(f"the protocol {protocol.name} puts BOS and EOS into its rows, but the tokenizer has no "
                          f"{' and no '.join(missing)}; use --protocol strict")
    if longest is not None and protocol.length > longest:
        raise ConfigError(f"the protocol {protocol.name} scores rows of {protocol.length} tokens, but {who} knows only "
                          f"{longest} positions; use --length {longest} (the name will say so) or another protocol")
    if protocol.layout == "framed" and protocol.length < 3:
        raise ConfigError(f"a framed row needs at least 3 tokens (BOS, text, EOS), got --length {protocol.length}")


def protocol_rows(protocol: Protocol, text: Text, *, split: str = "valid", limit: int | None = None) -> Int[Tensor, "R S"]:
    """The rows that the protocol scores: the same in every run."""
    assert protocol.length is not None and protocol.layout is not None
    if protocol.layout != "framed":
        rows = eval_rows(cast(TokenStore, text), length=protocol.length, layout=protocol.layout, split=split, limit=limit)
        return rows.batch(0, len(rows)).tokens
    if limit is not None and limit < 1:
        raise ConfigError(f"at least one row must be evaluated, got a limit of {limit}")
    assert text.bos_id is not None and text.eos_id is not None
    (first, stop), inside = text.token_range(split), protocol.length - 2
    count = min((stop - first) // inside, limit or stop)
    if not count:
        raise DataError(f"the text has {stop - first} tokens, fewer than one framed row of {protocol.length}; use a shorter "
                        "--length")
    body = torch.from_numpy(text.stream(first, first + count * inside).astype(np.int64)).view(count, inside)
    edge = torch.ones(count, 1, dtype=torch.int64)
    return torch.cat([edge * text.bos_id, body, edge * text.eos_id], 1)


def under(protocol: Protocol, bound: Bound) -> Bound:
    """The number in the protocol's own average."""
    return bound.averaged(protocol.batch) if protocol.average == "batches" else bound


def averages(protocol: Protocol, bound: Bound) -> dict[str, float]:
    """Both averages, in nats per token."""
    over_tokens = bound_of(bound.estimates, bound.row_tokens, estimator=bound.estimator, pad=bound.pad,
                           is_bound=bound.is_bound)
    return {"tokens": over_tokens.nats, "batches": bound.averaged(protocol.batch).nats}
