"""`tdlm tree build` and `tdlm tree show`: where tokenizer, vectors and tree meet."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..console import counter
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..device import choose_device
from ..errors import ConfigError, TokenizerError, TreeError
from ..files import write_text
from ..train import checkpoint
from ..tree.build import build_tree
from ..tree.describe import describe, render
from ..tree.embeddings import Metric, Vectors, finish, from_array, from_checkpoint, from_store, neighbours_from_store
from ..tree.picture import tree_svg
from ..tree.request import VECTORIAL, check_request, lowest_height
from ..tree.tree import Tree

ARRAYS = (".npy", ".npz")
WIDEST = 1024
"""The largest window: every place in it is a pass over the text."""


def build_from(*, data: Path | None = None, tokenizer: str | None = None, vectors: str | None = None, branching: int = 512,
               min_ratio: float = 0.8, max_ratio: float = 1.2, height: int | None = None, max_depth: int = 32,
               complete: bool = True, method: str = "kmeans", metric: str = "cosine", seed: int = 0, device: str | None = "cpu",
               tensor: str | None = None, window: int | None = None, contexts: int = 4096, sides: str = "apart",
               max_mass: float | None = None, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]]:
    """The tree and its description; `data` gives the tokenizer and, unless `vectors` says otherwise, the statistics. No device
    asked for: the GPU if there is one."""
    store = TokenStore(data) if data is not None else None
    if store is None and tokenizer is None:
        raise ConfigError("a tree needs a vocabulary: --data DIR (a prepared folder), or --tokenizer FILE")
    if store is not None and tokenizer is not None:
        raise ConfigError("--data has its own tokenizer; give either --data or --tokenizer")
    loaded = store.tokenizer if store is not None else Tokenizer.load(cast(str, tokenizer))
    counts = store.counts if store is not None else None
    check_request(loaded.size, branching=branching, min_ratio=min_ratio, max_ratio=max_ratio, height=height,
                  max_depth=max_depth, complete=complete, method=method, max_mass=max_mass, counted=counts is not None)
    chosen = str(choose_device(device))
    if tensor is not None and (vectors is None or vectors == "corpus" or vectors.endswith(ARRAYS)):
        raise ConfigError("--tensor names a tensor of a checkpoint; give one with --vectors")
    if method == "exchange" and store is None:
        raise ConfigError("exchange looks at the neighbours of tokens in text: give --data DIR")
    corpus = method in VECTORIAL and (vectors is None or vectors == "corpus")
    _check_settings(corpus, method, window, contexts, sides)
    rows = near = None
    if corpus:
        if store is None:
            raise ConfigError("corpus statistics need text: give --data DIR, or vectors of your own (--vectors FILE)")
        say(f"counting neighbours in {store.tokens('train'):,} tokens")
        rows = from_store(store, metric=cast(Metric, metric), contexts=contexts, sides=sides,
                          window=4 if window is None or method == "exchange" else window, device=chosen)
    elif method in VECTORIAL:
        rows = _vectors(cast(str, vectors), loaded, counts, cast(Metric, metric), tensor)
    elif vectors is not None:
        raise ConfigError(f"--method {method} looks at no vectors; leave out --vectors")
    if method == "exchange":
        near = neighbours_from_store(cast(TokenStore, store), window=2 if window is None else window)
    with counter("tree") as tell:
        tree = build_tree(rows, size=loaded.size, branching=branching, min_ratio=min_ratio, max_ratio=max_ratio,
                          height=height, max_depth=max_depth, complete=complete, seed=seed, method=cast(Any, method),
                          counts=counts, tokenizer_hash=loaded.hash, device=chosen, near=near,
                          max_mass=max_mass, say=say, progress=lambda depth, done, total: tell(done, total))
    if height is None and method != "hdlm" and (possible := lowest_height(loaded.size, branching)) < tree.height:
        say(f"K={branching} reaches height {possible} when it is asked for: --height {possible}")
    return tree, describe(tree, counts, loaded)


def _check_settings(corpus: bool, method: str, window: int | None, contexts: int, sides: str) -> None:
    """Nothing that was asked for may be ignored, or take for ever."""
    if not 1 <= (1 if window is None else window) <= WIDEST:
        raise ConfigError(f"neighbours stand 1 to {WIDEST} places away, got --window {window}")
    if contexts < 1:
        raise ConfigError(f"at least one frequent token must count as a neighbour, got --contexts {contexts}")
    idle = {"window": window is None or corpus or method == "exchange", "contexts": contexts == 4096 or corpus,
            "sides": sides == "apart" or corpus}
    for name, fine in idle.items():
        if not fine:
            raise ConfigError(f"--{name} is about vectors from the corpus, which this tree does not use; leave it out, or use "
                              "--vectors corpus")


def check_vectors(wanted: str, tokenizer: Tokenizer) -> None:
    """Complain before any other work about vectors that are not there or belong to other tokens."""
    if wanted != "corpus":
        _vectors(wanted, tokenizer, None, "cosine", None)


def _vectors(wanted: str, tokenizer: Tokenizer, counts: np.ndarray | None, metric: Metric, tensor: str | None) -> Vectors:
    if wanted.endswith(ARRAYS):
        return from_array(wanted, tokenizer.size, metric=metric)
    if any((Path(wanted) / name).exists() for name in (checkpoint.FOLDER, checkpoint.MANIFEST)):  # a run, or an exported one
        return of_run(Path(wanted), tokenizer, counts, metric, tensor)
    return from_checkpoint(wanted.removeprefix("hf:"), tokenizer.size, tensor=tensor, metric=metric)


def of_run(path: Path, tokenizer: Tokenizer, counts: np.ndarray | None = None, metric: Metric = "cosine",
           tensor: str | None = None) -> Vectors:
    """How a trained run tells tokens apart: the rows its head scores them by, or the embedding that serves as such (and as
    input). Rows of tokens that the data does not have are what chance made them at the start: they count as none."""
    from ..train.run import open_run

    run = open_run(path)
    if run.tokenizer.hash != tokenizer.hash:
        raise TokenizerError(f"{path} was trained with tokenizer {run.tokenizer.hash}, the tree is for {tokenizer.hash}; "
                             "its rows belong to other tokens")
    model = run.assembly.model
    matrices = {name: value for name, value in model.named_parameters() if value.ndim == 2 and len(value) >= tokenizer.size}
    heads = [name for name, value in matrices.items() if name.startswith("predictor.") and len(value) == tokenizer.size]
    name = tensor or (heads[0] if heads else "backbone.embedding.weight")
    if name not in matrices:
        raise TreeError(f"{path} has no tensor {name} with a row a token; choose one of {', '.join(matrices)}")
    rows = matrices[name].detach()[: tokenizer.size].float().cpu().numpy().copy()
    if counts is not None:
        rows[counts == 0] = 0
    return finish(rows, tokenizer.size, metric, {"kind": "run", "tensor": name, "name": path.resolve().name, "step": run.step})


def show(path: Path, *, data: Path | None, svg: Path | None, quiet: bool) -> dict[str, Any]:
    """Describe a tree file or a run's tree; a run brings its tokenizer along."""
    from rich.console import Console

    tokenizer, counts, file = None, None, path
    if path.is_dir():
        file = path / "tree.safetensors"
        if not file.is_file():
            raise TreeError(f"{path} holds no tree.safetensors; give a tree file or a run folder")
        if (path / "tokenizer.json").is_file():
            tokenizer = Tokenizer.load(path / "tokenizer.json")
    if data is not None:
        store = TokenStore(data)
        tokenizer, counts = store.tokenizer, store.counts
    tree = Tree.load(file, tokenizer_hash=tokenizer.hash if tokenizer is not None else None)
    description = describe(tree, counts, tokenizer)
    if not quiet:
        console = Console()
        with console.capture() as text:
            console.print(render(description))
        print(text.get(), end="")  # rich would end the program its own way when the reader has gone
    if svg is not None:
        write_text(svg, tree_svg(tree, tokenizer, counts))
    return description


def write_picture(path: Path, tree: Tree, store: TokenStore) -> None:
    write_text(path, tree_svg(tree, store.tokenizer, store.counts))
