"""The verbs that make something: prepared text, a tree, a trained run."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, UseAppendAction, arg, subcommand

from ..errors import ConfigError
from .words import File, Flag, Folder, Plugins, Several, Text, Whole, import_plugins, say


@dataclass
class Prepare:
    """Turn text into token shards: .txt, .jsonl, .parquet (also .gz .bz2 .xz .zst), folders, or hf:DATASET."""

    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT")]
    """Files, folders or Hugging Face dataset ids (hf:NAME)."""
    out: Path
    """The prepared folder."""
    tokenizer: str = "bpe:4096"
    """A tokenizer.json, bytes, or bpe:SIZE to train one on this text."""
    valid: Text = None
    """The last documents as validation: a number, or a fraction such as 0.01 (default; OpenWebText: 100000)."""
    valid_input: Annotated[Several, arg(metavar="FILE")] = ()
    """Validation text in files of its own, instead of --valid."""
    text_field: str = "text"
    """Which field of a record holds the text."""
    errors: Literal["strict", "replace"] = "strict"
    """Invalid UTF-8: end with an error that says where, or replace it."""
    workers: Whole = None
    """Tokenizing threads (default: all cores)."""
    json: Flag = False
    """Print the manifest on stdout."""

    def run(self) -> dict[str, Any]:
        from ..console import prepare_line
        from ..data.prepare import prepare

        manifest = prepare(self.inputs, self.out, tokenizer=self.tokenizer, valid=_number(self.valid),
                           valid_inputs=self.valid_input, workers=self.workers, text_field=self.text_field, errors=self.errors,
                           progress=prepare_line())
        train, valid = manifest["splits"]["train"], manifest["splits"]["valid"]
        say(f"{self.out}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens of a vocabulary of "
            f"{manifest['vocabulary']:,}; {train[1] - train[0]:,} documents to train on, {valid[1] - valid[0]:,} to validate")
        return manifest


@dataclass
class TreeBuild:
    """Build a tree over a tokenizer's vocabulary: recursive balanced clustering of its tokens."""

    out: Path
    """The tree file (.safetensors)."""
    data: Folder = None
    """A prepared folder: gives the tokenizer and, unless --vectors says otherwise, the corpus statistics."""
    tokenizer: Text = None
    """A tokenizer.json, when there is no --data (needs --vectors or --method random)."""
    vectors: Text = None
    """Token vectors: corpus (default), an array (.npy .npz .safetensors), a run, or a checkpoint folder or hf:MODEL."""
    tensor: Text = None
    """Which tensor of a checkpoint is the input embedding, when its name is not one of the usual ones."""
    window: Whole = None
    """How many places away a neighbour in the corpus may stand (default: 4 for vectors, 2 for --method exchange)."""
    contexts: int = 4096
    """How many of the most frequent tokens count as neighbours in corpus vectors."""
    sides: Literal["apart", "pooled"] = "apart"
    """Corpus vectors: neighbours to the left and to the right kept apart, or counted together."""
    branching: int = 512
    """K: the most children a node may have."""
    min_ratio: float = 0.8
    """The smallest child, as a share of the mean size."""
    max_ratio: float = 1.2
    """The largest child, as a share of the mean size."""
    max_mass: Annotated[float | None, arg(metavar="R", help_behavior_hint="")] = None
    """The most of the text a child may hold, in multiples (2 or more) of the mean; a token counts at most half of that."""
    height: Whole = None
    """Ask for exactly this height; sizes are then capped so that it is reached."""
    max_depth: int = 32
    """Give up (with an error) below this depth."""
    complete: bool = True
    """Pad short paths so that every leaf has the same depth."""
    method: Literal["kmeans", "exchange", "random", "frequency", "hdlm"] = "kmeans"
    """kmeans; exchange (from there on for what classes tell about neighbours); random and frequency (controls); hdlm (soft)."""
    metric: Literal["cosine", "euclidean"] = "cosine"
    """How vectors are compared."""
    seed: int = 0
    device: Text = None
    """cpu or cuda (default: the GPU if there is one)."""
    json: Flag = False
    """Print the description on stdout."""

    def run(self) -> dict[str, Any]:
        from ..verbs.tree import build_from

        if self.out.is_dir():
            raise ConfigError(f"{self.out} is a folder; a tree is a file: --out {self.out / 'tree.safetensors'}")
        tree, description = build_from(
            data=self.data, tokenizer=self.tokenizer, vectors=self.vectors, branching=self.branching,
            min_ratio=self.min_ratio, max_ratio=self.max_ratio, height=self.height, max_depth=self.max_depth,
            complete=self.complete, method=self.method, metric=self.metric, seed=self.seed, device=self.device,
            tensor=self.tensor, window=self.window, contexts=self.contexts, sides=self.sides, max_mass=self.max_mass,
            say=say)
        tree.save(self.out)
        say(f"{self.out}: height {tree.height}, {tree.size:,} tokens, {tree.nodes - tree.size:,} inner nodes; "
            f"look at it: tdlm tree show {self.out}")
        return description


