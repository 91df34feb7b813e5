"""Left-to-right backbones: equal to the published formulas written plainly, with and without a cache; their sizes."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tdlm.assemble import assemble
from tdlm.config import DataConfig, RunConfig, TrainConfig
from tdlm.errors import ConfigError
from tdlm.model import Adaptive, Causal, CausalBackbone, Shared, Tied
from tdlm.model.causal import Cache
from tdlm.model.model import autocast, count_parameters
from tdlm.model.transformer import round_up
from tdlm.objectives import Autoregressive, AutoregressiveTree, TreeMethod
from tdlm.train.memory import predicted_memory
from tdlm.train.plan import complete_tree, meta_model, plan, train_flops
from tdlm.tree import Tree

STYLES = ["llama", "gpt2"]
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def backbone(style: str, seed: int = 0, blocks: int = 2, width: int = 24, heads: int = 3) -> CausalBackbone:
    """A small network in float64 whose weights, norms and biases are all away from their start."""
    made = CausalBackbone(Causal(style=style, blocks=blocks, width=width, heads=heads, longest=16), nodes=10).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = parameter + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k' / sqrt(width)) v for one head (S, width), one query at a time."""
    answers = []
    for i in range(len(q)):
        scores = torch.stack([q[i] @ k[j] / math.sqrt(q.shape[1]) for j in range(i + 1)])
        answers.append(scores.softmax(0) @ v[: i + 1])
    return torch.stack(answers)


