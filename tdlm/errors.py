"""Errors that a user can meet. Each message says what was expected, what came and what to do, on one line."""
from __future__ import annotations


class TdlmError(Exception):
    """A mistake that the user can mend. The command line prints the message without a traceback and exits with 2."""


class DataError(TdlmError):
    """A corpus or a prepared folder that cannot be read."""


class TokenizerError(TdlmError):
    """A tokenizer that cannot be read, or that is not the one something was made with."""


class TreeError(TdlmError):
    """A tree that breaks an invariant, or that cannot be built as asked."""


class ConfigError(TdlmError):
    """A setting that is unknown, has a wrong value or contradicts another."""


class RunError(TdlmError):
    """A run folder that cannot be used: in use, damaged, or made with other settings."""


class SampleError(TdlmError):
    """A request to the sampler that cannot be met."""