@dataclass
class TreeShow:
    """Describe a tree: sizes, utilisation, entropy per level, example clusters, a picture."""

    tree: Annotated[Positional[Path], arg(metavar="TREE")]
    """A tree file, or a run folder."""
    data: Folder = None
    """A prepared folder: adds token frequencies and readable tokens."""
    svg: File = None
    """Write the picture here."""
    json: Flag = False
    """Print the description on stdout."""

    def run(self) -> dict[str, Any]:
        from ..verbs.tree import show

        return show(self.tree, data=self.data, svg=self.svg, quiet=self.json)


@dataclass
class TreeVerb:
    """Build or look at a vocabulary tree."""

    what: Annotated[TreeBuild, subcommand(name="build")] | Annotated[TreeShow, subcommand(name="show")]

    @property
    def json(self) -> bool:
        return self.what.json

    def run(self) -> dict[str, Any]:
        return self.what.run()


@dataclass
class Train:
    """Train a recipe (demo, tiny, small, mdlm-small, ...), or continue the run in --out; with --dry-run only say its cost."""

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """The name of a recipe."""
    data: Folder = None
    """A prepared folder."""
    tree: File = None
    """A tree file."""
    out: Folder = None
    """The run folder."""
    set: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="FIELD=VALUE", help_behavior_hint="")] = ()
    """Change settings, for example: --set train.lr=3e-4 --set method.head=tied."""
    steps: Whole = None
    """Short for --set train.steps=N (the warm-up shrinks to a tenth if it would not fit)."""
    batch: Whole = None
    """Short for --set train.batch=N."""
    seed: Whole = None
    """Short for --set train.seed=N."""
    init: Annotated[str | None, arg(metavar="RUN|CHECKPOINT", help_behavior_hint="")] = None
    """Begin with the weights of another run, or of a published GIDD or MDLM checkpoint (gidd:..., mdlm:...)."""
    device: Text = None
    """cpu, cuda or cuda:N (default: a GPU if there is one)."""
    compile: Annotated[bool | None, arg(metavar="True|False", help_behavior_hint="")] = None
    """torch.compile the backbone (default: on a GPU)."""
    card: Annotated[str | None, arg(metavar="GIB|auto", help_behavior_hint="")] = None
    """Choose train.micro_batch and train.memory so that the run fits a GPU of so many GiB (auto: this one)."""
    dry_run: Flag = False
    """Parameters, FLOPs, memory and time; needs neither data nor tree."""
    vocabulary: int = 50_258
    """With --dry-run and no --tree: tokens with PAD (default: GPT-2)."""
    branching: int = 512
    """With --dry-run and no --tree: K."""
    plugin: Plugins = ()
    """Python modules to import first: they register processes, heads or methods of their own."""
    json: Flag = False
    """Print the result on stdout."""

    def config(self) -> Any:
        from dataclasses import replace

        from ..config import overrides
        from ..recipes import recipe

        import_plugins(self.plugin)
        config = recipe(self.recipe)
        if self.steps is not None:
            if self.steps < 1:
                raise ConfigError(f"--steps must be at least 1, got {self.steps}")
            warmup = config.train.warmup if config.train.warmup <= self.steps // 2 else self.steps // 10
            config = replace(config, train=replace(config.train, steps=self.steps, warmup=warmup))
        shorts = [f"train.{name}={value}" for name, value in (("batch", self.batch), ("seed", self.seed)) if value is not None]
        settings = []
        for item in [*shorts, *self.set]:
            name, equals, value = item.partition("=")
            if not equals:
                raise ConfigError(f"--set {item}: FIELD=VALUE is expected, for example --set train.lr=3e-4")
            settings.append((name, value))
        return overrides(config, settings)

    def run(self) -> dict[str, Any]:
        config = self.config()
        sizes = (self.vocabulary, self.branching) != (Train.vocabulary, Train.branching)
        if sizes and (self.tree is not None or not self.dry_run):
            raise ConfigError("--vocabulary and --branching are the sizes of a tree that does not exist yet, for --dry-run "
                              "without --tree; leave them out, or build such a tree with tdlm tree build")
        if self.dry_run:
            from ..console import show_plan
            from ..train.plan import plan, sized_tree
            from ..tree.tree import Tree

            tree = Tree.load(self.tree) if self.tree else None
            if self.card is not None:
                config = self.fitted(config, tree or sized_tree(config, self.vocabulary, self.branching), self.compile)
            result = plan(config, vocabulary=self.vocabulary, branching=self.branching, tree=tree, fused=self.compile)
            if not self.json:
                show_plan(result)
            return result
        needed = ("data", "out") if config.method.flat else ("data", "tree", "out")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"training needs {' and '.join('--' + name for name in missing)} (only --dry-run does without)")
        from ..train.loop import train

        assert self.data and self.out
        if self.card is not None:
            config = self.for_this_card(config)
        return train(config, data=self.data, tree=self.tree, out=self.out, device=self.device, compile=self.compile,
                     init=self.init)

    def for_this_card(self, config: Any) -> Any:
        from importlib.util import find_spec

        from ..data.store import TokenStore
        from ..device import choose_device
        from ..train.loop import tree_of

        assert self.data
        device = choose_device(self.device)
        if device.type != "cuda":
            raise ConfigError("--card is about the memory of a GPU, and this run has none; leave it out, or add --dry-run")
        fused = find_spec("triton") is not None if self.compile is None else self.compile
        return self.fitted(config, tree_of(config, self.tree, TokenStore(self.data))[0], fused)

    def fitted(self, config: Any, tree: Any, fused: bool | None) -> Any:
        """`config` with micro-batch and memory for the card."""
        from ..train.card import card_bytes, choose
        from ..train.plan import meta_model

        assert self.card is not None
        named = [name for name in ("train.micro_batch", "train.memory") if any(item.startswith(name + "=") for item in self.set)]
        if named:
            raise ConfigError(f"--card chooses {named[0]} itself; leave out --card, or --set {named[0]}")
        size = card_bytes(self.card, self.device)
        choice = choose(config, meta_model(config, tree), size, tree.height, fused)
        if choice is None:
            raise ConfigError(f"{config.name} does not fit into {size / 2**30:.1f} GiB with even one sequence at a time; take "
                              "a smaller network, for example --set backbone.width=512 --set backbone.heads=8")
        train = choice.config.train
        say(f"for a card of {size / 2**30:.1f} GiB: train.micro_batch={train.micro_batch or train.batch}, "
            f"train.memory={train.memory}; predicted: {choice.memory['total'] / 2**30:.1f} GiB")
        return choice.config


