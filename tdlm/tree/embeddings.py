"""Vectors for tokens, from wherever there are some: the corpus itself (the default), an array, or a checkpoint.

Every source gives `Vectors`: float32 rows 0..V-1, where an all-zero row says "no vector", and a JSON record of where
they come from. `metric="cosine"` scales rows to unit length, so that K-means on them is K-means by angle;
`metric="euclidean"` leaves them alone. Co-occurrence vectors are meant for angles (their default);
arrays and checkpoints are taken as they are unless asked otherwise.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np
import xxhash

from ..errors import TreeError
from ..hub import fetch_checkpoint
from .cluster import check_rows
from .cooccurrence import count_tokens, neighbour_vectors
from .neighbours import Neighbours, count_neighbours

if TYPE_CHECKING:
    from ..data.store import TokenStore

Metric = Literal["cosine", "euclidean"]
LIMIT = 32_000_000  # tokens that co-occurrence looks at: more change little and cost memory
_NAMES = ("wte.weight", "embed_tokens.weight", "word_embeddings.weight", "tok_embeddings.weight", "embed_in.weight",
          "vocab_embed.embedding", "vocab_embed.weight", "token_embedding.weight", "shared.weight", "embedding.weight",
          "embeddings.weight")
_MASK_BEHIND = "vocab_embed.embedding"
"""GIDD, MDLM and SEDD keep the row of MASK behind those of the tokens. MDLM has no row for PAD: with PAD in the vocabulary its
MASK would stand in PAD's place."""


@dataclass(frozen=True)
class Vectors:
    rows: np.ndarray
    source: dict[str, Any]


class _Thinned:
    """The documents of a split that can be read again and again; evenly thinned when there are too many tokens."""

    def __init__(self, store: TokenStore, split: str, share: float):
        self.store, self.split, self.share = store, split, share

    def __iter__(self) -> Iterator[np.ndarray]:
        for number, index in enumerate(self.store.documents(self.split)):
            if int((number + 1) * self.share) > int(number * self.share):
                document = np.asarray(self.store.document(index))
                yield document if self.store.eos_id is None else np.append(document, self.store.eos_id)


def from_store(store: TokenStore, *, metric: Metric = "cosine", limit: int = LIMIT, split: str = "train",
               **settings: Any) -> Vectors:
    """Co-occurrence in a prepared folder's train split."""
    return from_corpus(_thinned(store, split, limit), len(store.counts), metric=metric, **settings)


def neighbours_from_store(store: TokenStore, *, window: int = 2, limit: int = LIMIT, split: str = "train") -> Neighbours:
    """What exchange clustering looks at, of the same documents."""
    return count_neighbours(_thinned(store, split, limit), len(store.counts), window)


def _thinned(store: TokenStore, split: str, limit: int) -> _Thinned:
    return _Thinned(store, split, min(1.0, limit / max(int(np.asarray(store.counts).sum()), 1)))


def from_corpus(documents: Iterable[np.ndarray], size: int, *, metric: Metric = "cosine", contexts: int = 4096,
                window: int = 4, sides: str = "apart", dimensions: int = 128, damping: float = 0.5,
                smoothing: float = 0.75, seed: int = 0, device: str = "cpu") -> Vectors:
    """Co-occurrence (`cooccurrence.py`) in arrays of token ids; `documents` is read twice, so it must be no iterator."""
    if iter(documents) is documents:
        raise TreeError("the corpus is read twice; give a list or an object that can be iterated again, not an iterator")
    counts = count_tokens(documents, size)
    settings: dict[str, Any] = {"contexts": contexts, "window": window, "sides": sides, "dimensions": dimensions,
                                "damping": damping, "smoothing": smoothing, "seed": seed}
    rows = neighbour_vectors(documents, counts, device=device, **settings)
    return finish(rows, size, metric, {"kind": "corpus", "tokens": int(counts.sum()), **settings})


def from_array(path: str | Path, size: int, *, metric: Metric = "euclidean") -> Vectors:
    """Vectors in a file: .npy, .safetensors with one matrix, or .npz with one matrix, with `q` and `scale` (8-bit
    columns), or with `centroid` and `cluster` (each token gets its cluster's centre)."""
    path = Path(path)
    if not path.is_file():
        raise TreeError(f"no embedding file {path}; give a .npy, .npz or .safetensors file")
    kind = "array"
    try:
        if path.suffix == ".npy":
            rows = np.load(path, allow_pickle=False)
        elif path.suffix == ".npz":
            rows, kind = _from_npz(path)
        elif path.suffix == ".safetensors":
            rows = _tensor([path], None, size)[1]
        else:
            raise TreeError(f"{path.name}: vectors are read from .npy, .npz or .safetensors files; convert it to one of them")
    except (ValueError, OSError, LookupError, EOFError, BadZipFile) as error:
        raise TreeError(f"{path.name} cannot be read as token vectors ({error}); write it again") from None
    return finish(rows, size, metric, {"kind": kind, **_file(path)})


