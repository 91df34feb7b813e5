"""Durable files: what stands under a final name is whole. Write beside it, fsync, rename, fsync the folder."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from .errors import RunError


def sync(path: Path) -> None:
    """fsync a file or a folder (a rename is durable only when its folder is)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content` atomically and durably. What is no file (a pipe, /dev/stdout) is written to, never
    replaced; a symbolic link stays one. Errors name `path`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)
        else:
            _replace(path.resolve(), content)
    except OSError as error:
        number = errno.ENOTDIR if isinstance(error, FileExistsError) else error.errno or errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8", "surrogateescape"))  # names that the locale could not read keep their bytes


def json_text(value: Any, **options: Any) -> str:
    """JSON knows no infinity and no NaN: such a number (a perplexity that no float holds) is null."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, value: Any) -> None:
    write_text(path, json_text(value, indent=1, ensure_ascii=False) + "\n")


def bytes_hash(content: bytes) -> str:
    """`file_hash` of what is not in a file (yet)."""
    return xxhash.xxh3_128_hexdigest(content)


def file_hash(path: Path) -> str:
    """xxh3_128 of a file's bytes: catches the flipped bit that tensor formats load silently."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold an exclusive lock file; the kernel releases it when the process dies, however it dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"{what} is being written by another process; wait for it or choose another folder") from None
        yield