@dataclass
class Import:
    """Turn a published checkpoint (GIDD, MDLM) into a run folder: to evaluate it, sample from it, or begin with it."""

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """A safetensors file, a folder with config.json, or a name of the hub; gidd: or mdlm: in front says which family."""
    out: Path
    """The run folder."""
    tokenizer: Text = None
    """Its tokenizer.json (default: the one in the checkpoint's folder)."""
    heads: Whole = None
    """Attention heads, where the checkpoint has no config.json."""
    p_uniform: Annotated[float | None, arg(metavar="P", help_behavior_hint="")] = None
    """GIDD's share of uniform noise, where the checkpoint has no config.json."""
    json: Flag = False
    """Print the result on stdout."""

    def run(self) -> dict[str, Any]:
        from ..verbs.importing import import_run

        result = import_run(self.checkpoint, self.out, tokenizer=self.tokenizer, heads=self.heads, p_uniform=self.p_uniform)
        say(f"{self.out}: {result['family']} with {result['parameters']['total']:,} parameters over {result['tokens']:,} "
            f"tokens; next: tdlm eval {self.out} --data DIR, or tdlm train RECIPE ... --init {self.out}")
        return result


@dataclass
class Export:
    """Make a folder to hand on from a run: averaged weights in bf16, tree, tokenizer, numbers and a card; every verb opens it."""

    path: Annotated[Positional[Path], arg(metavar="RUN")]
    """The run folder (or an exported one, to write its card anew)."""
    out: Path
    """The new folder."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights; they are computed with in float32 either way."""
    about: File = None
    """A text for the head of the card: what this is, whose text it learned from, under which licence."""
    plugin: Plugins = ()
    json: Flag = False
    """Print the result on stdout."""

    def run(self) -> dict[str, Any]:
        from ..verbs.export import export_run

        import_plugins(self.plugin)
        about = None if self.about is None else self.about.read_text(encoding="utf-8")
        result = export_run(self.path, self.out, dtype=self.dtype, about=about)
        say(f"{self.out}: {result['weights']:,} weights of step {result['step']}, {result['bytes'] / 1e6:.1f} MB in "
            f"{result['dtype']}; next: tdlm sample {self.out}")
        return result


def _number(text: str | None) -> float | int | None:
    if text is None:
        return None
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        raise ConfigError(f"--valid is a number of documents or a fraction such as 0.01, got {text!r}") from None
