"""All blocks of the DiT backbone as one differentiable function with its backward pass written out.

The same mathematics as `transformer.Block` after `Block`, then the final norm (the tests hold one against the other). Written
out, element-wise work is one sweep over memory between two matrix products (`passes`), and what is kept for the backward pass
is chosen, not found: per position, channel and block, in a narrow dtype of 2 bytes,

    the stream at the block's start 2, q k v 6, attention 2, what attention and MLP add 2 + 2, the MLP before GELU 8     = 22

(`fast`). The stream between attention and MLP is the sum of two that are kept; norms, modulations and GELU are computed
again in sweeps that the backward pass makes anyway. `lean` forgets the MLP's inside as well and makes the product again: 14.
With products in eight bits (`eight.py`) the MLP's inside is kept in 1 byte: 18.

A site is a place where the stream is normalised: site 2 i before attention and 2 i + 1 before the MLP of block i, the last
one at the end. At site j a sweep adds the branch of site j - 1 and makes the input of the next.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from . import eight, passes
from .passes import Modulation
from .recording import Recording


class Weights(NamedTuple):
    """The parameters of a block."""

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    mlp_in: Tensor
    mlp_in_bias: Tensor
    mlp_out: Tensor
    mlp_out_bias: Tensor


class Block(NamedTuple):
    """What the backward pass needs of a block."""

    stream: Tensor
    before_attention: tuple[Tensor, Tensor]
    """Mean and 1 / std of the norm."""
    attended: Tensor
    """With the graph from `turned` to here."""
    turned: tuple[Tensor, Tensor, Tensor]
    attention: Tensor
    before_mlp: tuple[Tensor, Tensor]
    inside: Tensor | None
    mlp: Tensor


def stack(x: Float[Tensor, "B S d"], modulations: Float[Tensor, "#B sites3 d"], cos: Float[Tensor, "S half"],
          sin: Float[Tensor, "S half"], blocks: Sequence[Weights], final: Float[Tensor, "d"], heads: int, dtype: torch.dtype,
          lean: bool = False, float8: bool = False, recording: Recording | None = None,
          kept: Kept | None = None, columns: Int[Tensor, "B n"] | None = None) -> Float[Tensor, "B out d"]:
    """Hidden states in `dtype`, in which products are made. `modulations`: shift, scale, gate of every site, the last without.
    With a recording, passes that will be differentiated are replayed. `kept` holds the narrow weights of all others, of which
    some `columns` of each sequence may be all that is wanted."""
    flat = [weight for block in blocks for weight in block]
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (x, modulations, final, *flat))
    choices = (cos, sin, heads, dtype, lean, float8)
    if kept is not None and (keep or float8):
        kept.clear()
    elif kept is not None:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return _Run(modulations, final, flat, *choices, kept(flat, dtype)).forward(x, False, columns)
    assert columns is None, "passes that are differentiated are made whole"
    return _Stack.apply(x, modulations, final, choices, keep, recording, *flat)  # type: ignore[no-any-return]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, modulations: Tensor, final: Tensor, choices: tuple[Any, ...], keep: bool,  # type: ignore[override]
                recording: Recording | None, *flat: Tensor) -> Tensor:
        def make(modulations: Tensor) -> _Run:
            return _Run(modulations, final.detach(), flat, *choices)

        context.run = context.recording = None
        context.kinds = (x.dtype, modulations.dtype, final.dtype, [weight.dtype for weight in flat])
        kind = (x.shape, x.dtype, modulations.shape, *choices[2:], *(weight.data_ptr() for weight in (final, *flat)))
        with torch.autocast(x.device.type, enabled=False):
            if keep and recording is not None and recording.ready(kind, flat):
                replayed = recording.forward(x.detach(), modulations.detach(), make)
                if replayed is not None:
                    context.recording = recording
                    out, context.ticket = replayed
                    return out
            run = make(modulations.detach())
            out = run.forward(x.detach(), keep)
        context.run = run if keep else None
        return out

    @staticmethod
    def backward(context: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        run = context.run if context.recording is None else context.recording
        context.run = context.recording = context.ticket = None
        if run is None:
            raise RuntimeError("the fused blocks reuse their memory: their backward pass can be made once only")
        x, modulations, final, kinds = context.kinds
        with torch.autocast(dout.device.type, enabled=False), torch.no_grad():
            dx, dmodulations, dfinal, dweights = run.backward(dout)
        return (dx.to(x), dmodulations.to(modulations), dfinal.to(final), None, None, None,
                *(gradient.to(kind) for gradient, kind in zip(dweights, kinds, strict=True)))


def _blocks(flat: Sequence[Tensor], dtype: torch.dtype, float8: bool) -> list[Weights]:
    """Matrices and their biases in the dtype of the products, all copied at once; norms as they are, and matrices of which
    all products are made in eight bits."""
    per = len(Weights._fields)
    plain = [weight.detach() for weight in flat]
    wide = (0, 3, 1, 4, 6) if float8 else (0, 3)
    some = [i for i, weight in enumerate(plain) if i % per not in wide and weight.dtype != dtype]
    if some:
        narrow = [torch.empty_like(plain[i], dtype=dtype) for i in some]
        torch._foreach_copy_(narrow, [plain[i] for i in some])  # pyright: ignore[reportPrivateImportUsage]
        for i, weight in zip(some, narrow):
            plain[i] = weight
    return [Weights(*plain[i:i + per]) for i in range(0, len(plain), per)]


@functools.cache
def _steps() -> list[int]:
    """How many steps optimizers have made since someone asked: a fused one changes weights without raising their version."""
    count = [0]

    def counted(*_: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(counted)
    return count


class Kept:
    """Narrow weights for as long as the weights do not change: a sampler asks a thousand times. Whoever learns forgets them,
    so they take no memory from training."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.of: Any = None
        self.blocks: list[Weights] = []

    def __call__(self, flat: Sequence[Tensor], dtype: torch.dtype) -> list[Weights]:
        if any(weight.is_inference() for weight in flat):  # nobody counts their changes
            return _blocks(flat, dtype, False)
        of = dtype, _steps()[0], [(weight.data_ptr(), weight.shape, weight._version) for weight in flat]
        if of != self.of:
            self.clear()  # first: two copies at once would be one too many
            self.of, self.blocks = of, _blocks(flat, dtype, False)
        return self.blocks


