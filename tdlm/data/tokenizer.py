"""Text <-> token ids, and the three ids that are not text: PAD, EOS and BOS.

A tokenizer is a Hugging Face `tokenizer.json` (any algorithm) plus the decision which ids are PAD, EOS and BOS. The
decision is taken once, from the usual names or by the caller's word, and is part of `hash`. A tokenizer without a PAD
token gets one, `<|pad|>`, behind its last id: GPT-2 (50,257 ids) has PAD 50257 and V = 50,258.
"""
from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..errors import TokenizerError

PAD, EOS = "<|pad|>", "<|endoftext|>"
_ROLES_KEY = "tdlm_roles"  # inside "model", where other readers of tokenizer.json ignore what they do not know
_NAMES = {
    "pad": (PAD, "<pad>", "[PAD]", "<|padding|>", "<PAD>", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>"),
    "eos": (EOS, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]", "<|eos|>", "<｜end▁of▁sentence｜>"),
    "bos": ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "[BOS]", "[CLS]", "<|bos|>",
            "<｜begin▁of▁sentence｜>"),
}
_GROUP = 1 << 16  # characters encoded at once: an Encoding holds about 100 bytes a token until its ids are taken


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE files: visible Latin-1 stands for itself,
    the other 68 bytes are numbered from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


_ALPHABET = _byte_alphabet()
_BYTE_OF = {character: byte for byte, character in enumerate(_ALPHABET)}


def _special(content: str, number: int) -> dict[str, Any]:
    return {"id": number, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True}


def _types(part: Any) -> set[str]:
    """The types that occur in a (nested) normalizer, pre-tokenizer or decoder of a tokenizer.json."""
    if isinstance(part, dict):
        return {str(part.get("type"))}.union(*map(_types, part.values()))
    if isinstance(part, list):
        return set().union(*map(_types, part))
    return set()


