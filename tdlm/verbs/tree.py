"""`tdlm tree build` and `tdlm tree show`: where tokenizer, vectors and tree meet."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from ..console import counter
from ..data.store import TokenStore
from ..data.tokenizer import Tokenizer
from ..device import choose_device
from ..errors import ConfigError, TreeError
from ..files import write_text
from ..tree.build import build_tree, check_request, lowest_height
from ..tree.describe import describe, render
from ..tree.embeddings import Vectors, from_array, from_checkpoint, from_store
from ..tree.picture import tree_svg
from ..tree.tree import Tree

ARRAYS = (".npy", ".npz")


def build_from(*, data: Path | None = None, tokenizer: str | None = None, vectors: str | None = None, branching: int = 512,
               min_ratio: float = 0.8, max_ratio: float = 1.2, height: int | None = None, max_depth: int = 32,
               complete: bool = True, method: str = "kmeans", metric: str = "cosine", seed: int = 0, device: str = "cpu",
               tensor: str | None = None, say: Callable[[str], None]) -> tuple[Tree, dict[str, Any]]:
    """The tree and its description; `data` gives the tokenizer and, unless `vectors` says otherwise, the statistics."""
    store = TokenStore(data) if data is not None else None
    if store is None and tokenizer is None:
        raise ConfigError("a tree needs a vocabulary: --data DIR (a prepared folder), or --tokenizer FILE")
    if store is not None and tokenizer is not None:
        raise ConfigError("--data has its own tokenizer; give either --data or --tokenizer")
    loaded = store.tokenizer if store is not None else Tokenizer.load(cast(str, tokenizer))
    counts = store.counts if store is not None else None
    check_request(loaded.size, branching=branching, min_ratio=min_ratio, max_ratio=max_ratio, height=height,
                  max_depth=max_depth, complete=complete, method=method)
    device = str(choose_device(device))
    if tensor is not None and (vectors is None or vectors == "corpus" or vectors.endswith(ARRAYS)):
        raise ConfigError("--tensor names a tensor of a checkpoint; give one with --vectors")
    rows = None
    if method in ("kmeans", "hdlm"):
        rows = _vectors(store, vectors, loaded.size, metric, tensor, device, say)
    elif vectors is not None:
        raise ConfigError(f"--method {method} looks at no vectors; leave out --vectors")
    with counter("tree") as tell:
        tree = build_tree(rows, size=loaded.size, branching=branching, min_ratio=min_ratio, max_ratio=max_ratio,
                          height=height, max_depth=max_depth, complete=complete, seed=seed, method=cast(Any, method),
                          counts=counts, tokenizer_hash=loaded.hash, device=device,
                          progress=lambda depth, done, total: tell(done, total))
    if height is None and method != "hdlm" and (possible := lowest_height(loaded.size, branching)) < tree.height:
        say(f"K={branching} reaches height {possible} when it is asked for: --height {possible}")
    return tree, describe(tree, counts, loaded)


def _vectors(store: TokenStore | None, wanted: str | None, size: int, metric: str, tensor: str | None, device: str,
             say: Callable[[str], None]) -> Vectors:
    how = cast(Literal["cosine", "euclidean"], metric)
    if wanted is None or wanted == "corpus":
        if store is None:
            raise ConfigError("corpus statistics need text: give --data DIR, or vectors of your own (--vectors FILE)")
        say(f"counting neighbours in {store.tokens('train'):,} tokens")
        return from_store(store, metric=how)
    if wanted.endswith(ARRAYS):
        return from_array(wanted, size, metric=how)
    return from_checkpoint(wanted.removeprefix("hf:"), size, tensor=tensor, metric=how)


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
