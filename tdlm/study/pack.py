"""A study in one small file, to be carried to another machine: everything but the weights.

    conduct(..., out) there;  pack(out, file);  tar -xzf FILE -C OUT here;  conduct(..., out) goes on and makes the tables

Every run folder has its copies of tree and tokenizer: equal ones go in once and are linked.
"""
from __future__ import annotations

import os
import tarfile
from pathlib import Path

from ..files import file_hash
from ..train import checkpoint
from ..train.folder import TOKENIZER, TREE

APART = {checkpoint.FOLDER, "data"}
"""Folders that stay: weights, and the novels of the toy size."""


def pack(out: Path, file: Path) -> int:
    """Writes a .tar.gz; returns its size in bytes."""
    first: dict[str, str] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.partial")
    with tarfile.open(beside, "w:gz", dereference=True) as archive:
        for path in sorted(out.rglob("*")):
            name = path.relative_to(out)
            if not path.is_file() or path == file or name.name.startswith(".") or APART & {*name.parts[:-1]}:
                continue
            item = archive.gettarinfo(path, str(name))
            item.uid, item.gid, item.uname, item.gname = 0, 0, "", ""
            item.type, item.size = tarfile.REGTYPE, path.stat().st_size  # two names of one file count as two files here
            copied = name.name in (TREE, TOKENIZER) or path.suffix == ".safetensors"
            again = first.setdefault(file_hash(path), item.name) if copied else item.name
            if again != item.name:
                item.type, item.linkname, item.size = tarfile.LNKTYPE, again, 0
                archive.addfile(item)
                continue
            with path.open("rb") as content:
                archive.addfile(item, content)
    os.replace(beside, file)
    return file.stat().st_size
