"""A trained run, opened again: the folder stands on its own (configuration, tree, tokenizer, weights)."""
from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..assemble import Assembly, assemble
from ..config import RunConfig
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..device import choose_device
from ..errors import DataError, RunError
from ..tree.tree import Tree
from . import checkpoint, folder
from .step import compile_backbone


@dataclass(frozen=True)
class Run:
    path: Path
    config: RunConfig
    provenance: dict[str, Any]
    tree: Tree
    tokenizer: Tokenizer
    assembly: Assembly
    step: int
    """Of the checkpoint whose weights these are."""

    def store(self, data: Path | None = None) -> TokenStore:
        """The prepared data of this run: where it was when it was trained, or `data`; checked to be the same."""
        recorded = self.provenance.get("data")
        if data is None and not recorded:
            raise DataError(f"{self.path} does not say where its data lies; give it: --data DIR")
        where = data if data is not None else Path(os.path.normpath(self.path / str(recorded)))
        if data is None and not where.is_dir():
            raise DataError(f"the data of {self.path} is no longer at {where}; say where it is: --data DIR")
        store = TokenStore(where)
        if store.tokenizer.hash != self.tokenizer.hash:
            raise DataError(f"{where} uses tokenizer {store.tokenizer.hash}, the run {self.tokenizer.hash}; "
                            "prepare that text with the run's own tokenizer: "
                            f"tdlm prepare INPUT... --out DIR --tokenizer {self.path / folder.TOKENIZER}")
        return store


def open_run(path: Path | str, device: str = "cpu", warn: Callable[[str], None] | None = None) -> Run:
    """The newest intact checkpoint of a run, ready to evaluate and to sample."""
    path = Path(path)
    if not path.is_dir():
        raise RunError(f"no run folder {path}; train one: tdlm train RECIPE --data DIR --tree FILE --out {path}")
    config = folder.read_config(path)
    provenance = (folder.read(path) or {})["provenance"]
    tokenizer = Tokenizer.load(path / folder.TOKENIZER)
    tree = Tree.load(path / folder.TREE, tokenizer_hash=tokenizer.hash)
    chosen = choose_device(device)
    assembly = assemble(config, tree, pad_id=tokenizer.pad_id, device=chosen)
    state = checkpoint.load_model(path, assembly.model, warn=warn)
    assembly.model.eval()
    if hasattr(assembly.model.backbone, "fused"):  # a compiler would begin anew for every shape
        compile_backbone(assembly.model, chosen, None if chosen.type == "cuda" else False)
    return Run(path, config, provenance, tree, tokenizer, assembly, int(state["step"]))
