"""The command line: parse, call one function a verb, print what came of it.

Mistakes of the user (TdlmError, unreadable or unwritable files) are one line on stderr and exit code 2, never a
traceback; Ctrl-C is 130. `--json` prints one machine-readable result on stdout; everything else goes to stderr.
Heavy imports happen inside the verbs, so that `tdlm --help` answers at once.
"""
from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from ..errors import ConfigError, TdlmError
from .make import Export, Import, Prepare, Train, TreeVerb
from .mistakes import parsed
from .use import Compare, Demo, Eval, Quality, Report, Sample, StudyVerb
from .words import say, show_json

Verb = (Annotated[Prepare, subcommand(name="prepare")] | Annotated[TreeVerb, subcommand(name="tree")]
        | Annotated[Train, subcommand(name="train")] | Annotated[Import, subcommand(name="import")]
        | Annotated[Eval, subcommand(name="eval")] | Annotated[Quality, subcommand(name="quality")]
        | Annotated[Sample, subcommand(name="sample")] | Annotated[Report, subcommand(name="report")]
        | Annotated[Export, subcommand(name="export")] | Annotated[Compare, subcommand(name="compare")]
        | Annotated[StudyVerb, subcommand(name="study")]
        | Annotated[Demo, subcommand(name="demo")])
VERBS = ("prepare", "tree", "train", "import", "eval", "quality", "sample", "export", "report", "compare", "study", "demo")


def parse(arguments: Sequence[str]) -> Any:
    from ..registry import suggest

    if arguments and not arguments[0].startswith("-") and arguments[0] not in (*VERBS, "help"):
        raise ConfigError(f"no command {arguments[0]!r}{suggest(arguments[0], VERBS)}")
    if not arguments or list(arguments) == ["help"]:
        arguments = ["--help"]
    if list(arguments[:2]) == ["report", "compare"]:
        arguments = arguments[1:]
    if list(arguments) in (["--version"], ["-V"]):
        from .. import __version__

        print(f"tdlm {__version__}")
        raise SystemExit(0)
    return parsed(lambda: tyro.cli(
        Verb, prog="tdlm", args=list(arguments), config=(OmitArgPrefixes, OmitSubcommandPrefixes),
        description="Tree-structured diffusion language models: build a tree, train, bound, sample, compare."),
        arguments, (*VERBS, "build", "show"))


def main(arguments: Sequence[str] | None = None) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII locale shows ?, it does not end the run
    sys.exit(_guarded(sys.argv[1:] if arguments is None else arguments))


def _guarded(arguments: Sequence[str]) -> int:
    try:
        verb = parse(arguments)
        result = verb.run()
        if verb.json:
            show_json(result)
        sys.stdout.flush()
        return 0
    except TdlmError as error:
        say(f"tdlm: {error}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone: nothing more to say
        return 141
    except KeyboardInterrupt:
        say("tdlm: stopped")
        return 130
    except OSError as error:
        say(f"tdlm: {error.filename or 'a file'}: {error.strerror or error}")
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        say("tdlm: out of memory; a smaller batch (--batch, --set train.micro_batch=N) needs less")
        return 2


def _is_out_of_memory(error: Exception) -> bool:
    """A GPU's allocator has an error of its own, the processor's says so in words."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "t allocate memory" in str(error)
