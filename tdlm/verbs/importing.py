"""`tdlm import`: a published checkpoint of GIDD or MDLM as a run folder, which every other verb then understands.

The folder is that of a run whose training was done elsewhere: configuration, star tree, tokenizer, and one checkpoint at
step 0. It has no optimizer state, so it cannot be continued; another run can begin with it (`tdlm train ... --init`).
"""
from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from ..assemble import assemble
from ..config import DataConfig, RunConfig
from ..data.tokenizer import Tokenizer
from ..errors import RunError
from ..files import bytes_hash
from ..model.imports import Imported, checkpoint_files, parse, read_checkpoint
from ..model.model import count_parameters
from ..objectives import gidd, mdlm  # noqa: F401 - registers the methods
from ..registry import KINDS
from ..train import checkpoint, folder
from ..train.provenance import provenance
from ..tree.tree import Tree

MASKS = ("[MASK]", "<mask>", "<|mask|>", "<MASK>")


def import_gidd(path_or_hub: str | Path, *, tokens: int | None = None, heads: int | None = None,
                p_uniform: float | None = None) -> tuple[RunConfig, dict[str, Tensor], Tree]:
    """Configuration, model tensors and star tree of a checkpoint of GIDD; `mdlm:...` reads one of MDLM.

    `tokens` (V, PAD included) is needed where rows were rounded up, `p_uniform` where no config.json tells it.
    """
    held = read_checkpoint(path_or_hub, tokens=tokens, heads=heads)
    return config_of(held, p_uniform), held.tensors, Tree.star(held.tokens)


def config_of(held: Imported, p_uniform: float | None) -> RunConfig:
    """The method, backbone and rows that a checkpoint was trained with (its training settings are not in it)."""
    if held.family == "mdlm":
        if p_uniform is not None:
            raise RunError(f"{held.name} is an MDLM, which has no uniform noise; leave out --p-uniform")
        method, layout = KINDS["mdlm"](), "packed"
    else:
        share = held.settings.get("p_uniform") if p_uniform is None else p_uniform
        if not isinstance(share, int | float):
            raise RunError(f"{held.name} does not say how much uniform noise it was trained with; give it: --p-uniform 0.0, 0.1 "
                           "or 0.2 (it stands in the name of GIDD's published checkpoints)")
        method, layout = KINDS["gidd"](p_uniform=float(share)), "document"
    return RunConfig(held.name.rpartition("/")[2].removesuffix(".safetensors"), method,
                     data=DataConfig(length=held.length, layout=layout), backbone=held.backbone)


def import_run(spec: str | Path, out: Path | str, *, tokenizer: Path | str | None = None, heads: int | None = None,
               p_uniform: float | None = None, command: str | None = None) -> dict[str, Any]:
    """Write the run folder `out`; returns a summary. Without `tokenizer` the one in the checkpoint's folder is taken."""
    out = Path(out)
    own = tokenizer_of(spec, tokenizer)
    held = read_checkpoint(spec, tokens=own.size, heads=heads)
    _check_missing(held, own)
    config, tree = config_of(held, p_uniform), Tree.star(held.tokens, own.hash)
    model = assemble(config, tree, pad_id=own.pad_id).model
    checkpoint.fill(model, held.tensors, Path(held.name))  # what does not fit is found before anything is written
    content = tree.to_bytes()
    with folder.hold(out):
        if folder.read(out) is not None:
            raise RunError(f"{out} is a run already; choose a new --out")
        folder.keep_copies(out, content, bytes_hash(content), own.save)
        checkpoint.save(out, 0, {"model": checkpoint.model_tensors(model)}, {})
        facts = provenance("cpu", command=command or shlex.join(["tdlm", *sys.argv[1:]]), tokenizer_hash=own.hash,
                           tree_hash=bytes_hash(content), parameters=count_parameters(model),
                           imported={"from": held.name, "family": held.family, "hash": held.hash,
                                     "unknown_tokens": list(held.missing)})
        folder.create(out, config.to_json(), facts)
    return {"run": str(out), "name": config.name, "from": held.name, "family": held.family, "hash": held.hash, "tokens": own.size,
            "length": held.length, "parameters": count_parameters(model), "config": config.to_json()}


def tokenizer_of(spec: str | Path, given: Path | str | None) -> Tokenizer:
    """The tokenizer given, or the one beside the weights, without MASK: our MASK is the root of the tree and no token."""
    if given is None:
        place = parse(spec)[1]
        files, _ = checkpoint_files(place)
        given = files[0].parent / "tokenizer.json"
        if not given.is_file():
            raise RunError(f"{files[0].parent} holds no tokenizer.json; give the one it was trained with: --tokenizer FILE")
    found = Tokenizer.load(given)
    data = json.loads(found.to_json())
    kept = [item for item in data["added_tokens"] if not (item["id"] == found.size - 1 and item["content"] in MASKS)]
    return found if len(kept) == len(data["added_tokens"]) else Tokenizer({**data, "added_tokens": kept})


def _check_missing(held: Imported, tokenizer: Tokenizer) -> None:
    """Only PAD may be unknown to the checkpoint."""
    if held.missing not in ((), (tokenizer.pad_id,)):
        raise RunError(f"{held.name} has no row for token {held.missing[0]}, and PAD is {tokenizer.pad_id}; it was trained with "
                       "another tokenizer: give that one")
