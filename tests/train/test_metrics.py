"""Lines for people and for programs."""
from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tdlm.errors import RunError
from tdlm.train.metrics import (
    Live,
    MetricsFile,
    Progress,
    count,
    duration,
    levels_text,
    line,
    number,
    peak_flops,
    progress,
    read_metrics,
    truncate,
)

RECORD = {"kind": "train", "step": 20, "loss": 5.0, "bound": 6.5, "levels": [2.1, 4.4], "lr": 0.1, "grad_norm": 1.0,
          "tokens": 100, "seconds": 1.0, "tokens_per_second": 12_345.0, "memory": 3 * 2**30}


def test_one_line_says_it_all() -> None:
    text = line(RECORD, 2_000, utilisation=0.41, remaining=83)
    assert text == "step   20/2000  loss 5.000  bound 6.500 (4.40+2.10)  12.3k tok/s  MFU 41%  3.0 GiB  ETA 1:23"
    assert "MFU -" in line({**RECORD, "bound": None}, 2_000, utilisation=None, remaining=0) and text.isascii()


def test_a_tall_tree_shows_its_ends() -> None:
    assert levels_text([float(level) for level in range(16)]) == "15.00+14.00+..+0.00"


@pytest.mark.parametrize(("name", "tera"), [
    ("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", 65),
    ("NVIDIA L4", 121), ("NVIDIA L40", None), ("NVIDIA GeForce RTX 4090", 165), ("Some CPU, 2 threads", None)])
def test_known_chips(name: str, tera: float | None) -> None:
    assert peak_flops(name) == (None if tera is None else tera * 1e12)


def test_numbers_for_people() -> None:
    assert [count(value) for value in (12, 1_234, 565_432, 2.5e6)] == ["12", "1.2k", "565k", "2.5M"]
    shown = [duration(value) for value in (5, 83, 3_725, 200_000, float("inf"))]
    assert shown == ["0:05", "1:23", "1:02:05", "2d 7h", "-"]
    assert number(float("nan")) is None and number(1.5) == 1.5


def test_records_are_flushed_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write({"kind": "train", "step": step})
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    with open(path, "a") as other:
        other.write('{"kind": "train", "st')
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    truncate(path, 2)
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 2]
    file.close()


def test_a_line_that_is_no_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n{"step": 4}\n')
    with pytest.raises(RunError, match="line 2"):
        read_metrics(path)


def test_no_infinity_in_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        MetricsFile(tmp_path / "metrics.jsonl").write({"step": 1, "loss": float("nan")})


def test_without_a_terminal_there_are_few_plain_lines() -> None:
    stream = io.StringIO()
    shown = progress(stream)
    assert type(shown) is Progress
    for step in range(1, 101):
        shown.update(f"step {step}", step, 100)
    assert stream.getvalue() == "step 1\nstep 100\n"


def test_an_ascii_stream_takes_any_text() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Progress(stream).note("wrote runs/été")
    stream.seek(0)
    assert stream.read() == "wrote runs/?t?\n"


def test_a_terminal_gets_a_live_line() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    shown = progress(stream)
    assert isinstance(shown, Live)
    shown.update("step 1 [not markup]", 1, 2)
    shown.note("validation")
    shown.close()
    assert "[not markup]" in stream.getvalue() and "validation" in stream.getvalue()
