"""The predicted memory: against eight runs on a GPU, and part by part against what the code keeps and allocates."""
from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tdlm.assemble import assemble
from tdlm.config import BackboneConfig, DataConfig, RunConfig, TrainConfig
from tdlm.model.head import PerLevel, Tied
from tdlm.model.kernels import eight, linear_ce, passes, stack
from tdlm.objectives import wide
from tdlm.objectives.hdlm import HdlmMethod
from tdlm.objectives.mdlm import MdlmMethod
from tdlm.objectives.sedd import SeddMethod
from tdlm.objectives.tree import TreeMethod
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.train.memory import ALLOCATOR, predicted_memory
from tdlm.train.plan import complete_tree, meta_model
from tdlm.tree import Tree

TWELVE = BackboneConfig(blocks=12, width=768, heads=12, conditioning="level")
CASES = {"paper": (TreeMethod(), replace(TWELVE, blocks=17, conditioning="time")), "shared": (TreeMethod(), TWELVE),
         "tied": (TreeMethod(head=Tied()), TWELVE),
         "mdlm-tied": (MdlmMethod(head=Tied()), replace(TWELVE, conditioning="none"))}
MEASURED = [("tied", "balanced", False, 9.39), ("shared", "balanced", False, 9.20), ("paper", "balanced", False, 12.30),
            ("mdlm-tied", "balanced", False, 10.25), ("tied", "lean", False, 7.45), ("paper", "lean", False, 9.44),
            ("tied", "balanced", True, 8.70), ("paper", "balanced", True, 11.46)]
"""GiB: torch.cuda.max_memory_reserved over 20 updates of 64 x 512 tokens, GPT-2's vocabulary, K=512, bf16 stream, as
benchmarks/throughput.py measures (one H200, torch 2.11, November 2026; mdlm-tied: 10.18 to 10.33)."""


def case(name: str, memory: str = "fast", float8: bool = False) -> RunConfig:
    method, backbone = CASES[name]
    base = recipe("small")
    return replace(base, method=method, backbone=backbone,
                   train=replace(base.train, batch=64, stream="bfloat16", memory=memory, float8=float8))


@pytest.mark.parametrize(("name", "memory", "float8", "gib"), MEASURED)
def test_predictions_are_what_a_gpu_measured(name: str, memory: str, float8: bool, gib: float) -> None:
    config = case(name, memory, float8)
    tree = Tree.star(50_258) if config.method.flat else complete_tree(50_258, 512)
    predicted = predicted_memory(config, meta_model(config, tree), 64, tree.height)
    assert "reserved" in predicted["means"] and predicted["total"] / 2**30 == pytest.approx(gib, rel=0.04)


