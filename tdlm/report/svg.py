"""SVG made fit to stand inside an HTML page: nothing active, nothing loaded, no id that clashes with another figure's.

Figures are drawn in stand-in colours, which become the page's CSS variables here: the same figure then follows the
reader's light or dark mode.
"""
from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

from ..errors import RunError

ACTIVE = {"script", "style", "foreignObject", "iframe", "metadata", "audio", "video", "handler", "set", "animate"}
# matplotlib's own rule, which report.css repeats for its figures.
HARMLESS_STYLE = re.compile(r"\s*\*\{stroke-linejoin: round; stroke-linecap: butt\}\s*")
LOADS = re.compile(r"url\(\s*['\"]?(?!#)|@import|expression\(")
LINKS = ("href", "{http://www.w3.org/1999/xlink}href")


def inline_svg(text: str, prefix: str, *, title: str, colours: dict[str, str] | None = None, css: str = "") -> str:
    """One <svg> element for the page; ids begin with `prefix`, `colours` maps #rrggbb to CSS values."""
    root = _parse(text, title)
    if any(_name(node) == "style" and not HARMLESS_STYLE.fullmatch(node.text or "") for node in root.iter()):
        return _picture(root, title, css)  # its rules would reach the whole page, so it stays in a world of its own
    _clean(root)
    used = set(re.findall(r"#([\w.:-]+)\)", _serial(root)))
    used |= {node.get("href", "")[1:] for node in root.iter()}
    for node in root.iter():
        for name, value in list(node.attrib.items()):
            node.set(name, re.sub(r"url\(#([\w.:-]+)\)", rf"url(#{prefix}-\1)", value))
        if "id" in node.attrib:
            own = node.attrib.pop("id")
            if own in used:
                node.set("id", f"{prefix}-{own}")
        if node.get("href"):
            node.set("href", f"#{prefix}-{node.attrib['href'][1:]}")
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", title)
    if css:
        root.set("class", css)
    written = _serial(root)
    for colour, value in (colours or {}).items():
        written = written.replace(colour, value)
    return written


def _parse(text: str, title: str) -> ElementTree.Element:
    if "<!ENTITY" in text:
        raise RunError(f"the picture {title!r} defines XML entities, which a report does not take; make it again")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise RunError(f"the picture {title!r} is not valid SVG ({error}); make it again") from None
    if _name(root) != "svg":
        raise RunError(f"the picture {title!r} is a <{_name(root)}> instead of an <svg>; make it again")
    if "viewBox" not in root.attrib:
        size = [re.sub(r"[a-z%]+$", "", root.get(side, "")) or "300" for side in ("width", "height")]
        root.set("viewBox", f"0 0 {size[0]} {size[1]}")
    return root


def _name(node: ElementTree.Element) -> str:
    return node.tag.rpartition("}")[2] if isinstance(node.tag, str) else ""


def _clean(root: ElementTree.Element) -> None:
    """Drop what acts or loads, and the namespaces, which HTML does not need."""
    for parent in list(root.iter()):
        for child in list(parent):
            if _name(child) in ACTIVE or not _name(child):
                parent.remove(child)
    for node in root.iter():
        for name, value in list(node.attrib.items()):
            plain = name.rpartition("}")[2]
            link = name in LINKS
            outside = link and not value.startswith("#")
            if outside or LOADS.search(value) or plain.lower().startswith("on"):
                del node.attrib[name]
            elif link or plain != name:
                del node.attrib[name]
                node.set("href" if link else plain, value)
        node.tag = _name(node)


def _serial(root: ElementTree.Element) -> str:
    text = ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)
    return re.sub(r">\s+<", "><", text)


def _picture(root: ElementTree.Element, title: str, css: str) -> str:
    """As an image: scripts and loads do not work there by the browser's rules."""
    ElementTree.register_namespace("", "http://www.w3.org/2000/svg")
    coded = base64.b64encode(ElementTree.tostring(root)).decode()
    name = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<img class="{css}" alt="{name}" src="data:image/svg+xml;base64,{coded}">'
