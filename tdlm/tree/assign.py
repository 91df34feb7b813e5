"""The assignment step of size-bounded K-means: every point to a cluster, every cluster between lo and hi points.

For costs c_ij the best assignment is a linear programme whose dual has one price p_j a cluster: at the optimum each point
sits in its cheapest cluster under c_ij + p_j, and a cluster has a positive price only when it is full, a negative one
only when it is at its lower bound. Two steps find it:

`raise_prices`  climbs the dual for many nodes at once (torch, any device). The result is nearly, not exactly, in bounds.
`repair`        makes the bounds exact for one node (numpy): points are moved along shortest paths of the residual graph
                of clusters, where an edge a -> b costs what the cheapest member of a loses by moving to b.
`polish`        makes it the optimum (for few clusters): while that graph has a cycle of negative cost, points move round it.

With two clusters no search is needed: `split_in_two` sorts by the cost difference and cuts.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BULK = 64  # violations that are always mended one path at a time
_BLOCK = 1 << 19  # numbers looked at together: a block of costs plus prices stays in the processor's cache


def in_numpy(values: Tensor) -> bool:
    """Whether numpy does the work that it does better in one thread than torch: on the processor. Everywhere else the same is
    said in operations of torch, which give the same up to rounding."""
    return values.device.type == "cpu"


def two_cheapest(cost: Tensor, price: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, m, k) costs and (B, k) prices -> (B, m) best cluster, second best, and what the second costs more.

    Places that hold no point get the label k for both and a cost of zero."""
    k = cost.shape[2]
    if in_numpy(cost):
        best, second, slack = (torch.from_numpy(found) for found in _two_cheapest(cost.numpy(), price.numpy()))
    else:  # two reductions: topk is slower here, and of equal costs it may take any
        priced = cost + price[:, None]
        least, best = priced.min(2)
        next_, second = priced.scatter_(2, best[:, :, None], torch.inf).min(2)
        slack = next_ - least
    return best.masked_fill(~valid, k), second.masked_fill(~valid, k), torch.where(valid, slack, 0)