def from_checkpoint(path: str | Path, size: int, *, tensor: str | None = None, metric: Metric = "euclidean") -> Vectors:
    """The input embedding of a model: a safetensors file, a Hugging Face folder, or the id of a model on the hub."""
    given = Path(path)
    if given.is_file() and given.suffix != ".safetensors":
        raise TreeError(f"{given.name} is no safetensors file; pickled checkpoints are not opened, convert it first")
    if given.is_file():
        files = [given]
    else:
        folder = given if given.is_dir() else fetch_checkpoint(str(path), TreeError)
        index = folder / "model.safetensors.index.json"
        files = sorted(_parts(index) if index.is_file() else folder.glob("*.safetensors"))
        if not files:
            raise TreeError(f"{path} holds no .safetensors file; pickled checkpoints are not opened, convert it first")
    name, rows = _tensor(files, tensor, size)
    return finish(rows, size, metric, {"kind": "checkpoint", "tensor": name, "name": given.name})


def _parts(index: Path) -> set[Path]:
    """The files of a checkpoint that was saved in several."""
    try:
        return {index.parent / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TreeError(f"{index.name} cannot be read ({type(error).__name__}: {error}); fetch the checkpoint again") from None


def _from_npz(path: Path) -> tuple[np.ndarray, str]:
    with np.load(path, allow_pickle=False) as file:
        if "q" in file and "scale" in file:
            rows = file["q"].astype(np.float32) * file["scale"]
            if "exact" in file:
                rows[_without_vector(file["q"], file["exact"])] = 0
            return rows, "array"
        if "centroid" in file and "cluster" in file:
            return file["centroid"].astype(np.float32)[file["cluster"].astype(np.int64)], "cluster centres"
        matrices = [name for name in file.files if file[name].ndim == 2]
        if len(matrices) != 1:
            raise TreeError(f"{path.name} holds {len(matrices)} matrices ({', '.join(file.files)}); one, or q and scale, or "
                            "centroid and cluster are expected")
        return file[matrices[0]], "array"


def _without_vector(q: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Rows that were zero before the table was centred: the inexact row that is repeated most often."""
    inexact = np.flatnonzero(~exact)
    if not len(inexact):
        return inexact
    _, number, times = np.unique(q[inexact], axis=0, return_inverse=True, return_counts=True)
    return inexact[number.reshape(-1) == times.argmax()] if times.max() > 1 else inexact[:0]


def _tensor(files: list[Path], wanted: str | None, size: int) -> tuple[str, np.ndarray]:
    """The embedding matrix among the tensors of some safetensors files, by name or by the usual names."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[Path, list[int]]] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    shapes[name] = (file, tensors.get_slice(name).get_shape())
        matrices = [name for name, (_, shape) in shapes.items() if len(shape) == 2]
        if wanted is not None:
            found = [name for name in matrices if name == wanted]
        else:
            found = [n for usual in _NAMES for n in matrices if n == usual or n.endswith("." + usual)]
            found = found or (matrices if len(matrices) == 1 else [])
        if not found:
            likely = [n for n in matrices if shapes[n][1][0] >= 0.9 * size] or matrices
            raise TreeError(f"no tensor {wanted or 'with a usual name of an input embedding'} in the checkpoint; name one with "
                            f"--tensor, for example {', '.join(sorted(likely)[:5]) or '(it holds no matrix)'}")
        with safe_open(shapes[found[0]][0], framework="pt") as tensors:
            rows = tensors.get_tensor(found[0]).float().numpy()
        return found[0], rows[:-1] if found[0].endswith(_MASK_BEHIND) and len(rows) == size else rows
    except (SafetensorError, OSError) as error:
        raise TreeError(f"{files[0].name} cannot be read as safetensors ({error})") from None


def finish(rows: np.ndarray, size: int, metric: Metric, source: dict[str, Any]) -> Vectors:
    """Rows for exactly V tokens: spare ones (rounding, MASK) are dropped, a few missing ones (PAD) become zero."""
    if metric not in ("cosine", "euclidean"):
        raise TreeError(f"unknown metric {metric!r}; choose cosine or euclidean")
    rows = check_rows(rows)
    had = len(rows)
    if not 0.9 * size - 8 <= had <= 1.1 * size + 512:
        raise TreeError(f"{had} token vectors for a vocabulary of {size}; the embedding belongs to another tokenizer")
    rows = np.concatenate([rows[:size], np.zeros((max(0, size - had), rows.shape[1]), dtype=np.float32)])
    if metric == "cosine":
        length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        rows = np.divide(rows, length, out=np.zeros_like(rows), where=length > 0, casting="unsafe")
    return Vectors(rows, {**source, "metric": metric, "rows": had, "dimensions": int(rows.shape[1])})


def _file(path: Path) -> dict[str, str]:
    """The name and the fingerprint of a file; never its folder."""
    return {"file": path.name, "xxh3": xxhash.xxh3_128_hexdigest(path.read_bytes())}
