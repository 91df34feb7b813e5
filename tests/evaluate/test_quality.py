"""Generative perplexity and its companions against numbers worked out by hand, and the verb with a judge that is a table."""
from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tdlm.cli import main
from tdlm.data.batches import eval_rows
from tdlm.data.store import TokenStore
from tdlm.errors import ConfigError
from tdlm.evaluate.quality import distinct, diversity, entropy, judge_texts, mauve_score, perplexities
from tdlm.verbs import quality as verb
from tests.evaluate.test_protocols import trained  # noqa: F401 - a fixture
from tests.evaluate.toy_judge import toy_judge


def test_perplexities_by_hand():
    nats = [torch.tensor([1.0, 3.0]), torch.tensor([2.0]), torch.tensor([6.0, 0.0, 0.0])]
    got = perplexities(nats)
    assert got["tokens"] == 6 and got["tokens_per_text"] == 2 and got["nats"] == pytest.approx(2.0)
    assert got["perplexity"] == pytest.approx(math.exp(2)) and got["perplexity_per_text"] == pytest.approx(math.exp(2))
    uneven = perplexities([torch.tensor([1.0]), torch.tensor([4.0, 4.0, 4.0])])
    assert uneven["perplexity"] == pytest.approx(math.exp(13 / 4))
    assert uneven["perplexity_per_text"] == pytest.approx((math.exp(1) + math.exp(4)) / 2)
    residual = [1 - 13 / 4, 12 - 3 * 13 / 4]
    assert uneven["error"] == pytest.approx(math.sqrt(sum(one * one for one in residual) * 2 / 1) / 4)
    assert perplexities(nats[:1])["error"] is None, "one text has no spread"


def test_the_error_is_that_of_the_mean_over_texts():
    """Over many draws of texts of different lengths the error is the spread of the mean."""
    generator = torch.Generator().manual_seed(0)

    def corpus() -> dict:
        means = 3 + torch.randn(60, generator=generator, dtype=torch.float64)
        lengths = torch.randint(2, 30, (60,), generator=generator)
        return perplexities([mean + torch.zeros(int(length)) for mean, length in zip(means, lengths)])

    many = [corpus() for _ in range(400)]
    spread = float(np.std([one["nats"] for one in many]))
    assert np.mean([one["error"] for one in many]) == pytest.approx(spread, rel=0.1)


def test_entropy_and_distinct_by_hand():
    assert entropy(np.array([1, 1, 2, 2])) == pytest.approx(math.log(2)) and entropy(np.array([7, 7, 7])) == 0.0
    rows = [np.array([1, 2, 1, 2]), np.array([1, 2])]
    assert distinct(rows, 1) == pytest.approx(2 / 6) and distinct(rows, 2) == pytest.approx(2 / 4)
    assert distinct(rows, 3) == pytest.approx(2 / 2) and distinct(rows[1:], 3) is None, "n-grams do not run over texts"
    both = diversity([[1, 2, 1, 2], [5, 5]])
    assert both["entropy"] == pytest.approx(math.log(2) / 2)
    assert both["corpus_entropy"] == pytest.approx(math.log(3))
    assert set(both["distinct"]) == {"1", "2", "3"}


def test_texts_are_encoded_cut_and_judged():
    judge = toy_judge()
    texts = ["abcdef", "", "xy"]
    got, ids = judge_texts(judge, texts, max_length=4, batch=2)
    expected = [judge.model.nats([256, *b"abcd"][:i], b"abcd"[i - 1]) for i in range(1, 5)]
    expected += [judge.model.nats([256, *b"xy"][:i], b"xy"[i - 1]) for i in (1, 2)]
    assert got["nats"] == pytest.approx(sum(expected) / 6) and ids == [list(b"abcd"), [], list(b"xy")]
    assert (got["count"], got["empty"], got["cut"], got["tokens"]) == (3, 1, 1, 6)
    for nothing, words in [([""], "all 1 texts are empty"), ([], "no texts were given")]:
        with pytest.raises(ConfigError, match=words):
            judge_texts(judge, nothing, max_length=4)
    with pytest.raises(ConfigError, match="--max-length 0"):
        judge_texts(judge, texts, max_length=0)


