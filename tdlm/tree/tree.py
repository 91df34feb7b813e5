"""The tree as dense tables, its invariants, and its file.

Leaves are the tokens 0..V-1 (height 0); then come the nodes of height 1, of height 2, ..., the root last (height H).
Every leaf has depth H: a shorter path is padded by *repeating the token's own id* at the heights it skips, so a node's
height can be read off its id for internal nodes only, and a position is active iff `num_children[z] > 1`.

    ancestor[h, x]      the node at height h above token x                      (H+1, V)
    slot[h, x]          which child of ancestor[h+1, x] is ancestor[h, x]; 0 on padded steps   (H, V)
    num_children[z]     1 for tokens                                            (N,)
    children[u - V, k]  the k-th child of internal node u, -1 for empty slots   (N-V, K)
"""
from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from ..errors import TokenizerError, TreeError
from ..files import write_bytes

FORMAT = "tdlm-tree-1"
TABLES = ("ancestor", "slot", "num_children", "children")


def split_bounds(size: int, branching: int, min_ratio: float, max_ratio: float, room: int | None = None) -> tuple[int, int]:
    """The sizes allowed for each of `branching` children of a node of `size` tokens; `room` caps them by height."""
    mean = size / branching
    low = max(1, math.floor(min_ratio * mean))
    high = max(math.ceil(mean), math.floor(max_ratio * mean))
    return low, high if room is None else min(high, room)


