"""Begin a run with the weights of another network: `train(..., init=PATH)`. Used once, at step 0.

The source is a run of ours (its newest checkpoint, averaged weights if it kept them, or the folder of one checkpoint) or
a checkpoint of GIDD or MDLM (`model/imports.py`). It must have the same tokens, width and heads. What goes where:

* **Blocks** in their order. A target with more of them has the others spread evenly: block i of m goes to place
  floor(i n / m) of n, the places between are new. A new block's modulation is zero (in a backbone without modulations:
  its output matrices), so it is the identity and the deeper network begins as the same function.
* **Condition and modulations** as they are where the condition is of the same kind and size. Otherwise the source's mean
  condition moves into the biases of the modulations (`model/fold.py`), and the target's own condition begins without
  influence; exact when the source was told nothing.
* **Embedding** rows of tokens as they are. On the same tree every node keeps its row; on another one an inner node begins
  at the mean of the rows of the tokens below it, and the root at the source's root, which for GIDD and MDLM is MASK.
* **Head** as it is where tree and head are the same: a flat source gives a flat target the same logits. Where both have
  an output row a token (the shared head of a flat method, a dense head on any tree) the rows go over. Otherwise it keeps
  its own start: the shared head begins at zero; a tied one needs nothing, it reads the embedding.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..config import RunConfig
from ..data.tokenizer import Tokenizer
from ..errors import RunError
from ..files import bytes_hash
from ..model.fold import CONDITION, fold_condition, mean_condition
from ..model.head import Shared
from ..model.imports import parse, read_checkpoint
from ..model.model import Model
from ..tree.tree import TABLES, Tree
from . import checkpoint, folder

BACKBONE, BLOCKS, EMBEDDING, HEAD = "backbone.", "backbone.blocks.", "backbone.embedding.weight", "predictor."
_ENDS = ("attention_out.", "mlp_out.")
"""What a block without modulation writes with."""


@dataclass(frozen=True)
class Source:
    """Weights to begin with, in our names, and the tree whose nodes are the rows of their embedding."""

    name: str
    hash: str
    backbone: Any
    head: Any
    tensors: dict[str, Tensor]
    tree: Tree
    missing: tuple[int, ...] = ()
    """Tokens that the source does not know."""
    step: int | None = None

    @property
    def label(self) -> str:
        """What tells two sources apart, in a run's provenance."""
        return f"{self.name}@{self.hash}"


def open_source(path: str | Path, tokenizer: Tokenizer, warn: Callable[[str], None] | None = None) -> Source:
    """A run folder, the folder of one checkpoint, or a checkpoint of GIDD or MDLM (a file, a folder, a hub id)."""
    place = Path(path)
    if (place / checkpoint.MANIFEST).is_file():
        run = place.resolve() if (place / folder.CONFIG).is_file() else place.resolve().parents[1]  # exported: both in one
        return _of_run(run, checkpoint.load(place), tokenizer)
    if (place / folder.CONFIG).is_file() and (place / folder.TREE).is_file():
        found = checkpoint.newest(place, warn or (lambda line: None))
        if found is None:
            raise RunError(f"{place} holds no checkpoint yet, so nothing can begin with it; train it first")
        return _of_run(place, found, tokenizer)
    held = read_checkpoint(path, tokens=tokenizer.size)
    star = Tree.star(held.tokens, tokenizer.hash)
    return Source(held.name, held.hash, held.backbone, Shared(), held.tensors, star, held.missing)


def _of_run(run: Path, found: checkpoint.Checkpoint, tokenizer: Tokenizer) -> Source:
    config, tree = folder.read_config(run), Tree.load(run / folder.TREE)
    if tree.tokenizer_hash != tokenizer.hash:
        raise RunError(f"{run} was trained with tokenizer {tree.tokenizer_hash}, the data uses {tokenizer.hash}; rows of an "
                       "embedding mean nothing to other tokens: begin with a run on the same tokenizer")
    tensors, parts = found.tensors("model"), ["model"]
    if "ema" in found.names:
        tensors, parts = tensors | found.tensors("ema"), ["model", "ema"]
    tensors = {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}
    files = json.loads((found.path / checkpoint.MANIFEST).read_bytes())["files"]
    digest = bytes_hash("".join(files[f"{part}.safetensors"]["hash"] for part in parts).encode())
    return Source(run.resolve().name, digest, config.backbone, config.method.head, tensors, tree, step=found.step)


