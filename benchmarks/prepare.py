"""How fast does text become token shards, and what limits it?   python -m benchmarks.prepare [--input FILE...]

Measured: whole calls of `prepare` by number of workers; the same work taken apart in one thread (decompress, parse and
cut, split into words, merge, ids out of the library, write). With `--gigabytes 2` also: prepare so much generated text
in a process of its own, kill it in the middle, continue with the same command; report both processes' peak memory and
verify the result against the manifest's hashes and against the text.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash

from tdlm.data.documents import Documents
from tdlm.data.prepare import SHARD_TOKENS, prepare
from tdlm.data.shards import JOURNAL
from tdlm.data.sources import ByteStream, resolve
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer
from tdlm.files import write_json
from tdlm.train.provenance import provenance

RESULT = Path(__file__).parent / "results" / "prepare.json"
GPT2 = Path(__file__).parents[1] / "tests" / "fixtures" / "gpt2.tokenizer.json.xz"
_CHILD = ("import sys; from tdlm.data.prepare import prepare; "
          "prepare([sys.argv[1]], sys.argv[2], tokenizer=sys.argv[3], shard_tokens=int(sys.argv[4]))")


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def seconds(act: Callable[[], Any]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


def novels() -> str:
    packed = resources.files("tdlm") / "assets" / "novels.train.jsonl.xz"
    with resources.as_file(packed) as path:
        return "\n".join(document.text for document in Documents([path]))


def demo_text(folder: Path, copies: int) -> Path:
    """The shipped novels, paragraphs shuffled differently in each copy: about 1 MB each."""
    parts = novels().split("\n")
    draw = np.random.default_rng(0)
    with open(folder / "novels.jsonl", "w", encoding="utf-8") as file:
        for _ in range(copies):
            order = draw.permutation(len(parts))
            for at in range(0, len(order), 40):
                file.write(json.dumps({"text": "\n".join(parts[k] for k in order[at:at + 40])}) + "\n")
    return folder / "novels.jsonl"


def whole(inputs: list[Path], tokenizer: Tokenizer, workers: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of wall time, and of processor time (what a busy machine does not falsify)."""
    wall, processor = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            used = time.process_time()
            took = seconds(lambda: prepare(inputs, Path(folder) / "out", tokenizer=tokenizer, workers=workers))
            used = time.process_time() - used
            tokens = TokenStore(Path(folder) / "out").manifest["tokens"]
        wall.append(tokens / took)
        processor.append(tokens / used)
    return {"tokens_per_second": spread(wall), "tokens_per_processor_second": spread(processor)}


def taken_apart(inputs: list[Path], tokenizer: Tokenizer, limit: int) -> dict[str, Any]:
    """Seconds of each kind of work on the first `limit` bytes of text, one after another in one thread."""
    texts: list[str] = []
    size = 0
    before = time.perf_counter()
    for document in Documents(inputs):
        texts.append(document.text)
        size += document.size
        if size >= limit:
            break
    reading = time.perf_counter() - before
    unpack = 0.0
    for source in resolve(inputs):
        if source.kind == "jsonl" and unpack == 0.0:
            with ByteStream(source) as stream:
                before = time.perf_counter()
                for _ in texts:
                    stream.readline(1 << 28)
                unpack = time.perf_counter() - before
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.encode_special_tokens = True
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = backend.pre_tokenizer
    groups = [texts[at:at + 8] for at in range(0, len(texts), 8)]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    splitting = encoding = listing = writing = 0.0
    tokens = 0
    digest = xxhash.xxh3_128()
    with tempfile.TemporaryFile() as file:
        for group in groups:
            splitting += seconds(partial(words.encode_batch_fast, group, add_special_tokens=False))
            before = time.perf_counter()
            encodings = backend.encode_batch_fast(group, add_special_tokens=False)
            between = time.perf_counter()
            rows = [np.array(one.ids, dtype=tokenizer.dtype) for one in encodings]
            after = time.perf_counter()
            for row in rows:
                data = row.tobytes()
                digest.update(data)
                file.write(data)
            writing += time.perf_counter() - after
            encoding, listing = encoding + between - before, listing + after - between
            tokens += sum(map(len, rows))
    parts = {"decompress": unpack, "parse and cut": max(reading - unpack, 0.0), "split into words": splitting,
             "merge (BPE)": max(encoding - splitting, 0.0), "ids out of the library": listing,
             "hash and write": writing}
    total = sum(parts.values())
    # Python's lock is held while JSON is parsed and ids are copied: the share that more threads cannot divide.
    return {"text_bytes": size, "tokens": tokens, "seconds": parts, "tokens_per_second_one_thread": tokens / total,
            "share_of_time": {name: value / total for name, value in parts.items()},
            "most_threads_that_help": total / (parts["parse and cut"] + listing + max(unpack, writing))}


def generated(number: int, block: list[str]) -> str:
    """Document `number` of the generated text: known again without being stored."""
    first = (number * 7919) % (len(block) - 40)
    return f"Document {number}.\n" + "\n".join(block[first:first + 20 + number % 20])