def _canonical(value: Any) -> Any:
    """Content without what does not matter: unset fields, and how a file happens to write the BPE merges."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items() if item is not None and item is not False}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value


class Tokenizer:
    """Text to ids and back. `size` is V with PAD; `eos_id` and `bos_id` are None where the tokenizer has none."""

    def __init__(self, data: dict[str, Any], *, pad: str | None = None, eos: str | None = None,
                 bos: str | None = None) -> None:
        """`data` is the content of a tokenizer.json; `pad`, `eos`, `bos` name tokens instead of the usual names
        ("" for none). A `pad` that is no token yet is appended."""
        data = {**data, "model": dict(data.get("model") or {}), "added_tokens": list(data.get("added_tokens") or []),
                "truncation": None, "padding": None}
        roles = dict(data["model"].pop(_ROLES_KEY, None) or {})
        roles.update({role: name for role, name in (("pad", pad), ("eos", eos), ("bos", bos)) if name is not None})
        if data["model"].get("dropout"):
            data["model"]["dropout"] = None  # ids must be a function of the text
        backend = _backend(data)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError("a tokenizer with at least one token is expected, this one has none")
        self._special_names = {item["content"] for item in data["added_tokens"] if item.get("special")}
        self.eos_id = self._role("eos", roles.get("eos"), vocabulary)
        self.bos_id = self._role("bos", roles.get("bos"), vocabulary)
        if self.bos_id is None and "bos" not in roles and self.eos_id == vocabulary.get(EOS, -1):
            self.bos_id = self.eos_id  # GPT-2's habit: the mark between two documents ends one and begins the other
        name = roles.get("pad") or next((name for name in _NAMES["pad"] if name in self._special_names), PAD)
        if name not in vocabulary:
            vocabulary[name] = max(vocabulary.values()) + 1
            if len(vocabulary) == vocabulary[name] + 1:  # with gaps in the ids a reader would number PAD otherwise
                data["added_tokens"].append(_special(name, vocabulary[name]))
        self.pad_id: int = vocabulary[name]
        if self.pad_id in (self.eos_id, self.bos_id):
            raise TokenizerError(f"PAD must be a token of its own, but {name!r} is EOS or BOS too; name another")
        self._data, self._backend, self._roles = data, backend, {key: roles[key] for key in sorted(roles)}
        self._vocabulary = vocabulary
        self.size: int = max(vocabulary.values()) + 1
        self.dtype = np.dtype(np.uint16 if self.size <= 1 << 16 else np.uint32)
        backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self._set_up()

    def _role(self, role: str, wanted: str | None, vocabulary: dict[str, int]) -> int | None:
        if wanted == "":
            return None
        if wanted is None:
            return next((vocabulary[name] for name in _NAMES[role] if name in self._special_names), None)
        if wanted not in vocabulary:
            raise TokenizerError(f"{role.upper()} should be {wanted!r}, which is no token of this tokenizer; "
                                 "name one of its tokens, or \"\" for none")
        return vocabulary[wanted]

    def _set_up(self) -> None:
        data, model = self._data, self._data["model"]
        decoder = _types(data.get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        self._spaced = "Metaspace" in decoder or "▁" in json.dumps(data.get("decoder"), ensure_ascii=False)
        before = data.get("pre_tokenizer")
        self.exact_bytes = (self._byte_level and data.get("normalizer") is None
                            and '"add_prefix_space": true' not in json.dumps(before))
        """Whether `token_bytes` of the ids of a text add up to exactly its UTF-8 bytes (byte-level BPE)."""
        vocabulary = model.get("vocab")
        self._raw_bytes = (self.exact_bytes and not model.get("merges") and isinstance(vocabulary, dict)
                           and vocabulary == {character: byte for byte, character in enumerate(_ALPHABET)})
        inner = set(vocabulary) if isinstance(vocabulary, dict) else {item[0] for item in vocabulary or []}
        by_id = {number: name for name, number in self._vocabulary.items()}
        marks = {number for number in (self.pad_id, self.eos_id, self.bos_id) if number is not None}
        self._marks = marks
        # Marks that the model itself could produce from plain text (seen with Unigram and whole-word models).
        self._guard = [] if self._byte_level and not model.get("ignore_merges") else sorted(
            number for number in marks if by_id[number] in inner)

    @classmethod
    def load(cls, path: str | Path, *, pad: str | None = None, eos: str | None = None,
             bos: str | None = None) -> Tokenizer:
        """From a `tokenizer.json`, the same compressed with xz, a folder that holds one, or the name `bytes`."""
        if str(path) == "bytes":
            return cls.from_bytes()
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            raw = path.read_bytes()
            data = json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
        except OSError as error:
            raise TokenizerError(f"{path}: a tokenizer.json or the name 'bytes' is expected ({error.strerror or error})"
                                 ) from error
        except (ValueError, lzma.LZMAError, EOFError) as error:
            raise TokenizerError(f"{path}: a tokenizer.json is expected, but the file cannot be read ({error})"
                                 ) from error
        if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
            raise TokenizerError(f"{path}: a tokenizer.json of the tokenizers library (with a \"model\") is expected; "
                                 "a vocab.json or tokenizer_config.json alone is not enough")
        try:
            return cls(data, pad=pad, eos=eos, bos=bos)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls) -> Tokenizer:
        """The built-in tokenizer: id = byte (256), EOS 256, PAD 257."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        return cls({"version": "1.0", "truncation": None, "padding": None,
                    "added_tokens": [_special(EOS, 256), _special(PAD, 257)], "normalizer": None,
                    "pre_tokenizer": level, "post_processor": None, "decoder": dict(level, use_regex=True),
                    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                              "vocab": {character: byte for byte, character in enumerate(_ALPHABET)}, "merges": []}})

    def to_json(self) -> str:
        """The content as a `tokenizer.json`, with PAD in it, that the tokenizers library reads too."""
        data = dict(self._data)
        if self._roles:
            data["model"] = {**data["model"], _ROLES_KEY: self._roles}
        return json.dumps(data, ensure_ascii=False, separators=(",", ":"))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @cached_property
    def hash(self) -> str:
        """What the ids mean, in 32 hex digits: vocabulary, merges, splitting rules, PAD, EOS and BOS."""
        model = dict(self._data["model"])
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.pop("merges", None) or []]
        added = [{"id": self._vocabulary[item["content"]], **{key: item.get(key) for key in (
            "content", "single_word", "lstrip", "rstrip", "normalized", "special")}}
            for item in self._data["added_tokens"] if item["content"] in self._vocabulary]
        content = {"model": model, "merges": merges, "normalizer": self._data.get("normalizer"),
                   "pre_tokenizer": self._data.get("pre_tokenizer"), "decoder": self._data.get("decoder"),
                   "added": sorted(added, key=lambda item: item["id"])}
        text = json.dumps([_canonical(content), self.size, self.pad_id, self.eos_id, self.bos_id], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text (uint16 or uint32), without any special tokens, whatever the text says."""
        if self._raw_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]
        rows: list[np.ndarray] = []
        for group in _groups(texts):
            rows += [np.array(encoding.ids, dtype=self.dtype)
                     for encoding in self._backend.encode_batch_fast(group, add_special_tokens=False)]
        if self._guard:
            rows = [row[~np.isin(row, self._guard)] for row in rows]
        return rows

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. PAD, EOS and BOS are left out; bytes that are no UTF-8 become U+FFFD."""
        numbers = [number for number in map(int, ids) if number not in self._marks]
        if self._byte_level:
            pieces = self._pieces
            return b"".join(pieces[number] for number in numbers).decode("utf-8", "replace")
        return self._backend.decode(numbers, skip_special_tokens=False)

    def piece(self, number: int) -> str:
        """One token for people to read; bytes that are no character appear as \\xNN."""
        if not 0 <= number < self.size:
            raise TokenizerError(f"a token id from 0 to {self.size - 1} is expected, got {number}")
        return self._pieces[number].decode("utf-8", "backslashreplace")

    @cached_property
    def _pieces(self) -> list[bytes]:
        pieces = [b""] * self.size
        added = {item["content"] for item in self._data["added_tokens"]}
        for name, number in self._vocabulary.items():
            if self._byte_level and name not in added and all(character in _BYTE_OF for character in name):
                pieces[number] = bytes(_BYTE_OF[character] for character in name)
            elif self._spaced and len(name) == 6 and name.startswith("<0x"):
                pieces[number] = bytes.fromhex(name[3:5])
            else:
                pieces[number] = (name.replace("▁", " ") if self._spaced and name not in added else name).encode()
        return pieces

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(V,) int32: the UTF-8 bytes that each token stands for, 0 for PAD, EOS and BOS.

        Exact for byte-level BPE (`exact_bytes`); for others it is the length of the token's own text.
        """
        lengths = np.array([len(piece) for piece in self._pieces], dtype=np.int32)
        if "WordPiece" in _types(self._data.get("decoder")):  # "##ing" continues a word, anything else begins one
            lengths += np.array([-2 if piece.startswith(b"##") else 1 for piece in self._pieces], dtype=np.int32)
        lengths[sorted(self._marks)] = 0
        return lengths


def _backend(data: dict[str, Any]) -> Backend:
    try:
        return Backend.from_str(json.dumps(data, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception for every fault of a file
        raise TokenizerError(f"the tokenizers library cannot use this tokenizer.json ({error})") from error


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


LARGEST = 4_000_000
"""Ids of a tokenizer that is trained here: the trainer takes their memory at once, and dies of what there is not."""


def train_bpe(documents: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of `size` ids (EOS and PAD are the last two) trained on these texts.

    A text with too few different words for so many merges gives a smaller tokenizer; `size` tells.
    """
    if size < 258:
        raise TokenizerError(f"a BPE tokenizer needs at least 258 ids (256 bytes, EOS, PAD), got {size}; "
                             "use 'bytes' for no merges")
    if size > LARGEST:
        raise TokenizerError(f"a BPE tokenizer of more than {LARGEST:,} ids is not trained, got {size:,}; "
                             "ask for fewer: bpe:SIZE")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size - 2, initial_alphabet=_ALPHABET, special_tokens=[],
                                  show_progress=False, max_token_length=64)
    backend.train_from_iterator(documents, trainer)
    data = json.loads(backend.to_str())
    count = backend.get_vocab_size()
    data["added_tokens"] = [_special(EOS, count), _special(PAD, count + 1)]
    return Tokenizer(data)