def test_mauve_is_an_extra(monkeypatch):
    judge, seen = toy_judge(), {}

    def compute(p_features, q_features, **options):
        seen.update(options, shapes=(p_features.shape, q_features.shape))
        return SimpleNamespace(mauve=0.25)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute))
    assert mauve_score(judge, [[1], [2], []], [[3, 4], [5], [6]], seed=3) == 0.25
    assert seen["shapes"] == ((2, 258), (3, 258)) and seen["seed"] == 3
    with pytest.raises(ConfigError, match="at least 2 texts"):
        mauve_score(judge, [[1]], [[2], [3]])
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(ConfigError, match=r"pip install 'tdlm\[eval\]'"):
        mauve_score(judge, [[1], [2]], [[2], [3]])


def call(capsys, *line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as code:
        main(["quality", *line])
    shown = capsys.readouterr()
    return int(code.value.code or 0), shown.out, shown.err


def test_the_verb_draws_judges_and_keeps(trained, monkeypatch, capsys):  # noqa: F811
    judge = toy_judge()
    monkeypatch.setattr(verb, "load_judge", lambda spec, **options: judge)
    run = trained["run"]
    code, out, _ = call(capsys, str(run), "--count", "3", "--steps", "8", "--temperature", "0.7", "--batch", "2")
    assert code == 0 and "perplexity, corpus" in out and "human" in out and "temperature 0.7" in out
    kept = json.loads((run / "quality.json").read_text())
    drawn = json.loads((run / "quality-samples.json").read_text())["groups"][0]["samples"]
    own, _ = judge_texts(judge, [sample["text"] for sample in drawn], max_length=512)
    assert kept["samples"] == own and kept["samples"]["count"] == 3
    store = TokenStore(trained["data"])
    rows = eval_rows(store, length=16, layout="document").batch(0, 3).tokens
    human = [store.tokenizer.decode(row) for row in rows]
    assert kept["human"] == judge_texts(judge, human, max_length=512)[0], "the first held-out rows, of the same length"
    settings = kept["settings"]
    assert settings["steps"] == 8 and settings["temperature"] == 0.7 and 0 < settings["evaluations"] <= 8
    assert "float64" in settings["dtype"] and kept["judge"]["dtype"] == "float32" and kept["provenance"]["versions"]
    again, _, _ = call(capsys, str(run), "--samples", str(run / "quality-samples.json"))
    twice = json.loads((run / "quality.json").read_text())
    assert again == 0 and twice["samples"] == own and twice["settings"] == settings, "kept samples are judged the same"


def test_samples_of_other_places(trained, monkeypatch, tmp_path, capsys):  # noqa: F811
    monkeypatch.setattr(verb, "load_judge", lambda spec, **options: toy_judge())
    lines = tmp_path / "samples.jsonl"
    lines.write_text('"one text"\n{"text": "another one"}\n')
    code, out, _ = call(capsys, str(trained["run"]), "--samples", str(lines), "--json")
    assert code == 0 and json.loads(out)["samples"]["count"] == 2
    groups = tmp_path / "samples.json"
    entry = {"samples": [{"text": "free"}], "settings": {"length": 8}, "evaluations": {"mean": 4.0}}
    groups.write_text(json.dumps({"groups": [{"title": "Infilling", **entry}, {"title": "Free samples", **entry}]}))
    code, out, _ = call(capsys, str(trained["run"]), "--samples", str(groups), "--json")
    assert code == 0 and json.loads(out)["settings"]["evaluations"] == 4.0
    files = {"two.json": {"groups": [{"title": "a", **entry}, {"title": "b", **entry}]}, "bad.json": {"groups": [{"x": 1}]},
             "none.json": {"groups": [{"samples": []}]}, "empty.json": {"groups": [{"samples": [{"text": ""}]}]}}
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    for more, words in [([], "--samples FILE"), (["--count", "2", "--samples", str(lines)], "not both"),
                        (["--samples", str(lines), "--steps", "3"], "they need --count N"),
                        (["--samples", str(tmp_path / "two.json")], "none is called 'Free samples'"),
                        (["--samples", str(tmp_path / "bad.json")], "these are no samples"),
                        (["--samples", str(tmp_path / "none.json")], "no texts were given"),
                        (["--samples", str(tmp_path / "empty.json")], "all 1 texts are empty"),
                        (["--samples", str(tmp_path / "nowhere.json")], "no such file of samples"),
                        (["--count", "0"], "at least 1")]:
        code, _, err = call(capsys, str(trained["run"]), *more)
        assert code == 2 and words in err and err.count("\n") == 1, (more, err)
