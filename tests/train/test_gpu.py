"""What only a GPU can show: compiled runs, the memory that was predicted, the CPU's noise."""
from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tdlm.assemble import assemble
from tdlm.config import RunConfig
from tdlm.data.batches import Batch
from tdlm.model.adaptive import Adaptive
from tdlm.model.causal import Causal
from tdlm.model.head import Shared, Tied, weighted_nll
from tdlm.objectives import Autoregressive, AutoregressiveTree, GiddMethod, HdlmMethod, MdlmMethod, SeddMethod, TwoStepMethod
from tdlm.recipes import recipe
from tdlm.rng import Draws
from tdlm.train.checkpoint import latest
from tdlm.train.loop import train
from tdlm.train.memory import predicted_memory
from tdlm.train.metrics import Quiet, read_metrics
from tdlm.train.plan import complete_tree, meta_model
from tdlm.train.step import Trainer, compile_backbone
from tdlm.tree import Tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("compile", [False, True])
def test_a_run_on_the_gpu_follows_the_cpu(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                          compile: bool) -> None:
    for name in ("cpu", "cuda"):
        train(config, data=world["data"], tree=world["tree"], out=tmp_path / name, device=name, command="test",
              compile=compile and name == "cuda", progress=Quiet())
    cpu, gpu = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("cpu", "cuda"))
    assert [record["bound"] for record in gpu] == pytest.approx([record["bound"] for record in cpu], rel=0.01)
    assert latest(tmp_path / "cuda") is not None