def source_of(init: str | Path | None, config: RunConfig, tokenizer: Tokenizer, out: Path,
              warn: Callable[[str], None]) -> tuple[Source | None, str | None]:
    """The source of the run in `out`, and the label that is part of the run's identity.

    A run that has a checkpoint of its own needs the source no longer: it goes on without it when the source is gone.
    """
    if init is None:
        return None, None
    try:
        source = open_source(init, tokenizer, warn)
    except RunError as error:
        recorded = (folder.read(out) or {"provenance": {}})["provenance"].get("init")
        place = Path(parse(init)[1])
        names = {str(place), place.name, place.parent.parent.name}
        if recorded is None or recorded.rpartition("@")[0] not in names or checkpoint.latest(out) is None:
            raise
        warn(f"{error}; {out} has begun already and goes on without it")
        return None, recorded
    must_fit(config.backbone, source, tokenizer.size)
    return source, source.label


@torch.no_grad()
def warm_start(model: Model, config: RunConfig, tree: Tree, source: Source) -> dict[str, Any]:
    """Fill a fresh model from `source`, in place; returns what was taken, for the run's provenance."""
    state = checkpoint.model_tensors(model)
    given, condition = _with_condition_of(state, source.tensors)
    new = _spread_blocks(state, given, source.name)
    for name in state:
        if name.startswith(BACKBONE) and not name.startswith(BLOCKS) and name != EMBEDDING:
            _copy(state, name, given, source.name, optional=name.startswith(CONDITION) or name.endswith("modulation.weight"))
    alike = all(torch.equal(getattr(tree, name).cpu(), getattr(source.tree, name)) for name in TABLES)
    rows = source.tensors[EMBEDDING]
    if not alike:
        rows = _rows_by_mean(rows, tree, source)
    known = torch.ones(tree.nodes, dtype=torch.bool)
    known[list(source.missing)] = False
    state[EMBEDDING][: tree.nodes][known.to(state[EMBEDDING].device)] = rows[: tree.nodes][known].to(state[EMBEDDING])
    head = _take_head(state, tree, source, alike and type(config.method.head) is type(source.head))
    return {"from": source.name, "hash": source.hash, "step": source.step, "new_blocks": new, "condition": condition,
            "embedding": "every node's row" if alike else "tokens and root; inner nodes are means of their tokens",
            "head": "taken" if head else "its own start"}


def must_fit(backbone: Any, source: Source, tokens: int) -> None:
    """Width and heads say what the numbers in a weight mean; they cannot be converted."""
    theirs = source.backbone
    asked = [("backbone", backbone.kind, theirs.kind), ("tokens", tokens, source.tree.size)]
    asked += [(f"backbone.{name}", getattr(backbone, name, None), getattr(theirs, name, None))
              for name in ("style", "width", "heads")]
    for name, mine, other in asked:
        if mine != other:
            raise RunError(f"{source.name} cannot be begun with: it has {name} {other}, this run {mine}; "
                           "choose the same, or train from scratch without --init")
    if theirs.blocks > backbone.blocks:
        raise RunError(f"{source.name} has {theirs.blocks} blocks, this run only {backbone.blocks}; a network cannot lose "
                       f"blocks and stay what it is: --set backbone.blocks={theirs.blocks} or more")


