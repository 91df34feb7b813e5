"""Names for the parts of a run, so that a configuration can be written as JSON and read back.

Every choice (process, head, method, ...) is a frozen dataclass registered under a short kind. JSON holds
`{"kind": "cascade", "alpha": {"kind": "linear"}}`; the class is the dispatch, nothing asks for names elsewhere.
A part from outside the package registers itself on import (`tdlm --plugin my_module ...`).
"""
from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import ConfigError

KINDS: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


def register(kind: str) -> Callable[[Class], Class]:
    """Class decorator: this dataclass is called `kind` in configuration files."""

    def add(cls: Class) -> Class:
        taken = KINDS.get(kind)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"two parts are called {kind!r}: {taken.__module__} and {cls.__module__}; rename one")
        KINDS[kind] = cls
        cls.kind = kind
        return cls

    return add


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a near miss, otherwise the list of what is known."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def to_json(value: Any) -> Any:
    """Plain JSON data for a (nested) dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        kind = getattr(type(value), "kind", None)
        return {"kind": kind, **fields} if kind else fields
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(expected: Any, data: Any, where: str = "config") -> Any:
    """The value that `to_json` wrote, checked against the annotation `expected`; errors name the field."""
    if isinstance(data, dict) and "kind" in data:
        cls = KINDS.get(data["kind"])
        if cls is None:
            raise ConfigError(f"{where}: unknown kind {data['kind']!r}{suggest(str(data['kind']), KINDS)} "
                              "(a part from outside the package needs --plugin MODULE)")
        return _dataclass(cls, {name: item for name, item in data.items() if name != "kind"}, where)
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if dataclasses.is_dataclass(expected) and isinstance(data, dict):
        return _dataclass(typing.cast(type, expected), data, where)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        inside: ConfigError | None = None
        for option in arguments:
            try:
                return from_json(option, data, where)
            except ConfigError as error:
                if not str(error).startswith(f"{where}: "):  # this option is meant, and something in it is wrong
                    inside = error
        raise inside or ConfigError(f"{where}: {_wanted(expected)} is expected, got {data!r}")
    if origin is typing.Literal:
        if data not in arguments:
            raise ConfigError(f"{where}: {data!r} is not allowed; choose one of {', '.join(map(repr, arguments))}")
        return data
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise ConfigError(f"{where}: {_wanted(expected)} is expected, got {data!r}")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(from_json(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(data) != len(arguments):
            raise ConfigError(f"{where}: {len(arguments)} values are expected, got {len(data)}")
        return tuple(from_json(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(arguments, data)))
    return _plain(expected, data, where)


def _plain(expected: Any, data: Any, where: str) -> Any:
    if expected is Any:
        return data
    if expected is type(None) and data is None:
        return None
    if expected is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(expected, type) and isinstance(data, expected) and (expected is bool or not isinstance(data, bool)):
        return data
    raise ConfigError(f"{where}: {_wanted(expected)} is expected, got {data!r}")


def _wanted(expected: Any) -> str:
    """What fits an annotation, in words: all that does."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_wanted, arguments))
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return "a list" if arguments[-1] is Ellipsis else f"a list of {len(arguments)} values"
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    return {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false",
            "NoneType": "none"}.get(name, name)


def _dataclass(cls: type, data: dict[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(cls)
    names = {field.name for field in dataclasses.fields(cls)}
    for name in data:
        if name not in names:
            raise ConfigError(f"{where}: no setting {name!r}{suggest(name, names)}")
    values = {name: from_json(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from None