@dataclass(frozen=True)
class Tree:
    ancestor: Tensor
    slot: Tensor
    num_children: Tensor
    children: Tensor
    tokenizer_hash: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """V, the number of tokens."""
        return self.ancestor.shape[1]

    @property
    def height(self) -> int:
        """H, the number of levels."""
        return self.ancestor.shape[0] - 1

    @property
    def nodes(self) -> int:
        """N, tokens and internal nodes together."""
        return self.num_children.shape[0]

    @property
    def branching(self) -> int:
        """K, the largest number of children a node may have."""
        return self.children.shape[1]

    @property
    def root(self) -> int:
        return self.nodes - 1

    def to(self, device: torch.device | str) -> Tree:
        return replace(self, **{name: getattr(self, name).to(device) for name in TABLES})

    def node_height(self) -> Tensor:
        """The height of every internal node (tokens: 0, though padding may show them higher up)   (N,)."""
        height = torch.zeros(self.nodes, dtype=torch.int64, device=self.ancestor.device)
        for h in range(1, self.height + 1):
            above = self.ancestor[h]
            height[above[above >= self.size]] = h
        return height

    def leaf_counts(self) -> Tensor:
        """How many tokens stand below every node   (N,)."""
        return self.mass(torch.ones(self.size, dtype=torch.int64, device=self.ancestor.device))

    def mass(self, weights: Tensor) -> Tensor:
        """The sum over the tokens below every node of a weight per token (V,)   (N,)."""
        total = torch.zeros(self.nodes, dtype=weights.dtype, device=weights.device)
        total[: self.size] = weights
        for h in range(1, self.height + 1):
            above = self.ancestor[h].to(weights.device)
            internal = above >= self.size
            total.index_add_(0, above[internal], weights[internal])
        return total

    @classmethod
    def from_nested(cls, nested: list[Any], *, size: int | None = None, branching: int | None = None,
                    tokenizer_hash: str = "", meta: dict[str, Any] | None = None) -> Tree:
        """A tree from nested lists of token ids, for example [[0, 1], [2, [3, 4]]]; shorter paths are padded."""
        if not isinstance(nested, list) or not nested:
            raise TreeError(f"a tree is a list of nodes and token ids, got {nested!r}")
        levels = _by_depth(nested)
        height = len(levels)
        tokens = sorted(item for level in levels for node in level for item in node if isinstance(item, int))
        count = len(tokens) if size is None else size
        _check_tokens(tokens, count)
        widest = max(len(node) for level in levels for node in level)
        branching = widest if branching is None else branching
        if widest > branching:
            raise TreeError(f"a node has {widest} children, more than the branching factor K={branching}")
        return _tables(levels, count, height, branching, tokenizer_hash, dict(meta or {}))

    @classmethod
    def star(cls, size: int, tokenizer_hash: str = "") -> Tree:
        """Every token a child of the root: the tree of flat methods, whose MASK is the root's id V."""
        return cls.from_nested(list(range(size)), size=size, tokenizer_hash=tokenizer_hash, meta={"method": "star"})

    def check(self) -> Tree:
        """Every invariant, vectorised; the error names the first node that breaks one."""
        _check_shapes(self)
        V, H = self.size, self.height
        tokens = torch.arange(V, device=self.ancestor.device)
        _must(self.ancestor[0] == tokens, None, tokens, "must stand at its own place in ancestor[0]")
        _must(self.ancestor[H] == self.root, None, tokens, f"does not hang under the root (node {self.root})")
        for h in range(H):
            child, parent, slot = self.ancestor[h], self.ancestor[h + 1], self.slot[h]
            padded = parent < V
            _must((child == parent) & (slot == 0), padded, parent, f"at height {h + 1} must repeat its token in slot 0")
            _must((slot >= 0) & (slot < self.num_children[parent]), ~padded, parent, "has a child in an empty slot")
            found = self.children[(parent - V).clamp(min=0), slot.clamp(0, self.branching - 1)]
            _must(found == child, ~padded, parent, f"does not list its child at height {h} in that child's slot")
        real = torch.arange(self.branching, device=self.children.device) < self.num_children[V:, None]
        inner = torch.arange(V, self.nodes)
        _must(((self.children >= 0) == real).all(1), None, inner, "has a gap among its children")
        listed = torch.sort(self.children[real]).values.cpu()
        once = torch.arange(self.nodes - 1)
        if not torch.equal(listed, once):
            counts = torch.bincount(listed, minlength=self.nodes)[: self.nodes - 1]
            wrong = int((counts != 1).nonzero()[0])
            raise TreeError(f"node {wrong} is the child of {int(counts[wrong])} nodes instead of one; build the tree again")
        height = self.node_height()[V:]
        _must(height > 0, None, inner, "has no token below it")
        _must(height[1:] >= height[:-1], None, inner[1:], "stands behind a node of greater height")
        self._check_bounds()
        return self

    def _check_bounds(self) -> None:
        """Sizes within the bounds that were asked for (the builder records them under meta['bounds']). What a height caps
        needs no look: no tree can break it."""
        asked = self.meta.get("bounds")
        if not asked or not asked.get("exact"):
            return
        leaves = self.leaf_counts()
        total, mean = leaves[self.size:], leaves[self.size:].to(torch.float64) / self.branching
        low = torch.floor(asked["min_ratio"] * mean).clamp(min=1)
        high = torch.maximum(torch.ceil(mean), torch.floor(asked["max_ratio"] * mean))
        real = self.children >= 0
        sizes = leaves[self.children.clamp(min=0)].to(torch.float64)
        smallest, largest = sizes.masked_fill(~real, torch.inf).amin(1), sizes.masked_fill(~real, 0).amax(1)
        outside = (smallest < low) | (largest > high) | (self.num_children[self.size:] != self.branching)
        if bool((outside := outside & (total > self.branching)).any()):
            i = int(outside.nonzero()[0])
            raise TreeError(f"node {self.size + i} splits {int(total[i])} tokens into {int(self.num_children[self.size + i])} "
                            f"children of {int(smallest[i])}..{int(largest[i])} tokens, outside the bounds "
                            f"{int(low[i])}..{int(high[i])} that were asked for")

    def to_bytes(self) -> bytes:
        """One safetensors file; everything that is not a table is JSON in its header (one key: same tree, same bytes)."""
        tensors = {name: getattr(self, name).cpu().to(torch.int32).contiguous() for name in TABLES}
        header = {"format": FORMAT, "tokenizer_hash": self.tokenizer_hash, "meta": self.meta}
        return to_safetensors(tensors, metadata={"tdlm": json.dumps(header, sort_keys=True)})

    def save(self, path: str | Path) -> None:
        write_bytes(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, tokenizer_hash: str | None = None) -> Tree:
        path = Path(path)
        if not path.is_file():
            raise TreeError(f"no tree file {path}; make one with: tdlm tree build --out {path}")
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("tdlm", "{}"))
                found = header.get("format") if isinstance(header, dict) else header
                if found != FORMAT:
                    raise TreeError(f"{path} is no tree of format {FORMAT} (found {found!r}); make one with: tdlm tree build")
                tables = {name: file.get_tensor(name).to(torch.int64) for name in TABLES}
        except (SafetensorError, OSError, ValueError) as error:
            raise TreeError(f"{path} cannot be read as a tree ({error}); build it again") from None
        tree = cls(**tables, tokenizer_hash=header.get("tokenizer_hash", ""), meta=header.get("meta", {})).check()
        if tokenizer_hash is not None and tree.tokenizer_hash != tokenizer_hash:
            raise TokenizerError(f"{path} was built for tokenizer {tree.tokenizer_hash or 'unknown'}, the data uses "
                                 f"{tokenizer_hash}; build a tree from this data: tdlm tree build --data DIR --out {path}")
        return tree


