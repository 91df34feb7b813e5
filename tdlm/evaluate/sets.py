"""Named texts of other people: zero-shot evaluation on WikiText, LAMBADA, PTB, LM1B, AG News, arXiv and PubMed.

    text set  =  where it is found  +  what a document of it is  +  which detokeniser makes running text of it

Several of these corpora are published as words between spaces (`a role , " Craig " , in 9 @-@ 1 @-@ 1`). A model of
running text would pay for that spelling, so the words are joined again before tokenizing. How that is done changes the
perplexity and is part of the protocol; the name of the detokeniser stands beside every number. Perplexities are per
token of the *detokenised* text, bits per byte of its bytes.

    words    punctuation joins its word, brackets and quotes (opened and closed in turn) join what they hold, @-@ @,@ @.@
             lose their signs, = = becomes ==. <unk> stays as it is.
    ptb      `words`, and as in the work it is compared with: N becomes 1, <unk> becomes ?, \\/ becomes /
    none     the text as it is
"""
from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from ..data.documents import Documents
from ..data.sources import ByteStream, Source
from ..data.tokenizer import Tokenizer
from ..errors import DataError
from ..registry import suggest

_SIGNS = {"@-@": "-", "@,@": ",", "@.@": "."}
_QUOTES = {"``": '"', "''": '"'}
_CLOSING = frozenset([*",.;:!?)]}%”", "...", "n't"])
_OPENING = frozenset("([{$£€#“")
_SUFFIX = re.compile(r"['’][A-Za-z]+")
_HEADING = re.compile(r"(?m)^ ?= (?!=).*[^= ] = ?\n ?\n")  # a blank line behind it, or it may be part of a formula
_LONGEST = 1 << 30


@dataclass(frozen=True)
class TextSet:
    """Where a set is found and how it is read."""

    hub: str | None
    """The dataset of the hub that is taken without a path; None where there is none that can be loaded without its own code."""
    unit: str
    """What a document is: article (split at WikiText's headings), record, or line (of a plain file; else record)."""
    detokeniser: str = "none"
    fields: tuple[tuple[str, ...], ...] = (("text",),)
    """Which fields of a record hold the text, joined by a space; the first choice is the hub's, a .jsonl may have any."""


SETS = {
    "wikitext-2": TextSet("Salesforce/wikitext:wikitext-2-raw-v1:test", "article", "words"),
    "wikitext-103": TextSet("Salesforce/wikitext:wikitext-103-raw-v1:test", "article", "words"),
    "lambada": TextSet("EleutherAI/lambada_openai:default:test", "line", "none", (("text",), ("context", "continuation"))),
    "ptb": TextSet(None, "line", "ptb", (("sentence",), ("text",))),
    "lm1b": TextSet(None, "line", "words"),
    "ag_news": TextSet("fancyzhx/ag_news:default:test", "line"),
    "arxiv": TextSet("ccdv/arxiv-summarization:document:test", "line", "words", (("article",), ("text",))),
    "pubmed": TextSet("ccdv/pubmed-summarization:document:test", "line", "words", (("article",), ("text",))),
}


@dataclass(frozen=True)
class Texts:
    """A set that was read: its documents as running text, and what a number about them must say."""

    name: str
    source: str
    texts: list[str]
    detokeniser: str
    unknown: int
    """How often <unk> stood in the original: words that nobody can predict."""

    def to_json(self) -> dict[str, str | int]:
        return {"name": self.name, "source": self.source, "documents": len(self.texts), "detokeniser": self.detokeniser,
                "unknown_words": self.unknown, "fingerprint": self.fingerprint}

    @cached_property
    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for text in self.texts:
            digest.update(f"{len(text)} {text}".encode())
        return digest.hexdigest()


