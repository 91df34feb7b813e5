"""Classes that hold no more than their share of the text: tokens change places until they do.

Clusters of equal numbers of tokens may be very unequal in use: frequent tokens resemble one another, and seven clusters of 512
can make up half of a text. With n(x) the count of token x, N their sum and `ratio` R >= 2, every one of k classes shall hold

    sum over its tokens of min( n(x), R N / 2k )  <=  R N / k.

A token counts at most half of what is allowed, since no division makes ' the' rare; and so there always is a way: the lightest
class holds N/k at most, half of what is allowed, and has room for any token of a class that holds too much, in exchange for its
own lightest. While a class holds too much, its best pair changes places: the least rise of the squared distances to the
classes' means for what it takes off.
"""
from __future__ import annotations

import numpy as np

from ..errors import TreeError


def capped(counts: np.ndarray, k: int, ratio: float) -> tuple[np.ndarray, float]:
    """What each token counts, and what a class may hold."""
    most = ratio * float(counts.sum()) / k
    return np.minimum(counts, most / 2), most


def spread(rows: np.ndarray, label: np.ndarray, counts: np.ndarray, k: int, ratio: float) -> np.ndarray:
    """Labels (n,) whose classes are as large as before and hold no more than allowed."""
    weight, most = capped(counts, k, ratio)
    label, size = label.copy(), np.bincount(label, minlength=k)
    load = np.bincount(label, weight, minlength=k)
    if not (load > most).any():
        return label
    centres = np.zeros((k, rows.shape[1]))
    np.add.at(centres, label, rows)
    centres /= np.maximum(size, 1)[:, None]
    far = ((centres**2).sum(1) - 2 * (rows @ centres.T)).astype(np.float32)  # less |x|^2
    by_weight = np.lexsort((weight, label))
    members = np.split(by_weight, np.cumsum(size)[:-1])
    light = np.array([group[0] if len(group) else -1 for group in members])
    while load.max() > most:
        a = int(load.argmax())
        x = members[a][:, None]
        less = weight[x] - weight[light]
        loss = far[x, np.arange(k)] - far[x, a] + (far[light, a] - far[light, np.arange(k)])
        possible = (less > 0) & (load + less <= most) & (light >= 0)
        possible[:, a] = False
        if not possible.any():
            raise TreeError(f"classes of so unequal sizes cannot each hold at most {ratio} times their share of the text; "
                            "raise --max-mass, or bring the ratios nearer to 1")
        best = np.where(possible, loss / np.maximum(less, 1e-9), np.inf)
        row, b = np.divmod(int(best.argmin()), k)
        one, other = int(members[a][row]), int(light[b])
        label[one], label[other] = b, a
        load += np.bincount([a, b], [weight[other] - weight[one], weight[one] - weight[other]], minlength=k)
        for group in (a, b):
            found = np.flatnonzero(label == group)
            members[group] = found[np.argsort(weight[found], kind="stable")]
            light[group] = members[group][0]
    return label
