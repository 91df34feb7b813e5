"""Studies of whole systems: all rivals, what each reaches for the same cost, and the paper's table.

In `equal-cost` every run has the same minutes on the same machine, the same rows in the same order and the same network but for
what its method asks for, and every method has the same trials to find its learning rate, which are counted as spent. Processes
and heads are crossed: {cascade, overlapping, flat} x {shared, tied}. A flat process shows a token or nothing, so its tree is
the star (K = V): `shared` is then MDLM with an output matrix of its own and `tied` MDLM with the embedding's rows, which are the
first two rows of the table. `paper` is cascade x shared with the rest of the paper's choices: told the time, and more blocks
in the place of the V-wide head it does without.

`two-step` is the flat process with a softmax that goes down the tree, from one hidden state: what the tree is worth as a
factored softmax, without a process that shows classes.

Every opponent also stands there tied to the embedding and starting at the unigram model, as ours do. And since trees train
with weights of at most 2, where MDLM was published with 1 / t, each side has a row with the other's rule.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..config import BackboneConfig, RunConfig
from ..model.dense import Dense
from ..model.head import Shared, Tied
from ..objectives.ar import Autoregressive
from ..objectives.gidd import GiddMethod
from ..objectives.hdlm import HdlmMethod
from ..objectives.joint import JointMethod
from ..objectives.mdlm import FLOOR, MdlmMethod
from ..objectives.tree import TreeMethod
from ..objectives.two_step import TwoStepMethod
from ..process import Cascade, Hierarchical, Overlapping
from ..recipes import BASE, SMALL, recipe
from .entry import Entry, Size, Study
from .settings import BUDGET, METHODS, MINUTES, SLOW, TOY, short_toy, told
from .texts import generated

K17 = {"branching": 17, "height": 2}


def _rivals(size: Size) -> list[Entry]:
    if size == "full":
        names = ("small", "mdlm-small", "gidd-small", "hdlm-small", "sedd-small", "ar-small", "ar-tree-small", "gpt2-small")
        return [Entry(name, recipe(name), None if recipe(name).method.flat else {"branching": 512}) for name in names]
    base, minutes, options = (TOY, None, K17) if size == "toy" else (BUDGET, MINUTES, {"branching": 512})
    found = []
    for name, (method, tree, what) in METHODS.items():
        config = replace(base, name=f"{size}-{name}", method=method, backbone=told(base, what))
        config = short_toy(config, SLOW.get(name, TOY.train.steps)) if size == "toy" else config
        shape = options if tree else None
        if name == "joint" and size != "toy":  # 512^2 combinations would be most of the network
            config, shape = replace(config, method=JointMethod(neighbourhood=8)), {"branching": 2}
        found.append(Entry(name, config, shape, minutes))
    return found


RIVALS = Study("rivals", "Every system of the paper and its ancestors: the bound of each on the same tokens.", _rivals)


@dataclass(frozen=True)
class _Equal:
    """The equal-cost study at one size."""

    base: RunConfig
    minutes: float
    branchings: tuple[int, int, int]
    blocks: int
    """Of the paper's network: as many more as the V-wide head's parameters make."""
    rates: tuple[float, ...]


CLIP = TreeMethod.clip
_DAY = 24 * 60.0
_EQUAL: dict[Size, _Equal] = {
    "toy": _Equal(TOY, 0.5, (17, 32, 64), 3, (2e-3, 4e-3, 8e-3)),
    "budget": _Equal(BUDGET, MINUTES, (225, 512, 1024), 15, (7e-4, 1.5e-3, 3e-3)),
    "full": _Equal(replace(SMALL, backbone=replace(SMALL.backbone, blocks=12)), _DAY, (225, 512, 1024), 17, (2.5e-4, 5e-4, 1e-3)),
}
"""The paper has no such table: at full size a run has a day."""


def _equal_cost(size: Size) -> list[Entry]:
    of = _EQUAL[size]
    middle = of.branchings[1]

    def entry(name: str, method: Any, what: str, branching: int | None = None, *, rate_of: str | None = None,
              blocks: int = 0, clusters: str = "") -> Entry:
        config = replace(of.base, name=f"equal-{name}", method=method, backbone=told(of.base, what, blocks=blocks))
        tree = None if branching is None else {"branching": branching, **({"method": clusters} if clusters else {"height": 2})}
        return Entry(name, config, tree, of.minutes, {"K": "V" if branching is None else branching},
                     () if rate_of else of.rates, rate_of)

    found = [entry("mdlm", MdlmMethod(), "none"), entry("mdlm-tied", MdlmMethod(head=Tied()), "none"),
             entry("mdlm-tied-clipped", MdlmMethod(head=Tied(), clip=CLIP), "none", rate_of="mdlm-tied"),
             entry("gidd", GiddMethod(p_uniform=0.0), "time"), entry("gidd-tied", GiddMethod(p_uniform=0.0, head=Tied()), "time"),
             entry(f"hdlm-{middle}", HdlmMethod(), "time", middle),
             entry(f"hdlm-tied-{middle}", HdlmMethod(head=Dense(tied=True)), "time", middle),
             entry(f"two-step-{middle}", TwoStepMethod(), "none", middle),
             entry(f"paper-{middle}", TreeMethod(clip=2.0), "time", middle, blocks=of.blocks)]
    for process, what in ((Cascade(), "level"), (Overlapping(), "none")):
        for head in (Shared(), Tied()):
            name, method = f"{process.kind}-{head.kind}", TreeMethod(process=process, head=head)  # type: ignore[attr-defined]
            found.append(entry(f"{name}-{middle}", method, what, middle))
            found += [entry(f"{name}-{other}", method, what, other, rate_of=f"{name}-{middle}")
                      for other in of.branchings if other != middle]
    ours, best = f"overlapping-tied-{middle}", TreeMethod(process=Overlapping(), head=Tied())
    found += [entry(f"{ours}-unclipped", replace(best, clip=1 / FLOOR["mdlm"]), "none", middle, rate_of=ours),
              entry(f"{ours}-exchange", best, "none", middle, rate_of=ours, clusters="exchange"),
              entry(f"{ours}-gamma-2", replace(best, process=Hierarchical(2.0)), "none", middle, rate_of=ours)]
    return [*found, entry("ar", Autoregressive(), "causal"), entry("ar-tied", Autoregressive(head=Tied()), "causal")]


EQUAL_COST = Study(
    "equal-cost", "Every method for the same minutes on the same machine, each with its own best learning rate out of three.",
    _equal_cost)


def _small_base(size: Size) -> list[Entry]:
    if size == "full":
        large = BackboneConfig(24, 1024, 16, "time")
        names = ("mdlm-small", "gidd-small", "hdlm-small", "ar-small")
        rivals = [recipe(name) for name in names] + [replace(recipe(name), name=name.replace("small", "base"), backbone=large)
                                                     for name in names[:3]]
        configs = [replace(SMALL, name="tdlm-small"), *rivals, replace(BASE, name="tdlm-base")]
        return [Entry(config.name, config, None if config.method.flat else {"branching": 512}) for config in configs]
    base, minutes, options = (TOY, None, K17) if size == "toy" else (BUDGET, MINUTES, {"branching": 512})
    wide = {"blocks": 3, "width": 96, "heads": 3} if size == "toy" else {"blocks": 12, "width": 768, "heads": 12}
    more = {"small": {"toy": 3, "budget": 15}[size], "base": {"toy": 4, "budget": 17}[size]}
    systems = {"tdlm": TreeMethod(), "mdlm": MdlmMethod(variant="gidd"), "gidd": GiddMethod(p_uniform=0.0), "hdlm": HdlmMethod(),
               "ar": Autoregressive()}
    found = []
    for large in ("small", "base"):
        for name, method in systems.items():
            shape = wide if large == "base" else {}
            shape = {**shape, "blocks": more[large]} if name == "tdlm" else shape
            config = replace(base, name=f"{size}-{name}-{large}", method=method,
                             backbone=told(base, "causal" if name == "ar" else "time", **shape))
            found.append(Entry(f"{name}-{large}", config, None if method.flat else options, minutes))
    return found


SMALL_BASE = Study(
    "small-base", "The paper's table: validation and generative perplexity of all systems at two sizes.", _small_base, generated,
    needs="a judge (pip install 'tdlm[hf]'; at toy size the study's own left-to-right run reads the samples)", judged=True)
