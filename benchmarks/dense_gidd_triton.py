"""The one pass over logits of `dense_gidd`."""
import triton
import triton.language as tl


@triton.jit
def stretch_sums(logits, top, sums, width, STRETCH: tl.constexpr, COUNT: tl.constexpr):
    """COUNT stretches of one row: their largest logit and their sum of exp(logit - largest), 0 where all are -inf."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    stretch = part * COUNT + tl.arange(0, COUNT)
    place = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    value = tl.load(logits + row * width + place).to(tl.float32)
    most = tl.max(value, 1)
    total = tl.sum(tl.exp(value - tl.where(most == float("-inf"), 0.0, most)[:, None]), 1)
    at = row * (width // STRETCH) + stretch
    tl.store(top + at, most)
    tl.store(sums + at, total)
