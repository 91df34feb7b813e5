"""What the parser has to say about a mistake, in one line: it explains itself in a box of several."""
from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from ..errors import ConfigError

_NUMBERS = {"int()": "a whole number", "float": "a number"}


def parsed(parse: Callable[[], Any], typed: Sequence[str], verbs: Container[str]) -> Any:
    """What `parse` returns; its complaint as a ConfigError that ends with the help of the verb that was typed. (`--help`
    leaves through here as it came.)"""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return parse()
    except SystemExit as leaving:
        if not leaving.code:
            raise
        verb = itertools.takewhile(verbs.__contains__, typed)
        raise ConfigError(f"{one_line(box.getvalue())} (see: {' '.join(['tdlm', *verb])} --help)") from None


def one_line(box: str) -> str:
    """The complaint and the nearest thing that exists.

    Sections stand between rules, behind the title; what is indented by eight is help text for an entry above it."""
    sections: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip("│ ")
        if "──" in text or set(text) == {"-"}:
            sections.append([])
        elif text and len(line) - len(line.lstrip("│ ")) < 8:
            sections[-1].append(text)
    parts = [section for section in sections[1:] if section] or [["the command cannot be read"]]
    complaint = " ".join(parts[0]).split(" Got errors")[0].rstrip(".")
    if value := re.search(r"Error parsing (\S+):.*(int\(\)|float).*?: '(.*?)'", " ".join(parts[0])):
        complaint = f"{value[1]}: {_NUMBERS[value[2]]} is expected, got {value[3]!r}"
    elif value := re.search(r"Error parsing (\S+): no type matching .* could be instantiated from (.*)", complaint):
        complaint = f"{value[1]}: cannot be read from {value[2]}"
    others = [" ".join(section) for section in parts[1:] if section[0].startswith(("Available", "Unrecognized"))]
    near = next((section[1].split()[0] for section in parts if section[0].startswith("Perhaps") and len(section) > 1), None)
    sentences = [complaint, *others, *([f"did you mean {near}?"] if near else [])]
    return "; ".join(sentence if sentence.startswith("-") else sentence[:1].lower() + sentence[1:] for sentence in sentences)