def _with_condition_of(state: Mapping[str, Tensor], theirs: dict[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """The source's tensors, and how they came to know what this network is told."""
    def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in tensors.items()
                if name.startswith(CONDITION) or name == f"{BACKBONE}final_modulation.weight"}

    modulation = theirs.get(f"{BACKBONE}final_modulation.weight")
    if modulation is None or shapes(state) == shapes(theirs):
        return theirs, "taken"
    folded = fold_condition(theirs, mean_condition(theirs, modulation.shape[1]))
    kept = {name: value for name, value in folded.items() if not name.endswith("modulation.weight")}
    return kept, "its own start; the source's mean condition is in the biases of the modulations"


def _spread_blocks(state: dict[str, Tensor], given: dict[str, Tensor], source: str) -> list[int]:
    """Copy the blocks to their places; returns the places of the new ones, which are made the identity."""
    count, theirs = _blocks(state), _blocks(given)
    origin = {i * count // theirs: i for i in range(theirs)}
    for name in state:
        if name.startswith(BLOCKS):
            place, _, rest = name.removeprefix(BLOCKS).partition(".")
            if int(place) in origin:
                there = f"{BLOCKS}{origin[int(place)]}.{rest}"
                _copy(state, name, given, source, there, optional=rest == "modulation.weight")
            elif f"{BLOCKS}{place}.modulation.weight" not in state and rest.startswith(_ENDS):
                state[name].zero_()
    new = [place for place in range(count) if place not in origin]
    for place in new:
        own = [name.removeprefix(f"{BLOCKS}{place}.") for name in state if name.startswith(f"{BLOCKS}{place}.")]
        if "modulation.weight" not in own and not all(any(name.startswith(end) for name in own) for end in _ENDS):
            raise RunError(f"this backbone's blocks cannot be made the identity, so it must have the {theirs} blocks of {source}")
    return new


def _blocks(tensors: Mapping[str, Tensor]) -> int:
    return 1 + max(int(name.removeprefix(BLOCKS).partition(".")[0]) for name in tensors if name.startswith(BLOCKS))


def _rows_by_mean(theirs: Float[Tensor, "rows d"], tree: Tree, source: Source) -> Float[Tensor, "N d"]:
    """Rows for another tree over the same tokens: the tokens' own, means of those below for inner nodes, root from root."""
    V = tree.size
    weight = torch.ones(V, dtype=torch.float64)
    weight[list(source.missing)] = 0
    total = torch.zeros(tree.nodes - V, theirs.shape[1], dtype=torch.float64)
    for above in tree.ancestor[1:].cpu():
        inner = above >= V
        total.index_add_(0, above[inner] - V, theirs[:V][inner].double() * weight[inner, None])
    counts = tree.mass(weight)[V:].clamp(min=1)
    means = (total / counts[:, None]).to(theirs)
    means[-1] = theirs[source.tree.root]
    return torch.cat([theirs[:V], means])


def _take_head(state: dict[str, Tensor], tree: Tree, source: Source, same: bool) -> bool:
    """The head's weights: token by token where both have a row a token, as they are where it is the same head on one tree."""
    mine, theirs = _token_rows(state, tree), _token_rows(source.tensors, source.tree)
    if mine and theirs:
        known = torch.tensor([token for token in range(tree.size) if token not in source.missing])
        for name, other in zip(mine[0], theirs[0]):
            state[name][mine[1][known]] = source.tensors[other][theirs[1][known]].to(state[name])
        return True
    names = {name for name in (*state, *source.tensors) if name.startswith(HEAD)}
    if not same or any(name not in state or name not in source.tensors for name in names):
        return False
    for name in names:
        _copy(state, name, source.tensors, source.name)
    return True


def _token_rows(tensors: Mapping[str, Tensor], tree: Tree) -> tuple[tuple[str, str], Tensor] | None:
    """Matrix and bias of a head with a row a token, and each token's row: a dense head, or a shared one on a star tree."""
    for stem, rows in (("", torch.arange(tree.size)), ("output.", tree.slot[0].cpu() if tree.height == 1 else None)):
        names = f"{HEAD}{stem}weight", f"{HEAD}{stem}bias"
        if rows is not None and all(name in tensors and len(tensors[name]) == tree.size for name in names):
            return names, rows
    return None


def _copy(state: dict[str, Tensor], name: str, given: Mapping[str, Tensor], source: str, there: str | None = None,
          optional: bool = False) -> None:
    value = given.get(there or name)
    if value is None and optional:
        return
    if value is None or value.shape != state[name].shape:
        raise RunError(f"{source} does not fit at {name!r}: it has {'nothing' if value is None else tuple(value.shape)}, this "
                       f"network {tuple(state[name].shape)}")
    state[name].copy_(value)