class Live(TorchDispatchMode):
    """Bytes of all tensors made inside that are still there, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given and x.untyped_storage() not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def small(blocks: int = 4, width: int = 64, length: int = 64, **settings: Any) -> RunConfig:
    settings = {"stream": "bfloat16", **settings}
    return RunConfig("x", TreeMethod(), DataConfig(length), BackboneConfig(blocks, width, width // 16, "level"),
                     TrainConfig(steps=2, warmup=0, batch=8, **settings))


def run(config: RunConfig, micro: int) -> tuple[stack._Run, Tensor, Tensor]:
    """The blocks, a stream to begin with, and a gradient to come back with."""
    backbone, d, S = config.backbone, config.backbone.width, config.data.length
    weights = [(d,), (3 * d, d), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)] * backbone.blocks
    dtype = torch.bfloat16 if config.train.dtype == "bfloat16" else torch.float32
    angles = torch.ones(S, d // backbone.heads // 2)
    made = stack._Run(torch.zeros(micro, 6 * backbone.blocks + 2, d), torch.ones(d), [torch.ones(shape) for shape in weights],
                      angles, angles, backbone.heads, dtype, config.train.memory == "lean", config.train.float8)
    return made, torch.ones(micro, S, d, dtype=getattr(torch, config.train.stream)), torch.ones(micro, S, d, dtype=dtype)


SETTINGS = [{}, {"memory": "lean"}, {"float8": True}, {"memory": "lean", "float8": True}, {"stream": "float32"},
            {"dtype": "float32", "stream": "float32"}]


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_kept_is_what_the_blocks_keep(settings: dict[str, Any]) -> None:
    """The slow twins of the kernels keep the same tensors. (The stream's start is the caller's.)"""
    config = small(**settings)
    made, x, _ = run(config, 3)
    with Live() as live, torch.no_grad():
        hidden = made.forward(x, True)
    predicted = predicted_memory(config, meta_model(config, complete_tree(64, 8)), 3)
    assert live.now + x.nbytes == pytest.approx(predicted["kept"], rel=0.002) and hidden.shape == x.shape


class Stand:
    """In the places of the GPU's kernels: they allocate what those do, and compute nothing."""

    @staticmethod
    def enter(x: Tensor, branch: Any, gate: Any, weight: Any, shift: Any, scale: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        mean, rstd = torch.empty(2, *x.shape[:2])
        return x if branch is None else torch.empty_like(x), torch.empty_like(x, dtype=dtype), mean, rstd

    @staticmethod
    def leave(dstream: Any, dout: Tensor, x: Tensor, branch: Any, *rest: Any) -> tuple[Any, ...]:
        again, narrow = rest[-2:]
        return (torch.empty_like(x) if dstream is None else dstream, None if branch is None else torch.empty_like(branch),
                dout if again else None, torch.empty(len(x), 4, x.shape[2]),
                (*eighth(dout.flatten(0, 1)), torch.empty(dout[..., :1].numel(), 1)) if narrow else None)

    @staticmethod
    def bend(h: Tensor) -> Tensor:
        return torch.empty_like(h)

    @staticmethod
    def bend_narrow(h: Tensor) -> tuple[Tensor, Tensor]:
        return eighth(h)[0], eighth(h)[0]

    @staticmethod
    def unbend(h: Tensor, dout: Tensor, *narrow: Any) -> tuple[Tensor, ...]:
        again = torch.empty_like(dout) if h.dtype == passes.FLOAT8 else h
        return dout, again, torch.empty(h.shape[1]), *(eighth(dout) if narrow else ())

    @staticmethod
    def turn(qkv: Tensor, cos: Tensor, sin: Tensor) -> None:
        pass

    @staticmethod
    def unturn(dq: Tensor, dk: Tensor, dv: Tensor, cos: Any, sin: Any, narrow: bool = False) -> Any:
        B, heads, S, D = dq.shape
        out = torch.empty(B, S, 3, heads, D, dtype=dq.dtype)
        return (out, *eighth(out.flatten(2).flatten(0, 1))) if narrow else out


def eighth(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=passes.FLOAT8), torch.empty(len(x), 1)


class Attention(torch.autograd.Function):
    """Its backward pass allocates three gradients and, as flash attention does, a float32 sum for that of the queries."""

    @staticmethod
    def forward(context: Any, *qkv: Tensor) -> Tensor:  # type: ignore[override]
        B, heads, S, D = qkv[0].shape
        out = torch.empty(B, S, heads, D, dtype=qkv[0].dtype).transpose(1, 2)
        context.save_for_backward(*qkv, out, torch.empty(B, heads, S))
        return out

    @staticmethod
    def backward(context: Any, *dout: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        wide = torch.empty(dout[0].shape)
        return tuple(torch.empty_like(dout[0]) for _ in range(3)) if wide.numel() else ()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, width: int) -> Tensor:
        return torch.empty(len(x), width, dtype=torch.bfloat16)

    monkeypatch.setattr(passes, "fast", lambda x: Stand)
    monkeypatch.setattr(passes, "outer", lambda left, right: torch.empty(left.shape[1], right.shape[1]))
    monkeypatch.setattr(eight, "there", lambda x, matrix, bias=None: product(x, len(matrix.there)))
    monkeypatch.setattr(eight, "back", lambda x, matrix: product(x.values, len(matrix.back)))
    monkeypatch.setattr(stack.F, "scaled_dot_product_attention", lambda q, k, v: Attention.apply(q, k, v))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("micro", "length"), [(64, 512), (1, 128)])
def test_the_way_back_needs_what_is_predicted(stand_ins: None, settings: dict[str, Any], micro: int, length: int) -> None:
    """The peak of both ways, from narrow matrices to the last gradient, without computing anything; also where gradients of
    matrices are larger than what blocks keep."""
    config = small(6, 768, length, **settings)
    with FakeTensorMode(), Live() as live, torch.no_grad():
        made, x, dout = run(config, micro)
        given = live.now
        hidden = made.forward(x, True)
        live.most = 0
        gradients = made.backward(dout)
        peak = live.most - given + x.nbytes
    predicted = predicted_memory(config, meta_model(config, complete_tree(64, 8)), micro)
    assert predicted["kept"] + predicted["backward"] == pytest.approx(peak, rel=0.03)
    assert len(gradients) == 4 and hidden.shape == x.shape