def turn(x: Tensor) -> Tensor:
    """Rotary positions: the pair (x_j, x_{j + w/2}) as a complex number, times exp(i position 10000^(-2j/w))."""
    width = x.shape[1]
    angle = torch.outer(torch.arange(len(x)).double(), 10_000.0 ** (-2 * torch.arange(width // 2).double() / width))
    z = torch.complex(x[:, : width // 2], x[:, width // 2:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], 1)


def plain(net: CausalBackbone, ids: Tensor) -> Tensor:
    """One sequence through the published formulas, head by head (Touvron et al. 2023; Radford et al. 2019)."""
    weights, llama = net.state_dict(), net.style == "llama"

    def norm(x: Tensor, name: str) -> Tensor:
        if llama:
            return x / torch.sqrt((x**2).mean(1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]
        spread = torch.sqrt(((x - x.mean(1, keepdim=True)) ** 2).mean(1, keepdim=True) + 1e-5)
        return (x - x.mean(1, keepdim=True)) / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    x = weights["embedding.weight"][ids]
    if not llama:
        x = x + weights["positions.weight"][: len(ids)]
    for number in range(len(net.blocks)):
        at = f"blocks.{number}"
        q, k, v = linear(norm(x, f"{at}.attention_norm"), f"{at}.qkv").chunk(3, dim=1)
        heads = []
        for q_h, k_h, v_h in zip(*(part.split(net.head_width, dim=1) for part in (q, k, v))):
            heads.append(attend(turn(q_h), turn(k_h), v_h) if llama else attend(q_h, k_h, v_h))
        x = x + linear(torch.cat(heads, 1), f"{at}.attention_out")
        h = linear(norm(x, f"{at}.mlp_norm"), f"{at}.mlp_in")
        if llama:
            gate, up = h.chunk(2, dim=1)
            h = gate / (1 + torch.exp(-gate)) * up
        else:
            h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{at}.mlp_out")
    return norm(x, "final_norm")


@pytest.mark.parametrize("style", STYLES)
def test_the_network_is_the_published_one(style):
    net = backbone(style)
    ours = net(IDS)
    for row, ids in zip(ours, IDS):
        # the table of angles is float32, whatever the network is in
        assert torch.allclose(row, plain(net, ids), rtol=0, atol=1e-11 if style == "gpt2" else 1e-5)
    spread = (ours - ours[:, :1]).abs().amax()
    assert spread > 0.1, "positions must differ for the comparison to mean something"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("parts", [[7], [1] * 7, [4, 1, 1, 1], [3, 2, 2], [1, 6]])
def test_a_cache_changes_nothing(style, parts):
    """Prefill and steps of any size, float64."""
    net, cache = backbone(style), Cache(9)
    pieces = [net(ids, cache=cache) for ids in IDS.split(parts, dim=1)]
    assert cache.seen == 7
    assert torch.allclose(torch.cat(pieces, 1), net(IDS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("style", STYLES)
def test_a_cache_in_bfloat16_is_as_good_as_none(style):
    """Under autocast, where keys are kept in bfloat16: as close to the float64 answer as the network without a cache."""
    net = backbone(style)
    truth = net(IDS)
    net = net.float()
    cache = Cache(7)
    with autocast(torch.device("cpu"), "bfloat16"):
        whole = net(IDS)
        pieces = torch.cat([net(ids, cache=cache) for ids in IDS.split([3, 1, 1, 1, 1], dim=1)], 1)
    assert cache.kept[0][0].dtype is torch.bfloat16
    assert (pieces - truth).abs().max() <= 1.5 * (whole - truth).abs().max() + 1e-3


@pytest.mark.parametrize("style", STYLES)
def test_no_position_sees_a_later_one(style):
    net = backbone(style)
    before = net(IDS)
    for j in range(7):
        changed = IDS.clone()
        changed[:, j] = 0
        after = net(changed)
        assert torch.equal(after[:, :j], before[:, :j])
        assert ((after[:, j:] - before[:, j:]).abs().amax(-1) > 1e-9).all(), "every later position sees the change"


@pytest.mark.parametrize(("style", "blocks", "width"), [("llama", 12, 768), ("gpt2", 12, 768), ("llama", 3, 64), ("gpt2", 3, 64)])
def test_parameters_follow_closed_formulas(style, blocks, width):
    with torch.device("meta"):
        net = CausalBackbone(Causal(style=style, blocks=blocks, width=width, heads=4, longest=1024), nodes=50_259)
    rows, d = round_up(50_259), width
    block = 16 * d * d + 2 * d if style == "llama" else 12 * d * d + 13 * d
    around = rows * d + d if style == "llama" else rows * d + 1024 * d + 2 * d
    assert sum(p.numel() for p in net.parameters()) == blocks * block + around


def test_gpt2_small_has_its_published_size():
    """124,439,808, and 47 rows more: one for "nothing seen yet", the others make the table a multiple of 128."""
    config = RunConfig("gpt2", Autoregressive(head=Tied(bias=False)), backbone=Causal(style="gpt2"))
    counts = count_parameters(meta_model(config, Tree.star(50_257)))
    assert round_up(50_257 + 1) - 50_257 == 47
    assert counts["total"] == 124_439_808 + 47 * 768 and counts["head"] == 0


@pytest.mark.parametrize("style", STYLES)
def test_initial_weights(style):
    torch.manual_seed(0)
    net = CausalBackbone(Causal(style=style, blocks=8, width=128, heads=4), nodes=500)
    into_residual = 0.02 / 4 if style == "gpt2" else 0.02
    for name, parameter in net.named_parameters():
        if parameter.dim() == 2:
            expected = into_residual if name.endswith("_out.weight") else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.03), name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("norm.weight")))), name


def test_a_text_longer_than_the_position_table_is_refused():
    ids = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(ConfigError, match="longest"):
        backbone("gpt2")(ids)
    cache = Cache(17)
    backbone("gpt2")(ids[:, :16], cache=cache)
    with pytest.raises(ConfigError, match="16 positions, 17 were asked"):
        backbone("gpt2")(ids[:, :1], cache=cache)
    assert backbone("llama")(ids).shape == (1, 17, 24)
    run = RunConfig("long", Autoregressive(), DataConfig(length=17), Causal("gpt2", blocks=1, width=8, heads=2, longest=16))
    with pytest.raises(ConfigError, match="shorter than data"):
        assemble(run, Tree.star(5), pad_id=None)
    assemble(replace(run, data=DataConfig(length=16)), Tree.star(5), pad_id=None)


@pytest.mark.parametrize("options", [{"blocks": 0}, {"longest": 0}, {"width": 30, "heads": 4}, {"heads": 0}])
def test_impossible_sizes(options):
    with pytest.raises(ConfigError, match="backbone"):
        Causal(**options)


def test_method_and_backbone_must_look_the_same_way():
    config = RunConfig("wrong", Autoregressive(), data=DataConfig(length=4))
    with pytest.raises(ConfigError, match="backbone=causal"):
        assemble(config, Tree.star(5), pad_id=None)
    with pytest.raises(ConfigError, match="both ways"):
        assemble(replace(config, method=TreeMethod(), backbone=Causal(blocks=1, width=8, heads=2)), Tree.star(5), pad_id=None)


TINY = RunConfig("tiny", Autoregressive(), data=DataConfig(length=32), backbone=Causal(blocks=2, width=64, heads=4),
                 train=TrainConfig(steps=10, warmup=0, batch=4, dtype="float32"))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("method", [Autoregressive(), AutoregressiveTree(head=Shared())])
def test_planned_flops_agree_with_torchs_own_counter(style, method):
    config = replace(TINY, method=method, backbone=replace(TINY.backbone, style=style))
    tree = Tree.star(64) if method.flat else complete_tree(64, 4)
    model = assemble(config, tree, pad_id=None).model
    flops = train_flops(model, config, tree.height)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        hidden = model.hidden(torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4), None).reshape(-1, 64)
        for _ in range(tree.height):
            model.head.log_probs(hidden, torch.full((128,), tree.root))
    assert counter.get_total_flops() == 128 * flops["forward"]
    assert flops["matrices"] == 2 * 2 * 64 * 64 * (16 if style == "llama" else 12)


def test_the_adaptive_heads_cost_is_that_of_all_clusters():
    config = replace(TINY, method=Autoregressive(head=Adaptive(cutoffs=(10, 30))))
    model = meta_model(config, Tree.star(100))
    assert train_flops(model, config)["head"] == 2 * (64 * 12 + 64 * 16 + 16 * 20 + 64 * 4 + 4 * 70)


@pytest.mark.parametrize("style", STYLES)
def test_planned_memory_is_what_autograd_keeps(style):
    config = replace(TINY, backbone=replace(TINY.backbone, style=style))
    model = assemble(config, Tree.star(64), pad_id=None).model
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model.hidden(torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4), None)
    real = sum(t.untyped_storage().nbytes() for t in kept.values()) + hidden.untyped_storage().nbytes()
    memory = predicted_memory(config, meta_model(config, Tree.star(64)), 4)
    assert memory["activations"] + memory["weight_casts"] == pytest.approx(real, rel=0.05)


def test_a_plan_of_a_left_to_right_run():
    """Every level's logits are kept where a token is found by going down the tree."""
    flat = plan(TINY, vocabulary=64)
    assert flat["tree"]["height"] == 1 and flat["tree"]["nodes"] == 65 and flat["parameters"]["conditioning"] == 0
    tree = plan(replace(TINY, method=AutoregressiveTree(head=Shared())), vocabulary=64, branching=4)
    once = plan(replace(TINY, method=AutoregressiveTree(head=Shared())), tree=Tree.from_nested(list(range(4))))
    assert tree["tree"]["height"] == 3 and tree["memory"]["logits"] == 3 * once["memory"]["logits"]
