"""How values are written on the page. Every text that reaches the page goes through `esc`: samples are untrusted."""
from __future__ import annotations

import html
import json
import math
import re
from typing import Any

from .read import number

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
NARROW = "\N{NARROW NO-BREAK SPACE}"


def esc(value: Any) -> str:
    """Text for HTML. Control characters that HTML forbids become the replacement character."""
    text = value if isinstance(value, str) else str(value)
    return html.escape(FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text), quote=True)


def script_json(value: Any) -> str:
    """JSON that may stand inside <script>: no `<`, `>` or `&` survives, so no text can end the element."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def anchor(*parts: Any) -> str:
    """An id for links within the page."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", str(part).lower()).strip("-") or "x" for part in parts)


def fixed(value: Any, digits: int = 3) -> str:
    found = number(value)
    if found is None:
        return DASH
    text = f"{found:,.{digits}f}"
    return text.replace("-", MINUS)


def whole(value: Any) -> str:
    found = number(value)
    return DASH if found is None else f"{round(found):,}".replace("-", MINUS)


def short(value: Any) -> str:
    """A count with a unit that a person can say: 1.2M."""
    found = number(value)
    if found is None:
        return DASH
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(found) >= size:
            return f"{found / size:.3g}{unit}"
    return f"{found:.3g}"


def size(value: Any) -> str:
    """A number of bytes."""
    found = number(value)
    if found is None:
        return DASH
    for step, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if found >= step:
            return f"{found / step:.3g}{NARROW}{unit}"
    return f"{found:.0f}{NARROW}bytes"


def duration(value: Any) -> str:
    found = number(value)
    if found is None:
        return DASH
    if found < 60:
        return f"{found:.3g}{NARROW}s"
    minutes, seconds = divmod(round(found), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count}{NARROW}{unit}" for count, unit in parts[first : first + 2])


def plus_minus(value: Any, error: Any, digits: int = 3) -> str:
    """`5.621 ± 0.004`, with enough digits for the error to show."""
    spread = number(error)
    if number(value) is None or not spread:
        return fixed(value, digits)
    digits = max(digits, min(6, 1 - math.floor(math.log10(spread))))
    return f"{fixed(value, digits)}{NARROW}±{NARROW}{fixed(spread, digits)}"


def words(value: Any) -> str:
    """A setting in words, on one line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return str(value)


def label(name: str) -> str:
    """A key of a JSON file as words."""
    return name.replace("_", " ").strip()