class TextStore:
    """Texts in memory as rows are made of them: documents of token ids, each followed by EOS where there is one."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer) -> None:
        self.folder, self.tokenizer, self.fingerprint = texts.name, tokenizer, texts.fingerprint
        self.size, self.pad_id, self.eos_id, self.bos_id = tokenizer.size, tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id
        end = [] if self.eos_id is None else [self.eos_id]
        parts = [np.append(ids, end).astype(np.int64) for ids in tokenizer.encode_batch(texts.texts)]
        self.starts = np.cumsum([0] + [len(part) for part in parts])
        self._tokens = np.concatenate(parts)

    def documents(self, split: str) -> range:
        return range(len(self.starts) - 1)

    def token_range(self, split: str) -> tuple[int, int]:
        return 0, int(self.starts[-1])

    def stream(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop]


def read_set(wanted: str) -> Texts:
    """`NAME`, from the hub, or `NAME=PATH`, from a file, a folder that holds a test file, or hf:OWNER/NAME:CONFIG:SPLIT."""
    name, _, place = wanted.partition("=")
    if name not in SETS:
        raise DataError(f"no text set {name!r}{suggest(name, SETS)} (give one as --on NAME or --on NAME=PATH)")
    about = SETS[name]
    if not place and about.hub is None:
        raise DataError(f"{name} cannot be fetched from the hub without running its publisher's code; give it as a file: "
                        f"--on {name}=PATH (.txt, .jsonl or .parquet)")
    source = Source(place, "hub") if place.startswith("hf:") else _file(name, Path(place)) if place else \
        Source(f"hf:{about.hub}", "hub")
    originals = list(_documents(about, source))
    unknown = sum(text.count("<unk>") for text in originals)
    texts = [text for original in originals if (text := DETOKENISERS[about.detokeniser](original))]
    if not texts:
        raise DataError(f"{source.name}: holds no text; give the test file of {name}")
    label = Path(source.name).name if source.kind != "hub" else source.name
    return Texts(name, label, texts, about.detokeniser, unknown)


def _file(name: str, path: Path) -> Source:
    path = path.expanduser()
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.is_file() and _kind(one))
        tests = [one for one in files if "test" in one.name.lower()] or files
        if len(tests) != 1:
            raise DataError(f"{path}: one test file is expected, found {len(tests)}; name the file: --on {name}=FILE")
        path = tests[0]
    if not path.exists():
        raise DataError(f"{path}: no such file; give the test file of {name}, or hf:OWNER/NAME:CONFIG:SPLIT")
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: this kind of file cannot be read; supported are .txt, .tokens and .jsonl (also .gz, .bz2, "
                        ".xz, .zst), .parquet")
    return Source(str(path), kind)


def _kind(path: Path) -> str | None:
    found = re.search(r"\.(txt|tokens|jsonl|parquet)(\.(gz|bz2|xz|zst))?$", path.name.lower())
    return None if found is None else {"tokens": "txt"}.get(found[1], found[1])


def _documents(about: TextSet, source: Source) -> Iterator[str]:
    """The documents of a source, as their publisher spelled them."""
    if source.kind == "txt":
        whole = "".join(document.text for document in Documents([source], limit=_LONGEST))
        parts: Iterable[str] = [whole] if about.unit == "article" else whole.split("\n")
    else:
        parts = _records(about, source)
    if about.unit != "article":
        yield from parts
        return
    text = "".join(part if part.endswith("\n") else part + "\n" for part in parts)
    starts = [found.start() for found in _HEADING.finditer(text)] or [0]
    for start, stop in zip([0, *starts], [*starts, len(text)]):
        yield text[start:stop]


def _records(about: TextSet, source: Source) -> Iterator[str]:
    if source.kind == "jsonl":
        for number, row in _json_rows(source):
            texts = [[row.get(name) for name in names] for names in about.fields]
            text = next((" ".join(map(str, parts)) for parts in texts if all(isinstance(part, str) for part in parts)), None)
            if text is None:
                wanted = " or ".join(" + ".join(names) for names in about.fields)
                raise DataError(f"{source.name}: line {number} has no text in {wanted}, but the fields "
                                f"{', '.join(row) or 'none'}; give the test file of the set")
            yield text
        return
    try:
        for document in Documents([source], text_field=about.fields[0][0], title_field=None, limit=_LONGEST):
            yield "\n" * document.empty + document.text  # empty rows are blank lines of an article
    except DataError as error:
        raise DataError(str(error).split("; name the field")[0]) from error


def _json_rows(source: Source) -> Iterator[tuple[int, dict[str, object]]]:
    with ByteStream(source) as stream:
        number = 0
        while line := stream.readline(_LONGEST):
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{source.name}: line {number} is no JSON ({error}); fetch the file again") from None
            if not isinstance(row, dict):
                raise DataError(f"{source.name}: line {number} is no object with a text; give the test file of the set")
            yield number, row


def words_joined(text: str, spelling: dict[str, str] | None = None) -> str:
    """Running text of words between spaces, line by line (empty lines go). `spelling` replaces whole words."""
    lines = (_line_joined(line.split(), spelling or {}) for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def _line_joined(words: list[str], spelling: dict[str, str]) -> str:
    pieces: list[str] = []
    glued, opened = True, dict.fromkeys("\"'", False)  # whether the next word joins the last one; which quotes are open
    for place, word in enumerate(words):
        before, after = False, False
        word = _QUOTES.get(word, word)
        if word in _SIGNS:
            word, before, after = _SIGNS[word], True, True
        elif word in opened:
            possessive = word == "'" and not opened[word] and place > 0 and words[place - 1].endswith("s")
            before = opened[word] or possessive
            after = not before
            opened[word] = after
        elif word in _CLOSING or _SUFFIX.fullmatch(word) or word == "=" == (words[place - 1] if place else ""):
            before = True
        elif word in _OPENING:
            after = True
        pieces.append(("" if glued or before else " ") + spelling.get(word, word).replace("\\/", "/"))
        glued = after
    return "".join(pieces)


DETOKENISERS = {
    "none": str.strip,
    "words": words_joined,
    "ptb": lambda text: words_joined(text, {"N": "1", "<unk>": "?"}),
}
