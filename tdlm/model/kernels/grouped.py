"""The tied tree head as one grouped product a level: positions sorted by parent, each group meets its own children.

A position at parent u needs h . E[c] for the children c of u only. Sorted by parent (the top of the tree first), the
positions of one parent are neighbours, and a level is one grouped matrix product: group g of rows times the matrix
W_g (children x d) of its parent. Nothing waits for the device: how long the groups are stays there.

A node is the child of one parent, so the tables of children hold every node once and the gradient of the embedding is a
gather from the groups' gradients, not a scatter with collisions. Rows of no group (positions with nothing to predict)
are sorted behind the last group and cost nothing.
"""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ...rng import sent
from ...tree.tree import Tree
from .rows import choose

MOST_GROUPS = 1000
"""torch's grouped product takes fewer than 1,024 groups a call."""
ALIGNED = 8
"""Rows of a group's matrix are padded to 16 bytes of bfloat16."""


class Bundle(nn.Module):
    """Some parents of one height and their children: one grouped product. Buffers, so that they move with the model:

        table (G, n)   the children, padded with node 0          child   the children in the order of the table's real entries
        real (G, n)    which entries of the table are children   place   where each of them stands in the flattened table
        limit (G,)     how many they are
    """

    table: Tensor
    real: Tensor
    child: Tensor
    place: Tensor
    limit: Tensor

    def __init__(self, first: int, kids: Int[Tensor, "G n"]):
        super().__init__()
        self.first = first
        """Rank of the first parent; the parents are first .. first + G - 1."""
        real = kids >= 0
        tables = {"table": kids.clamp(min=0), "real": real, "child": kids[real], "place": real.flatten().nonzero()[:, 0],
                  "limit": real.sum(1)}
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)


class Arrangement(NamedTuple):
    """Positions in the order of the groups, as the processor knows it."""

    order: Int[Tensor, "M"]
    """Which position comes next."""
    group: Int[Tensor, "M"]
    """Rank of its parent."""
    ends: Int[Tensor, "G"]
    """Where each group ends."""
    bounds: list[int]
    """Where each bundle ends."""

    def to(self, device: torch.device) -> Arrangement:
        """What a GPU needs of it there."""
        return self._replace(group=sent(self.group, device), ends=sent(self.ends, device))


class Groups(nn.Module):
    """The groups of a tree: `rank` orders the inner nodes from the root down; tokens come last (and with them the nodes above
    `highest`, which then have nothing to predict)."""

    rank: Tensor

    def __init__(self, tree: Tree, highest: int | None = None):
        super().__init__()
        inner = torch.arange(tree.nodes - 1, tree.size - 1, -1, device=tree.children.device)  # ids rise with height
        if highest is not None:
            inner = inner[tree.node_height()[inner] <= highest]
        self.count = len(inner)
        rank = torch.full((tree.nodes,), self.count, dtype=torch.int32, device=inner.device)
        rank[inner] = torch.arange(self.count, dtype=torch.int32, device=inner.device)
        self.register_buffer("rank", rank, persistent=False)
        self.known = (rank.cpu(),)  # in a tuple: stays with the processor
        height = tree.node_height()[inner]
        bundles = []
        for level in range(tree.height if highest is None else highest, 0, -1):
            for some in (height == level).nonzero()[:, 0].split(MOST_GROUPS):
                kids = tree.children[inner[some] - tree.size]
                width = int((kids >= 0).sum(1).max())
                bundles.append(Bundle(int(some[0]), F.pad(kids[:, :width], (0, -width % ALIGNED), value=-1)))
        self.levels = nn.ModuleList(bundles)

    def arrange(self, parent: Int[Tensor, "M"]) -> Arrangement:
        """Positions sorted by parent, made by the processor (tokens and nodes above `highest` are none of these groups)."""
        rank = self.known[0][parent]
        group, order = rank.sort(stable=True)
        ends = torch.bincount(group, minlength=self.count).cumsum(0)
        last = [bundle.first + len(bundle.table) - 1 for bundle in self.bundles]
        return Arrangement(order, group, ends.to(torch.int32), ends[last].tolist())

    @property
    def bundles(self) -> list[Bundle]:
        return list(self.levels)  # pyright: ignore[reportReturnType]


