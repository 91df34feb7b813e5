"""What the verbs of the command line share: how options look, what is said beside the result, and plug-ins."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

from ..errors import ConfigError

Flag = Annotated[bool, FlagCreatePairsOff]
Folder = Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")]
File = Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")]
Text = Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")]
Whole = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
Several = Annotated[tuple[str, ...], UseAppendAction, arg(help_behavior_hint="")]
Plugins = Annotated[tuple[str, ...], UseAppendAction, arg(metavar="MODULE", help_behavior_hint="")]


def say(line: str) -> None:
    """Everything that is not the result."""
    print(line, file=sys.stderr, flush=True)


def show_json(result: dict[str, Any]) -> None:
    """The result, on stdout. (ASCII: the same under every locale.)"""
    from ..files import json_text

    print(json_text(result))


def typed(text: str | None) -> str | None:
    """Text from the command line, which a locale that is not UTF-8 leaves as single bytes."""
    return text if text is None else os.fsencode(text).decode("utf-8", "replace")


def import_plugins(names: Sequence[str]) -> None:
    """Import modules that register their own parts; the current folder counts as a place to find them."""
    import importlib

    for name in names:
        sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise
            raise ConfigError(f"--plugin {name}: no such module here or among the installed packages") from None
        finally:
            sys.path.pop(0)