def sentences() -> list[str]:
    """50,000 sentences of words drawn as often as the shipped novels use them."""
    draw = np.random.default_rng(0)
    words = np.array(novels().split())
    return [" ".join(words[row]) for row in draw.integers(0, len(words), (50_000, 14))]


def write_generated(path: Path, size: int, block: list[str]) -> int:
    """A .jsonl file of at least `size` bytes; the number of its documents."""
    written, number = 0, 0
    with open(path, "w", encoding="utf-8", buffering=1 << 20) as file:
        while written < size:
            written += file.write(json.dumps({"text": generated(number, block)}) + "\n")
            number += 1
    return number


def _child(source: Path, out: Path, tokenizer: Path, shard_tokens: int, stop_after: int = 0) -> dict[str, Any]:
    """Run `prepare` in a process of its own, killed in the middle of the shard behind `stop_after` finished ones."""
    before = time.perf_counter()
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", _CHILD, str(source), str(out), str(tokenizer), str(shard_tokens)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    journal = out.with_name(out.name + ".partial") / JOURNAL
    peak, stopped = 0.0, False
    while process.poll() is None:
        peak = max(peak, _peak_megabytes(process.pid))
        if stop_after and not stopped and journal.exists() and len(_journal(journal)["shards"]) >= stop_after:
            time.sleep((time.perf_counter() - before) / stop_after / 3)  # into the next shard
            process.send_signal(signal.SIGKILL)
            stopped = True
        time.sleep(0.02)
    finished = _journal(journal)["tokens"] if journal.exists() else None
    return {"exit": process.returncode, "seconds": time.perf_counter() - before, "peak_megabytes": peak,
            "tokens_finished": finished}


def _journal(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:  # the run has just finished
        return {"shards": [], "tokens": None}


def _peak_megabytes(process: int) -> float:
    """The most memory a running process has had resident (Linux; a child's rusage would count its parent's too)."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return max((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM:")), default=0.0)


def kill_and_continue(gigabytes: float, tokenizer: Path, scratch: Path | None) -> dict[str, Any]:
    block = sentences()
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        source, out = Path(folder) / "generated.jsonl", Path(folder) / "out"
        documents = write_generated(source, int(gigabytes * 1e9), block)
        shard_tokens = min(SHARD_TOKENS, int(gigabytes * 1e9 / 40))  # ten shards or so
        killed = _child(source, out, tokenizer, shard_tokens, stop_after=4)
        published_early = out.exists()
        continued = _child(source, out, tokenizer, shard_tokens)
        before = time.perf_counter()
        store = TokenStore(out, verify=True)
        verifying = time.perf_counter() - before
        draw = np.random.default_rng(1)
        same = all(store.tokenizer.decode(store.document(number)) == generated(number, block)
                   for number in draw.integers(0, documents, 2000).tolist())
        result = {"text_bytes": store.manifest["text_bytes"], "documents": documents,
                  "tokens": store.manifest["tokens"], "killed": killed, "continued": continued,
                  "folder_existed_after_kill": published_early,
                  "hashes_equal_manifest": True, "seconds_to_verify": verifying,
                  "all_documents_there": store.manifest["documents"] == documents, "2000_documents_equal_text": same,
                  "shards": len(store.manifest["shards"]),
                  "tokens_per_second": store.manifest["tokens"] / (killed["seconds"] + continued["seconds"])}
        if killed["exit"] != -signal.SIGKILL or continued["exit"] != 0 or not (same and result["all_documents_there"]):
            raise SystemExit(f"the demonstration failed: {json.dumps(result)}")
        return result


def sections(chosen: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    tokenizer = Tokenizer.load(chosen.tokenizer)
    if not chosen.only_kill:
        with tempfile.TemporaryDirectory() as folder:
            inputs = chosen.input or [demo_text(Path(folder), 30)]
            speed: dict[str, Any] = {"inputs": [path.name for path in inputs], "repeats": chosen.repeats,
                                     "vocabulary": tokenizer.size,
                                     "parts": taken_apart(inputs, tokenizer, 20_000_000)}
            speed["by_workers"] = {str(count): whole(inputs, tokenizer, count, chosen.repeats)
                                   for count in chosen.workers}
            yield "speed", speed
    if chosen.gigabytes:
        yield "kill_and_continue", kill_and_continue(chosen.gigabytes, chosen.tokenizer, chosen.scratch)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--input", type=Path, nargs="+", help="text files (default: the shipped novels, 30 times)")
    options.add_argument("--tokenizer", type=Path, default=GPT2, help="a tokenizer.json (default: GPT-2's)")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--gigabytes", type=float, help="also kill and continue on so much generated text")
    options.add_argument("--only-kill", action="store_true", help="nothing but that")
    options.add_argument("--scratch", type=Path, help="a folder with room for 1.5 times the gigabytes")
    options.add_argument("--out", type=Path, default=RESULT)
    chosen = options.parse_args()
    result = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    for name, section in sections(chosen):
        load = os.getloadavg()[0]
        result[name] = {**section, "provenance": provenance("cpu", cpus=os.cpu_count(), load_average=load)}
        write_json(chosen.out, result)
        print(json.dumps({name: section}, indent=1))


if __name__ == "__main__":
    main()