@pytest.mark.parametrize("float8", [False, True])
def test_narrow_matrices_are_counted(stand_ins: None, float8: bool) -> None:
    config = small(float8=float8)
    d, made = config.backbone.width, run(config, 1)[0]
    flat = [weight for block in made.blocks for weight in block if weight.dtype == torch.bfloat16]
    eights = [matrix for matrices in made.eights for matrix in matrices]
    real = sum(weight.nbytes for weight in flat) + sum(m.there.nbytes + m.back.nbytes for m in eights)
    assert predicted_memory(config, meta_model(config, complete_tree(64, 8)), 1)["matrices"] == real and real > 12 * 4 * d * d


def test_parts_add_up_and_name_what_is_asked_for() -> None:
    config = small()
    model = meta_model(config, complete_tree(64, 8))
    memory = predicted_memory(config, model, 4)
    parts = ("weights", "optimizer", "average", "matrices", "kept", "backward", "buffers", "gradients", "head")
    counted = sum(memory[part] for part in parts)
    assert memory["allocator"] == round(ALLOCATOR * counted) and memory["total"] == round((1 + ALLOCATOR) * counted)
    assert memory["fixed"] + 4 * memory["per_sequence"] == pytest.approx(memory["total"], abs=8)
    total = sum(p.numel() for p in model.parameters())
    assert memory["weights"] == 4 * total and memory["optimizer"] == 8 * total and memory["average"] == 0
    averaged = predicted_memory(replace(config, train=replace(config.train, ema=0.9)), model, 4)
    assert averaged["average"] == 4 * total
    whole = predicted_memory(config, model, 8)  # gradients of one pass need not add up
    blocks = sum(weight.numel() for block in model.backbone.blocks for weight in block.weights())
    assert memory["gradients"] - whole["gradients"] == 4 * (total + blocks)
    assert predicted_memory(config, model, 8, fused=False)["means"] != whole["means"]


def test_a_wide_head_holds_a_block_of_logits_and_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    config, tree = case("mdlm-tied"), Tree.star(50_258)
    model = meta_model(config, tree)
    rows, d, N = -(-50_258 // linear_ce.ALIGNED) * linear_ce.ALIGNED, 768, 64 * 512
    for fused, part in ((True, "head"), (False, "logits")):
        assert predicted_memory(config, model, 64, fused=fused)[part] == linear_ce.BLOCK_BYTES + rows * d * 8 + 4 * N * d
    monkeypatch.setattr(linear_ce, "BLOCK_BYTES", 1 << 20)
    assert predicted_memory(config, model, 64)["head"] == (1 << 20) + rows * d * 8 + 4 * N * d


class Rows(torch.nn.Module):
    """In the place of a backbone: the rows of its embedding are the hidden states."""

    told_time = True

    def __init__(self, model: Any):
        super().__init__()
        self.head, self.embedding = model.head, model.backbone.embedding

    def hidden(self, nodes: Tensor, time: Tensor, level: Tensor | None) -> Tensor:
        return self.embedding(nodes).to(torch.bfloat16)


@pytest.mark.parametrize(("method", "branching"), [
    (TreeMethod(), 80), (TreeMethod(head=PerLevel()), 80), (TreeMethod(head=Tied()), 80), (TreeMethod(head=Tied()), 16),
    (SeddMethod(), 0), (HdlmMethod(), 80)])
def test_what_heads_hold_is_of_the_predicted_size(method: Any, branching: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss and its way back on the processor. Trees ask about half of all positions, the prediction counts all; so it may be
    twice as much, and not more."""
    monkeypatch.setattr(linear_ce, "BLOCK_BYTES", 1 << 21)
    monkeypatch.setattr(wide, "LIMIT", 1 << 20)
    tree = Tree.star(4_096) if method.flat else complete_tree(4_096, branching)
    config = RunConfig("x", method, DataConfig(256), BackboneConfig(1, 128, 4, "time"), TrainConfig(steps=2, warmup=0, batch=16))
    made, tokens = assemble(config, tree, pad_id=None), torch.arange(16 * 256).view(16, 256)
    rows = Rows(made.model)
    with Live() as live, torch.autocast("cpu", torch.bfloat16):
        made.objective.loss(rows, tokens, draws=Draws(1, 0, "train", torch.arange(16), 16)).train.backward()
    predicted = predicted_memory(config, meta_model(config, tree), 16, tree.height, fused=False)["logits"]
    states = tokens.numel() * 128 * 6 + rows.embedding.weight.nbytes  # of the stand-in, and the embedding's gradient
    assert 0.6 * live.most <= predicted + states <= 2.2 * live.most