def _two_cheapest(cost: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same without the mask, block by block. numpy's argmin in one thread is faster than torch's topk in two, and
    thousands of small parallel sections would stand still whenever another program holds one of the cores."""
    nodes, places, k = cost.shape
    best, second = np.empty((nodes, places), np.int64), np.empty((nodes, places), np.int64)
    slack = np.empty((nodes, places), cost.dtype)
    rows = max(1, _BLOCK // k)
    step, stride = (1, rows) if nodes == 1 else (max(1, rows // places), places)
    for first in range(0, nodes, step):
        for start in range(0, places, stride):
            part = (slice(first, first + step), slice(start, start + stride))
            priced = cost[part] + price[part[0], None]
            flat = priced.reshape(-1, k)
            here = np.arange(len(flat))
            low = flat.argmin(1)
            least = flat[here, low]
            flat[here, low] = np.inf
            next_ = flat.argmin(1)
            shape = priced.shape[:2]
            best[part], second[part] = low.reshape(shape), next_.reshape(shape)
            slack[part] = (flat[here, next_] - least).reshape(shape)
    return best, second, slack


def sizes_of(label: Tensor, k: int) -> Tensor:
    """(B, m) labels -> (B, k) cluster sizes; the label k is not counted."""
    return _lengths(flat_label(label, k), len(label) * (k + 1)).view(-1, k + 1)[:, :k]


def _lengths(segment: Tensor, count: int) -> Tensor:
    """How often each number occurs. A GPU's bincount asks the device twice how large the numbers are; whole numbers may be
    added by atomics, their order tells nothing."""
    if in_numpy(segment):
        return torch.bincount(segment, minlength=count)
    return segment.new_zeros(count).scatter_add_(0, segment, torch.ones_like(segment))


def segment_sums(values: Tensor, segment: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Sums of values (n, ...) by segment number (n,), and the segments' lengths. Sorted first: no atomics, so the same
    bytes every time on every device."""
    order = segment.argsort(stable=True)
    length = _lengths(segment, count)
    # unsafe: without the checks of the lengths, for which the processor would wait
    return torch.segment_reduce(values[order], "sum", lengths=length, axis=0, unsafe=True), length


def flat_label(label: Tensor, k: int) -> Tensor:
    """(B, m) labels 0..k -> (B*m,) numbers that tell the nodes' clusters apart."""
    return (label + torch.arange(len(label), device=label.device)[:, None] * (k + 1)).flatten()


def _typical(slack: Tensor, label: Tensor, k: int) -> Tensor:
    """(B, k) mean slack of the points with that label; zero where there is none."""
    flat, bins = flat_label(label, k), len(label) * (k + 1)
    if in_numpy(slack):  # one thread, in order: as reproducible as sorting and far cheaper
        count = torch.bincount(flat, minlength=bins)
        total = torch.bincount(flat, slack.flatten(), minlength=bins)
    else:
        total, count = segment_sums(slack.flatten(), flat, bins)
    return total.view(-1, k + 1)[:, :k] / count.view(-1, k + 1)[:, :k].clamp(min=1)


class Prices:
    """Prices of B nodes and how boldly each moves; kept from one K-means iteration to the next."""

    def __init__(self, nodes: int, k: int, device: torch.device):
        self.price = torch.zeros(nodes, k, device=device)
        self.gain = torch.full((nodes, k), 0.5, device=device)
        self.sign = torch.zeros(nodes, k, device=device)

    def step(self, best: Tensor, second: Tensor, slack: Tensor, lo: Tensor, hi: Tensor) -> bool:
        """One ascent step; False when the optimum is reached.

        A price follows the log of size over bound, in units of what points near the cluster lose by their second choice
        (in a dense region a little moves many), and takes smaller steps after it overshot. It never crosses zero in one
        go: on the other side the other bound is the one that counts.
        """
        k = self.price.shape[1]
        size = sizes_of(best, k).to(self.price.dtype).clamp(min=0.5)
        high, low = torch.log(size / hi[:, None]), torch.log(size / lo[:, None].clamp(min=0.5))
        free = high.clamp(min=0) + low.clamp(max=0)
        gap = torch.where(self.price > 0, high, torch.where(self.price < 0, low, free)).clamp(-1, 1)
        sign = torch.sign(gap)
        if not bool((sign != 0).any()):
            return False
        unit = torch.minimum(_typical(slack, best, k), _typical(slack, second, k))
        self.gain = torch.where(sign * self.sign < 0, self.gain * 0.5, self.gain * 1.15).clamp(0.02, 1.5)
        self.sign = sign
        moved = self.price + self.gain * unit * gap
        self.price = torch.where(moved * self.price < 0, torch.zeros_like(moved), moved)
        return True

    def follow(self, shift: Tensor) -> None:
        """The centres moved by squared distances `shift` (B, k) to the means of their points, which brings every cluster's
        points nearer by just that on average: prices in force rise by it, so that boundaries stay where they are.
        Without this a far cluster with a price low enough to be filled carries it into the middle and takes everything."""
        moved = self.price + shift
        self.price = torch.where(self.price < 0, moved.clamp(max=0), torch.where(self.price > 0, moved, 0))

    def enter(self, cost: Tensor, valid: Tensor, best: Tensor, lo: Tensor) -> bool:
        """Clusters with less than half their least size fall at once, exactly as far as wins them half of what is missing
        if the others stand still: what their few points know is too little to step by. False when there are none."""
        size = sizes_of(best, self.price.shape[1])
        poor = 2 * size < lo[:, None]
        if not bool(poor.any()):
            return False
        nodes, columns = poor.any(1).nonzero()[:, 0], poor.any(0).nonzero()[:, 0]
        here = (nodes[:, None], columns[None])
        want = torch.where(poor[here], (lo[nodes, None] - size[here] + 1) // 2, 0)
        price, places = self.price[nodes], torch.arange(cost.shape[1], device=cost.device)
        own = best[nodes].clamp(max=cost.shape[2] - 1)  # places without a point are masked below
        lowest = cost[nodes[:, None], places, own] + price.gather(1, own)
        lead = cost[nodes[:, None, None], places, columns[:, None]] + price[:, columns, None] - lowest[:, None]  # (b, c, m)
        lead.masked_fill_((best[nodes, None] == columns[:, None]) | ~valid[nodes, None], torch.inf)
        nearest = lead.topk(int(want.max()), dim=2, largest=False).values
        reach = nearest.gather(2, (want - 1).clamp(min=0)[:, :, None])[:, :, 0]
        self.price[here] -= torch.where((want > 0) & reach.isfinite(), reach * 1.001, 0)
        return True


def raise_prices(cost: Tensor, valid: Tensor, lo: Tensor, hi: Tensor, prices: Prices, steps: int) -> Tensor:
    """`steps` ascent steps from where `prices` stand; the labels (B, m) under the last prices."""
    best, second, slack = two_cheapest(cost, prices.price, valid)
    for _ in range(steps):
        if prices.enter(cost, valid, best, lo):
            best, second, slack = two_cheapest(cost, prices.price, valid)
        if not prices.step(best, second, slack, lo, hi):
            break
        best, second, slack = two_cheapest(cost, prices.price, valid)
    return best


def split_in_two(cost: Tensor, valid: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """The exact optimum for k = 2: the points that gain most from cluster 0 go there, as many as the bounds allow."""
    difference = torch.where(valid, cost[:, :, 0] - cost[:, :, 1], torch.inf)
    count = valid.sum(1)
    first = (difference < 0).sum(1)
    first = torch.minimum(torch.maximum(first, torch.maximum(lo, count - hi)), torch.minimum(hi, count - lo))
    rank = torch.argsort(torch.argsort(difference, dim=1, stable=True), dim=1)
    return torch.where(valid, (rank >= first[:, None]).long(), 2)


class _Residual:
    """The graph of clusters for one node: weight[a, b] = least loss of moving a member of a to b, and which member."""

    def __init__(self, cost: np.ndarray, label: np.ndarray):
        self.cost, self.label, self.k = cost, label, cost.shape[1]
        order = np.argsort(label, kind="stable")
        cut = np.searchsorted(label[order], np.arange(self.k + 1))
        self.members = [order[cut[a] : cut[a + 1]] for a in range(self.k)]
        self.size = np.diff(cut)
        self.weight = np.full((self.k, self.k), np.inf, order="F")  # ways into a cluster lie together: so `shortest` reads
        self.room = np.empty_like(self.weight)
        for a in range(self.k):
            self.refresh(a)

    def refresh(self, a: int) -> None:
        rows = self.cost[self.members[a]]
        self.weight[a] = (rows - rows[:, a : a + 1]).min(0) if len(rows) else np.inf
        self.weight[a, a] = np.inf

    def move(self, path: list[int], amount: int) -> None:
        """`amount` points one step along every edge of a path of different clusters, the cheapest of each edge."""
        amount = min(amount, *(len(self.members[a]) for a in path[:-1]))
        leaving = []
        for a, b in zip(path[:-1], path[1:]):
            loss = self.cost[self.members[a], b] - self.cost[self.members[a], a]
            leaving.append(self.members[a][np.argsort(loss, kind="stable")[:amount]])
        for a, b, points in zip(path[:-1], path[1:], leaving):
            self.members[a] = np.setdiff1d(self.members[a], points, assume_unique=True)
            self.label[points] = b
        for b, points in zip(path[1:], leaving):
            self.members[b] = np.union1d(self.members[b], points)
        for a in path:
            self.size[a] = len(self.members[a])
            self.refresh(a)

    def shortest(self, sources: np.ndarray, sinks: np.ndarray, hops: int = 6) -> list[int]:
        """The cheapest path of at most `hops` edges from any source to any sink, cycles cut out."""
        distance = np.where(sources, 0.0, np.inf)
        parents, reached = [], []
        for _ in range(min(hops, self.k)):
            through = np.add(distance[:, None], self.weight, out=self.room)
            parent = through.argmin(0)
            best = through[parent, np.arange(self.k)]
            parents.append(parent)
            reached.append(np.where(sinks, best, np.inf))
            if not (best < distance).any() and len(reached) > 1:
                break
            distance = best
        last = int(np.argmin([r.min() for r in reached]))
        node = int(np.argmin(reached[last]))
        path = [node]
        for parent in parents[last::-1]:
            node = int(parent[node])
            path.append(node)
        path.reverse()
        simple: list[int] = []
        for node in path:
            simple = simple[: simple.index(node)] if node in simple else simple
            simple.append(node)
        return simple

    def gain(self, lo: int, hi: int, least: float) -> list[int]:
        """Clusters along which moving one point each saves more than `least`: a cycle, or a path from one that may lose a
        point to one that may gain one (a cycle through a place outside, where both is free). Empty: this is the optimum."""
        outside = self.k
        weight = np.full((self.k + 1, self.k + 1), np.inf)
        weight[:-1, :-1] = self.weight
        weight[outside, :-1] = np.where(self.size > lo, 0, np.inf)
        weight[:-1, outside] = np.where(self.size < hi, 0, np.inf)
        distance, parents, better = np.zeros(self.k + 1), [], np.zeros(0)
        for _ in range(self.k + 1):
            through = distance[:, None] + weight
            parent = through.argmin(0)
            best = through[parent, np.arange(self.k + 1)]
            better = best < distance - least
            if not better.any():
                return []
            parents.append(np.where(better, parent, np.arange(self.k + 1)))
            distance = np.where(better, best, distance)
        walk = [int(np.flatnonzero(better)[0])]  # as many edges as nodes: it meets itself
        for parent in reversed(parents):
            before = int(parent[walk[-1]])
            if before in walk:
                cycle = [before, *reversed(walk[walk.index(before):])]
                if weight[cycle[:-1], cycle[1:]].sum() < -least:
                    turn = cycle.index(outside) if outside in cycle else None
                    return cycle if turn is None else [*cycle[turn + 1 : -1], *cycle[:turn]]
                walk = walk[: walk.index(before)]
            walk.append(before)
        return []


def _bulk(cost: np.ndarray, label: np.ndarray, lo: int, hi: int, rounds: int = 30) -> None:
    """Moves many points at once, in place: each round the points of the clusters that may give propose their best move,
    and the cheapest proposals that both ends have room for are carried out."""
    k = cost.shape[1]
    for _ in range(rounds):
        size = np.bincount(label, minlength=k)
        over = size.max() > hi
        if not over and size.min() >= lo:
            return
        give, take = (size - hi, hi - size) if over else (size - lo, lo - size)
        moving, open_ = np.flatnonzero(give[label] > 0), np.flatnonzero(take > 0)
        offers = cost[np.ix_(moving, open_)]
        choice = offers.argmin(1)
        loss = offers[np.arange(len(moving)), choice] - cost[moving, label[moving]]
        order = np.argsort(loss, kind="stable")
        moving, target = moving[order], open_[choice[order]]
        allowed = (_rank(label[moving]) < give[label[moving]]) & (_rank(target) < take[target])
        label[moving[allowed]] = target[allowed]


def _rank(group: np.ndarray) -> np.ndarray:
    """The place of each element among those of its group, in order of appearance."""
    order = np.argsort(group, kind="stable")
    start = np.flatnonzero(np.r_[True, np.diff(group[order]) != 0])
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = np.arange(len(group)) - np.repeat(start, np.diff(np.r_[start, len(group)]))
    return rank


def violations(label: np.ndarray, k: int, lo: int, hi: int) -> int:
    """How many points too many or too few the clusters hold."""
    size = np.bincount(label, minlength=k)
    return int(np.maximum(size - hi, 0).sum() + np.maximum(lo - size, 0).sum())


def repair(cost: np.ndarray, label: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """Labels (n,) with lo <= size <= hi for every cluster, near the cheapest, from labels that are nearly in bounds.

    First every cluster that is too big sheds points, then every one that is too small receives some. From labels that are
    cheapest without bounds, and a few points too many, this finds the optimum. Where prices failed (rows of wildly
    different scale, thousands of equal rows) most of the work is done in bulk, less finely.
    """
    k = cost.shape[1]
    if not lo * k <= len(label) <= hi * k:
        raise AssertionError("the caller checks that the bounds can be met")
    label = label.copy()
    if violations(label, k, lo, hi) > max(_BULK, len(label) // 20):
        _bulk(cost, label, lo, hi)
    if not violations(label, k, lo, hi):
        return label
    graph = _Residual(cost, label)
    while (graph.size > hi).any() or (graph.size < lo).any():
        over = graph.size > hi
        sources, sinks = (over, graph.size < hi) if over.any() else (graph.size > lo, graph.size < lo)
        path = graph.shortest(sources, sinks)
        start, end = graph.size[path[0]], graph.size[path[-1]]
        spare = min(start - hi, hi - end) if over.any() else min(start - lo, lo - end)
        graph.move(path, 1 if spare < 8 else int(spare) // 2)
    return graph.label


def polish(cost: np.ndarray, label: np.ndarray, lo: int, hi: int) -> np.ndarray:
    """The cheapest labels (n,) with lo <= size <= hi, from some that are in bounds and not far from it."""
    graph = _Residual(cost, label.copy())
    least = 1e-6 * float(np.ptp(cost))
    for _ in range(len(label)):
        path = graph.gain(lo, hi, least)
        if not path:
            break
        graph.move(path, 1)
    return graph.label