def grouped_nll(hidden: Float[Tensor, "M d"], parent: Int[Tensor, "M"], slot: Int[Tensor, "M"],
                weight: Float[Tensor, "rows d"], bias: Float[Tensor, "rows"] | None, groups: Groups) -> Float[Tensor, "M"]:
    """-log p(slot | hidden, parent); 0 at tokens, which have nothing to predict."""
    key = groups.rank[parent]
    key, order = key.sort(stable=True)
    ends = torch.searchsorted(key, torch.arange(groups.count, device=key.device, dtype=key.dtype), right=True).to(torch.int32)
    products = _Products.apply(hidden, weight, order, ends, groups)
    slot = slot[order]
    nll = torch.zeros(len(order), device=hidden.device, dtype=torch.promote_types(products[0].dtype, torch.float32))
    for bundle, product in zip(groups.bundles, products):
        group = key - bundle.first
        inside = (group >= 0) & (group < len(bundle.table))
        group = group.clamp(0, len(bundle.table) - 1)
        offset = None if bias is None else bias[bundle.table]
        if torch.is_grad_enabled():
            costs = _bundle_nll(product, group, inside, slot, offset, bundle.real)
        else:
            costs = choose(product, offset, group, bundle.limit, slot.clamp(max=product.shape[1] - 1), None)
        nll = torch.where(inside, costs, nll)
    return torch.zeros_like(nll).index_copy(0, order, nll)


def _bundle_nll(product: Tensor, group: Tensor, inside: Tensor, slot: Tensor, offset: Tensor | None, real: Tensor) -> Tensor:
    """The cross-entropy of the rows of one bundle; rows of others hold whatever memory held and are replaced first."""
    logits = product.to(torch.promote_types(product.dtype, torch.float32)).masked_fill(~inside[:, None], 0.0)
    logits = logits if offset is None else logits + offset[group]
    logits = logits.masked_fill(~real[group], -torch.inf)
    slot = torch.where(inside, slot, 0).clamp(max=logits.shape[1] - 1)
    return logits.logsumexp(-1) - logits.gather(1, slot[:, None])[:, 0]


class _Products(torch.autograd.Function):
    """All bundles' products of the sorted rows: (M, n) each."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, order: Tensor, ends: Tensor,  # type: ignore[override]
                groups: Groups) -> tuple[Tensor, ...]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        rows = hidden.detach()[order].to(dtype)
        with torch.autocast(device, enabled=False):
            matrices = [weight.detach()[bundle.table].to(dtype) for bundle in groups.bundles]
            products = tuple(_product(rows, _led(matrix, bundle).transpose(1, 2), _ends(ends, bundle))
                             for matrix, bundle in zip(matrices, groups.bundles))
        context.save_for_backward(rows, order, ends, *matrices)
        context.groups, context.kinds, context.shape = groups, (hidden.dtype, weight.dtype), weight.shape
        return products

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, order, ends, *matrices = context.saved_tensors
        groups, (kind, weight_kind) = context.groups, context.kinds
        dweight = torch.zeros(context.shape, dtype=weight_kind, device=rows.device)
        drows = torch.zeros_like(rows)
        number = torch.arange(len(rows), device=rows.device)
        for bundle, matrix, gradient in zip(groups.bundles, matrices, gradients):
            gradient, limits = gradient.to(rows.dtype).contiguous(), _ends(ends, bundle)
            begin = limits[0] if bundle.first else torch.zeros_like(limits[0])
            inside = (number >= begin) & (number < limits[-1])
            back = _product(gradient, _led(matrix, bundle), limits)
            drows = torch.where(inside[:, None], back, drows)
            blocks = _product(gradient.T, rows, limits)[1 if bundle.first else 0:]
            dweight[bundle.child] = blocks.reshape(-1, rows.shape[1])[bundle.place].to(weight_kind)
        dhidden = torch.empty_like(drows).index_copy_(0, order, drows)
        return dhidden.to(kind), dweight, None, None, None


def _product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(left, right, offs=ends)  # pyright: ignore[reportPrivateImportUsage]


def _ends(ends: Tensor, bundle: Bundle) -> Tensor:
    """Where the groups of a bundle end. A grouped product begins at row 0, so what lies before is a group of its own."""
    return ends[max(0, bundle.first - 1): bundle.first + len(bundle.table)]


def _led(matrix: Tensor, bundle: Bundle) -> Tensor:
    return torch.cat([matrix.new_zeros(1, *matrix.shape[1:]), matrix]) if bundle.first else matrix