class _Run:
    """One pass over the blocks and back."""

    def __init__(self, modulations: Tensor, final: Tensor, flat: Sequence[Tensor], cos: Tensor, sin: Tensor, heads: int,
                 dtype: torch.dtype, lean: bool, float8: bool, blocks: list[Weights] | None = None):
        self.modulations, self.cos, self.sin, self.heads, self.dtype, self.lean = modulations, cos, sin, heads, dtype, lean
        self.blocks, self.final = _blocks(flat, dtype, float8) if blocks is None else blocks, final
        per = len(Weights._fields)
        matrices = [weight.detach() for i, weight in enumerate(flat) if i % per in (1, 4, 6)] if float8 else []
        eights = eight.narrowed(matrices) if float8 else []
        self.eights = [eights[i:i + 3] for i in range(0, len(eights), 3)]
        """Of each block q k v, into and out of the MLP; empty where products are made in `dtype`."""
        self.kept: list[Block] = []

    def norm(self, site: int) -> Modulation:
        weight = self.final if site == 2 * len(self.blocks) else self.blocks[site // 2][3 * (site % 2)]
        return Modulation(weight, self.modulations[:, 3 * site], self.modulations[:, 3 * site + 1])

    def gate(self, site: int) -> Tensor:
        return self.modulations[:, 3 * site + 2]

    def forward(self, x: Tensor, keep: bool, columns: Int[Tensor, "B n"] | None = None) -> Float[Tensor, "B out d"]:
        """With `columns` the last block makes keys and values of all positions, and everything else of those columns only."""
        B, S, d = x.shape
        mlp, stream = None, x
        for i, w in enumerate(self.blocks):
            eights, narrow = self.eights[i] if self.eights else None, passes.FLOAT8 if self.eights else self.dtype
            start = passes.enter(stream, mlp, None if i == 0 else self.gate(2 * i - 1), self.norm(2 * i), narrow)
            rows = start.out.view(-1, d)
            qkv = (rows @ w.qkv.T if eights is None else eight.there(rows, eights[0])).view(B, S, 3, self.heads, d // self.heads)
            passes.turn(qkv, self.cos, self.sin)
            q, stream = qkv[:, :, 0], start.stream
            if columns is not None and i == len(self.blocks) - 1:
                q, stream = q.take_along_dim(columns[..., None, None], 1), stream.take_along_dim(columns[..., None], 1)
                S = columns.shape[1]
            turned, attended = _attend(q, *qkv[:, :, 1:].unbind(2), keep)
            attention = (attended.detach().transpose(1, 2).reshape(-1, d) @ w.attention_out.T).view(B, S, d)
            middle = passes.enter(stream, attention, self.gate(2 * i), self.norm(2 * i + 1), narrow)
            rows = middle.out.view(-1, d)
            if eights is None:
                inside = torch.addmm(w.mlp_in_bias, rows, w.mlp_in.T)
                mlp = torch.addmm(w.mlp_out_bias, passes.bend(inside), w.mlp_out.T).view(B, S, d)
            else:
                bent, inside = passes.bend_narrow(eight.there(rows, eights[1], w.mlp_in_bias))
                mlp = eight.there(bent, eights[2], w.mlp_out_bias).view(B, S, d)
            if keep:
                self.kept.append(Block(start.stream, (start.mean, start.rstd), attended, turned, attention,
                                       (middle.mean, middle.rstd), None if self.lean else inside, mlp))
            stream = middle.stream
        end = passes.enter(stream, mlp, self.gate(2 * len(self.blocks) - 1), self.norm(2 * len(self.blocks)), self.dtype)
        if keep:
            self.end = end._replace(out=end.stream[:0])
        return end.out

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Gradients of the stream's start, the modulations, the final norm's weight, and of every weight."""
        B, S, d = dout.shape
        last = 2 * len(self.blocks)
        sums: list[Tensor] = []  # of the sites, the last first
        below = self.kept[-1].mlp
        eights = bool(self.eights)
        left = passes.leave(None, dout.to(self.dtype).contiguous(), self.end.stream, below, self.gate(last - 1), self.norm(last),
                            self.end.mean, self.end.rstd, before=False, again=False, narrow=eights)
        del self.end
        sums.append(left.sums)
        gradients: list[list[Tensor | None]] = []
        for i in reversed(range(len(self.blocks))):
            w, kept = self.blocks[i], self.kept.pop()
            assert left.branch is not None
            dbranch = left.branch.view(-1, d)
            inside = kept.inside if kept.inside is not None else self.inside(i, kept)
            if left.narrow is None:
                dbent, bent, dmlp_in_bias = passes.unbend(inside, dbranch @ w.mlp_out)
                dout = dbent @ w.mlp_in
            else:
                into, out = self.eights[i][1:]
                assert left.narrow.size is not None
                dbent, bent, dmlp_in_bias, narrow = passes.unbend_narrow(inside, eight.back(left.narrow, out), left.narrow.size,
                                                                         out.unit)
                dout = eight.back(narrow, into)
                del narrow
            dmlp_out = passes.outer(dbranch, bent)
            del bent, inside
            left = passes.leave(left.stream, dout.view(B, S, d), kept.stream, kept.attention, self.gate(2 * i),
                                self.norm(2 * i + 1), *kept.before_mlp, before=True, again=True)
            assert left.out is not None and left.branch is not None
            sums.append(left.sums)
            dmlp_in = passes.outer(dbent, left.out.view(-1, d))
            del dbent
            dbranch = left.branch.view(-1, d)
            dattended = (dbranch @ w.attention_out).view(B, S, self.heads, -1).transpose(1, 2)
            dattention_out = passes.outer(dbranch, kept.attended.detach().transpose(1, 2).reshape(-1, d))
            parts = torch.autograd.grad(kept.attended, kept.turned, dattended)
            if eights:
                dqkv, narrow = passes.unturn_narrow(*parts, self.cos, self.sin)
                dout = eight.back(narrow, self.eights[i][0])
            else:
                dqkv = passes.unturn(*parts, self.cos, self.sin)
                dout = dqkv.view(B * S, -1) @ w.qkv
            below = self.kept[-1].mlp if i else None
            stream, before = kept.stream, kept.before_attention
            del kept, parts
            left = passes.leave(left.stream, dout.view(B, S, d), stream, below, self.gate(2 * i - 1) if i else None,
                                self.norm(2 * i), *before, before=False, again=True, narrow=eights and i > 0)
            assert left.out is not None
            sums.append(left.sums)
            dqkv = passes.outer(dqkv.view(B * S, -1), left.out.view(-1, d))
            gradients.append([None, dqkv, dattention_out, None, dmlp_in, dmlp_in_bias, dmlp_out, None])
            del dqkv
        return left.stream, *self.collect(torch.stack(sums[::-1], 1), gradients[::-1])

    def inside(self, i: int, kept: Block) -> Tensor:
        """The MLP before GELU, made again."""
        narrow = passes.FLOAT8 if self.eights else self.dtype
        out = passes.enter(kept.stream, kept.attention, self.gate(2 * i), self.norm(2 * i + 1), narrow).out.flatten(0, 1)
        bias = self.blocks[i].mlp_in_bias
        return eight.there(out, self.eights[i][1], bias) if self.eights else torch.addmm(bias, out, self.blocks[i].mlp_in.T)

    def collect(self, sums: Float[Tensor, "B sites 4 d"],
                gradients: list[list[Tensor | None]]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """From the sites' sums to the gradients of modulations, norms and the MLPs' last biases.

        y = n w (1 + scale) + shift:  dshift = S(dy), dscale = w S(dy n), dw = sum over sequences (1 + scale) S(dy n)
        x' = x + gate branch:         dgate = S(dx' branch), dbias of the branch = sum over sequences gate S(dx')
        """
        sites = sums.shape[1]
        weights = torch.stack([self.norm(site).weight for site in range(sites)]).to(sums.dtype)
        of = torch.cat([self.modulations, self.modulations[:, :1]], 1).unflatten(1, (sites, 3)).to(sums.dtype)
        dgate = torch.cat([sums[:, 1:, 2], torch.zeros_like(sums[:, :1, 2])], 1)
        dmodulations = torch.stack([sums[:, :, 0], weights * sums[:, :, 1], dgate], 2).flatten(1, 2)[:, :-1]
        if self.modulations.shape[0] == 1:
            dmodulations = dmodulations.sum(0, keepdim=True)
        dnorm = ((1 + of[:, :, 1]) * sums[:, :, 1]).sum(0).unbind(0)
        dbias = (of[:, 1:-1:2, 2] * sums[:, 2::2, 3]).sum(0).unbind(0)
        for i, found in enumerate(gradients):
            found[0], found[3], found[7] = dnorm[2 * i], dnorm[2 * i + 1], dbias[i]
        return dmodulations, dnorm[-1], [gradient for found in gradients for gradient in found if gradient is not None]


def _attend(q: Float[Tensor, "B n heads D"], k: Float[Tensor, "B S heads D"], v: Float[Tensor, "B S heads D"],
            keep: bool) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """q, k, v (B, heads, length, D) as leaves, and the attention of them with its graph: torch chooses the kernel and knows its
    backward pass."""
    q, k, v = (part.transpose(1, 2).detach().requires_grad_(keep) for part in (q, k, v))
    with torch.set_grad_enabled(keep):
        return (q, k, v), F.scaled_dot_product_attention(q, k, v)