def test_a_run_on_the_gpu_replays(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """As its pace was measured."""
    made: list[Trainer] = []
    real = Trainer.__init__

    def init(self: Trainer, *rest: Any) -> None:
        real(self, *rest)
        made.append(self)

    monkeypatch.setattr(Trainer, "__init__", init)
    train(config, data=world["data"], tree=world["tree"], out=tmp_path, device="cuda", command="test", progress=Quiet())
    recording = made[0].model.backbone.recording
    assert recording is not None and recording.there is not None


def test_a_gpu_run_continues_on_the_gpu(config: RunConfig, world: dict[str, Path], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    real = Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda self, batches: 1 / 0 if self.done == 7 else real(self, batches))
        with pytest.raises(ZeroDivisionError):
            train(config, data=world["data"], tree=world["tree"], out=tmp_path, device="cuda", progress=Quiet())
    summary = train(config, data=world["data"], tree=world["tree"], out=tmp_path, device="cuda", progress=Quiet())
    assert summary["steps"] == 12 and [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")][-1] == 12


def taken(trainer: Trainer, batch: Batch, measure: Callable[[], int]) -> float:
    """The peak of three updates, after those in which kernels are compiled and passes recorded."""
    for _ in range(5):
        trainer.update(batches(trainer, batch))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        trainer.update(batches(trainer, batch))
    torch.cuda.synchronize()
    return measure() / 2**30


def batches(trainer: Trainer, batch: Batch) -> list[Batch]:
    return [Batch(*piece) for piece in zip(batch.tokens.chunk(trainer.micros), batch.rows.chunk(trainer.micros))]


@pytest.mark.parametrize("settings", [{}, {"memory": "lean"}, {"micro_batch": 8}, {"stream": "bfloat16"}])
@pytest.mark.parametrize("head", [Shared(), Tied()])
def test_predicted_memory_is_what_a_step_takes(head: Any, settings: dict[str, Any]) -> None:
    config = recipe("small")
    config = replace(config, method=replace(config.method, head=head), train=replace(config.train, batch=16, **settings))
    tree, gpu = complete_tree(50_258, 512), torch.device("cuda")
    predicted = predicted_memory(config, meta_model(config, tree), config.train.micro_batch or 16, 2)["total"] / 2**30
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() / 2**30
    assembly = assemble(config, tree, pad_id=0, device=gpu)
    compile_backbone(assembly.model, gpu, True, config.train.memory)
    tokens = torch.randint(1, 50_258, (16, 512), generator=torch.Generator().manual_seed(0)).pin_memory()
    trainer = Trainer(assembly.model, assembly.objective, config.train, gpu)
    measured = taken(trainer, Batch(tokens, torch.arange(16)), torch.cuda.max_memory_reserved) - before
    print(f"{settings}: predicted {predicted:.2f} GiB, measured {measured:.2f} GiB")
    assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_memory_without_fused_blocks_is_what_a_step_takes(dtype: str) -> None:
    config = recipe("small")
    config = replace(config, train=replace(config.train, batch=16, dtype=dtype))
    tree = complete_tree(50_258, 512)
    predicted = predicted_memory(config, meta_model(config, tree), 16, 2, fused=False)["total"] / 2**30
    gc.collect()
    before = torch.cuda.memory_allocated() / 2**30
    assembly = assemble(config, tree, pad_id=0, device="cuda")
    tokens = torch.randint(1, 50_258, (16, 512), generator=torch.Generator().manual_seed(0))
    trainer = Trainer(assembly.model, assembly.objective, config.train, torch.device("cuda"))
    measured = taken(trainer, Batch(tokens, torch.arange(16)), torch.cuda.max_memory_allocated) - before
    print(f"{dtype}: predicted {predicted:.2f} GiB, measured {measured:.2f} GiB")
    assert predicted == pytest.approx(measured, rel=0.15)


def test_the_gpu_draws_the_cpus_noise() -> None:
    rows = torch.arange(8)
    for tag in ("time", "state"):
        cpu, gpu = Draws(1, 2, "train", rows, 8), Draws(1, 2, "train", rows.cuda(), 8)
        assert torch.equal(cpu.uniform(tag, 5), gpu.uniform(tag, 5).cpu())
        assert torch.equal(cpu.strata(tag), gpu.strata(tag).cpu())


def compiled(method: Any = None, **settings: Any) -> tuple[Trainer, Batch]:
    """A small network with the tied head (or of another method), compiled, and a batch for it."""
    config = recipe("small")
    told = "level" if method is None else "none"
    method = replace(config.method, head=Tied()) if method is None else method
    backbone: Any = replace(config.backbone, blocks=4, conditioning=told)
    backbone = Causal(blocks=4, width=768, heads=12) if method.causal else backbone
    config = replace(config, method=method, backbone=backbone, train=replace(config.train, batch=32, warmup=1, **settings))
    tree = Tree.star(5_000) if method.flat else complete_tree(5_000, 80)
    assembly = assemble(config, tree, pad_id=None, counts=torch.ones(5_000), device="cuda")
    torch.compiler.reset()
    compile_backbone(assembly.model, torch.device("cuda"), True, config.train.memory, config.train.float8)
    tokens = torch.randint(0, 5_000, (32, 512), generator=torch.Generator().manual_seed(0)).pin_memory()
    return Trainer(assembly.model, assembly.objective, config.train, torch.device("cuda")), Batch(tokens, torch.arange(32))


@pytest.mark.parametrize("method", [None, MdlmMethod(), MdlmMethod(head=Tied()), TwoStepMethod(), HdlmMethod(),
                                    HdlmMethod(xi=0.9), GiddMethod(), GiddMethod(p_uniform=0.0), SeddMethod(),
                                    SeddMethod(graph="uniform"), Autoregressive(), Autoregressive(head=Adaptive()),
                                    AutoregressiveTree()], ids=str)
def test_a_step_never_waits_for_the_gpu(method: Any) -> None:
    trainer, batch = compiled(method)
    for _ in range(5):
        trainer.update([batch])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            trainer.update([batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert trainer.read().updates == 7


@pytest.mark.parametrize("micro", [None, 16])
def test_replayed_passes_are_the_passes(micro: int | None) -> None:
    """Training with the blocks recorded ends where training without ends, up to the order of sums; validation in between,
    of another shape, neither disturbs nor is disturbed."""
    results = []
    for record in (True, False):
        trainer, batch = compiled(micro_batch=micro)
        backbone = trainer.model.backbone
        backbone.recording = backbone.recording if record else None
        pieces = [Batch(*(part[i:i + (micro or 32)] for part in (batch.tokens, batch.rows))) for i in range(0, 32, micro or 32)]
        for step in range(10):
            trainer.update(pieces)
            if step == 7:
                with torch.no_grad():
                    level = torch.zeros(5, dtype=torch.int64, device="cuda")
                    trainer.model.hidden(batch.tokens[:5].cuda(), torch.rand(5, device="cuda"), level)
        assert not record or (backbone.recording is not None and backbone.recording.there is not None), "nothing was recorded"
        results.append((trainer.read(), torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    (ours, fast), (theirs, slow) = results
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-3) and ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
    assert float((fast - slow).norm() / slow.norm()) < 2e-3


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8")
def test_products_in_eight_bits_learn_as_well() -> None:
    """Forty updates on the same batch: the same loss curve within a few percent of the way down."""
    curves = []
    for float8 in (False, True):
        trainer, batch = compiled(float8=float8)
        curve = []
        for _ in range(4):
            for _ in range(10):
                trainer.update([batch])
            curve.append(trainer.read().loss)
        curves.append(curve)
    plain, narrow = curves
    assert plain[0] - plain[-1] > 0.5, "nothing was learnt"
    assert narrow == pytest.approx(plain, abs=0.05 * (plain[0] - plain[-1])) and narrow != plain


def test_memory_settings_keep_less_and_change_nothing_else() -> None:
    losses, peaks = [], []
    for memory in ("fast", "lean"):
        trainer, batch = compiled(memory=memory)
        trainer.model.backbone.recording = None
        torch.cuda.reset_peak_memory_stats()
        for _ in range(4):
            trainer.update([batch])
        losses.append(trainer.read().loss)
        peaks.append(torch.cuda.max_memory_allocated() / 2**30)
        del trainer
    print("GiB at the peak:", [round(peak, 2) for peak in peaks])
    assert peaks[0] > peaks[1]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-3)


@pytest.mark.parametrize("kind", [Tied(), Shared()])
@pytest.mark.parametrize("flat", [False, True])
def test_heads_on_the_gpu_are_the_heads_of_the_cpu(kind: Any, flat: bool) -> None:
    """Grouped products and wide cross-entropy: near float64 in float32 (TF32 where allowed) and nearly so in bfloat16."""
    tree = Tree.star(6_000) if flat else complete_tree(6_000, 80)
    generator = torch.Generator().manual_seed(0)
    embedding = torch.nn.Embedding(tree.nodes + 2, 64, dtype=torch.float64)
    head = kind.build(tree, embedding, None).double()
    with torch.no_grad():
        for parameter in [embedding.weight, *head.parameters()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    token = torch.randint(0, tree.size, (500,), generator=generator)
    height = torch.randint(1, tree.height + 1, (500,), generator=generator)
    parent, slot = tree.ancestor[height, token], tree.slot[height - 1, token]
    hidden, share = torch.randn(500, 64, generator=generator), torch.rand(500, generator=generator)

    def run(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        exact = torch.float64 if device == "cpu" else torch.float32
        head.to(device, exact)
        embedding.to(device, exact)
        states = hidden.to(device, exact).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            total, nll = weighted_nll(head, states, parent.to(device), slot.to(device), share.to(device))
        gradients = torch.autograd.grad(total, [states, embedding.weight, *head.parameters()], allow_unused=True)
        return [x.detach().double().cpu() for x in (total, nll, *gradients) if x is not None]

    truth, single, half = run("cpu", torch.float64), run("cuda", torch.float32), run("cuda", torch.bfloat16)
    for name, others, limit in (("float32", single, 2e-3), ("bfloat16", half, 2e-2)):
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(others, truth, strict=True)]
        assert max(errors) < limit, f"{name}: {errors}"