def _by_depth(nested: list[Any]) -> list[list[list[Any]]]:
    """The internal nodes of nested lists, grouped by depth."""
    levels, current = [], [nested]
    while current:
        for node in current:
            if not node:
                raise TreeError("a node without children cannot stand in a tree")
        levels.append(current)
        current = [item for node in current for item in node if isinstance(item, list)]
    return levels


def _check_tokens(tokens: list[int], size: int) -> None:
    if tokens != list(range(size)):
        seen = torch.bincount(torch.tensor([t for t in tokens if 0 <= t < size] or [0]), minlength=size)
        outside = [t for t in tokens if not 0 <= t < size]
        if outside:
            raise TreeError(f"token {outside[0]} is outside the vocabulary 0..{size - 1}")
        wrong = int((seen != 1).nonzero()[0])
        raise TreeError(f"token {wrong} is a leaf {int(seen[wrong])} times; every token must be a leaf exactly once")


def _tables(levels: list[list[list[Any]]], V: int, H: int, K: int, tokenizer_hash: str, meta: dict[str, Any]) -> Tree:
    first = V  # heights 1, 2, ..., H in this order, that is depths H-1, ..., 0
    ids: list[list[int]] = [[] for _ in levels]
    for depth in range(H - 1, -1, -1):
        ids[depth] = list(range(first, first + len(levels[depth])))
        first += len(levels[depth])
    num_children = torch.ones(first, dtype=torch.int64)
    children = torch.full((first - V, K), -1, dtype=torch.int64)
    up, up_slot = torch.full((first,), -1, dtype=torch.int64), torch.zeros(first, dtype=torch.int64)
    depth_of = torch.zeros(V, dtype=torch.int64)
    for depth, level in enumerate(levels):
        below = iter(ids[depth + 1] if depth + 1 < H else [])
        for node, node_id in zip(level, ids[depth]):
            kids = [item if isinstance(item, int) else next(below) for item in node]
            num_children[node_id] = len(kids)
            row = torch.tensor(kids)
            children[node_id - V, : len(kids)] = row
            up[row], up_slot[row] = node_id, torch.arange(len(kids))
            depth_of[row[row < V]] = depth + 1
    ancestor = torch.empty(H + 1, V, dtype=torch.int64)
    slot = torch.zeros(H, V, dtype=torch.int64)
    ancestor[0] = torch.arange(V)
    for h in range(H):
        rises = depth_of >= H - h  # at height h the true path of a token of depth D begins at h = H - D
        ancestor[h + 1] = torch.where(rises, up[ancestor[h]], ancestor[h])
        slot[h] = torch.where(rises, up_slot[ancestor[h]], 0)
    return Tree(ancestor, slot, num_children, children, tokenizer_hash, meta)


def _must(holds: Tensor, where: Tensor | None, node: Tensor, what: str) -> None:
    broken = ~holds if where is None else ~holds & where
    if bool(broken.any()):
        raise TreeError(f"node {int(node.to(broken.device)[broken.nonzero()[0, 0]])} {what}; the tree is damaged, build it again")


def _check_shapes(tree: Tree) -> None:
    shapes = {name: tuple(getattr(tree, name).shape) for name in TABLES}
    if [len(shape) for shape in shapes.values()] != [2, 2, 1, 2]:
        raise TreeError(f"the tables' shapes do not fit one another ({shapes}); build the tree again")
    H, V, N, K = tree.height, tree.size, tree.nodes, tree.branching
    if H < 1 or tree.slot.shape != (H, V) or tree.children.shape[0] != N - V or N <= V:
        raise TreeError(f"the tables' shapes do not fit one another ({shapes}); build the tree again")
    every = torch.arange(N)
    _must(((tree.ancestor >= 0) & (tree.ancestor < N)).all(0), None, every[:V], "has an ancestor that does not exist")
    _must(((tree.children >= -1) & (tree.children < N)).all(1), None, every[V:], "lists a child that does not exist")
    _must(tree.num_children[:V] == 1, None, every[:V], "is a token and must count one child, itself")
    _must((tree.num_children[V:] >= 1) & (tree.num_children[V:] <= K), None, every[V:], f"must have 1 to K={K} children")
