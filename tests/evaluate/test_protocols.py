"""Protocols against numbers worked out by hand: rows, averages and their errors, names, what is refused, what is kept."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from tdlm.cli import main
from tdlm.config import DataConfig
from tdlm.data.store import TokenStore
from tdlm.data.tokenizer import Tokenizer
from tdlm.errors import ConfigError, DataError
from tdlm.evaluate import judge
from tdlm.evaluate.likelihood import bound_of, evaluate_bound, weights
from tdlm.evaluate.protocols import PROTOCOLS, averages, check, protocol, protocol_rows, under
from tdlm.evaluate.sets import Texts, TextStore
from tdlm.objectives import TreeMethod
from tdlm.report import write_report
from tdlm.train.loop import train
from tdlm.train.run import open_run
from tdlm.tree import Tree
from tdlm.verbs import evaluate as verb
from tests.evaluate.toy_judge import toy_judge
from tests.train.conftest import CONFIG, make_world
from tests.worlds import TableModel, uniform_predictor

BYTES = Tokenizer.from_bytes()
END = 256


def store(*texts: str, tokenizer: Tokenizer = BYTES) -> TextStore:
    return TextStore(Texts("toy", "toy.txt", list(texts), "none", 0), tokenizer)


def test_both_averages_by_hand():
    """Rows of 1, 3, 4, 2 tokens in batches of 2, 2; and of 3, 1."""
    tokens = torch.tensor([1, 3, 4, 2])
    estimates = torch.tensor([[[2.0], [6.0], [4.0], [8.0]], [[4.0], [6.0], [4.0], [8.0]]], dtype=torch.float64)
    bound = bound_of(estimates, tokens, estimator="sampled", pad="drop", is_bound=False)
    assert bound.nats == pytest.approx((3 + 6 + 4 + 8) / 10) and bound.error == pytest.approx(math.sqrt(2 / 2) / 10)
    assert bound.averaged(2).nats == pytest.approx((9 / 4 + 12 / 6) / 2)
    assert bound.averaged(2).error == pytest.approx(math.sqrt(2 / 2) / 4 / 2)
    assert bound.averaged(3).nats == pytest.approx((3 * (13 / 8) + 1 * (8 / 2)) / 4), "batches count by their rows"
    assert bound.averaged(4).nats == pytest.approx(bound.nats) and bound.averaged(2).levels == [bound.averaged(2).nats]
    assert under(PROTOCOLS["strict"], bound).nats == bound.nats
    two = replace(PROTOCOLS["gidd-512-nopack"], batch=2)
    assert under(two, bound).nats == bound.averaged(2).nats
    assert averages(two, under(two, bound)) == {"tokens": pytest.approx(2.1), "batches": pytest.approx(2.125)}
    assert bound.averaged(2).to_json(20)["bits_per_byte"] == pytest.approx(21 / math.log(2) / 20), "of the text, not the average"


def test_batches_without_a_token_have_no_ratio():
    assert weights(torch.tensor([0, 0, 2, 2]), 2).tolist() == [0, 0, 0.25, 0.25]
    with pytest.raises(ConfigError, match="at least 1 row a batch"):
        weights(torch.tensor([1]), 0)


def test_the_protocols_on_a_uniform_predictor():
    """Each token costs the logs of its nodes' children, whatever is seen: `drop` counts real tokens only, `count` PAD too."""
    tree = Tree.from_nested([[0, 1, 6], [2, 7], [4, 5, 3]])  # PAD is 7, with one sibling
    cost = {token: math.log(3) + math.log(2 if token in (2, 7) else 3) for token in range(8)}
    rows = torch.tensor([[0, 1, 7, 7], [2, 2, 2, 4], [5, 7, 7, 7]])
    model, objective = TableModel(tree, uniform_predictor(tree)), TreeMethod().objective(tree, 7)
    by_pad = {pad: evaluate_bound(model, objective.with_pad(pad), rows, batch=2, seed=0, repeats=300)
              for pad in ("count", "drop")}
    real = [cost[0] + cost[1], 3 * cost[2] + cost[4], cost[5]]
    for pad, pads in (("count", [2, 0, 3]), ("drop", [0, 0, 0])):
        bound = by_pad[pad]
        expected = [own + many * cost[7] for own, many in zip(real, pads)]
        assert abs(bound.nats - sum(expected) / 7) < 5 * bound.error + 1e-9
        macro = bound.averaged(2)
        by_hand = (2 * (expected[0] + expected[1]) / 6 + 1 * expected[2] / 1) / 3
        assert abs(macro.nats - by_hand) < 5 * macro.error + 1e-9 and macro.error > 0
        assert bound.tokens == 7 and bound.is_bound is (pad == "count")


def test_framed_rows():
    text = store("abcde", "fgh")  # the stream: abcde EOS fgh EOS, ten tokens
    chosen = PROTOCOLS["mdlm-1024-pack"].changed(length=5)
    rows = protocol_rows(chosen, text)
    ids = lambda letters: [END if letter == "|" else ord(letter) for letter in letters]  # noqa: E731
    assert rows.tolist() == [ids("|abc|"), ids("|de||"), ids("|fgh|")], "the last EOS fills no row and is left out"
    assert protocol_rows(chosen, text, limit=2).tolist() == rows[:2].tolist()
    with pytest.raises(DataError, match="10 tokens, fewer than one framed row of 13"):
        protocol_rows(chosen.changed(length=13), text)
    with pytest.raises(ConfigError, match="at least one row"):
        protocol_rows(chosen, text, limit=0)


def test_document_rows_have_marks_a_window_and_pad():
    chosen = PROTOCOLS["gidd-512-nopack"].changed(length=6)
    rows = protocol_rows(chosen, store("ab", "a long document"))
    assert rows[0].tolist() == [END, *b"ab", END, BYTES.pad_id, BYTES.pad_id]
    inside = [END, *b"a long document", END]
    assert any(rows[1].tolist() == inside[start:start + 6] for start in range(len(inside) - 5))
    assert torch.equal(rows, protocol_rows(chosen, store("ab", "a long document"))), "the same window every time"


def test_packed_rows_are_the_stream():
    chosen = protocol("strict").of(DataConfig(4, "packed"), "count")
    assert protocol_rows(chosen, store("abc", "defg")).tolist() == [[*b"abc", END], [*b"defg"]]


def test_names_say_what_was_changed():
    gidd = protocol("gidd-512-nopack")
    assert gidd.changed(length=512, pad="drop", layout=None) is not gidd and gidd.changed(length=512).name == gidd.name
    other = gidd.changed(length=128, pad="count")
    assert other.name == "gidd-512-nopack with length=128, pad=count" and (other.length, other.pad) == (128, "count")
    data = DataConfig(64, "packed")
    strict = protocol("strict").of(data, "given-length")
    assert (strict.name, strict.layout, strict.length, strict.pad) == ("strict", "packed", 64, "given-length")
    assert protocol("strict").of(data, "drop").name == "strict with pad=drop", "a number that is no bound is not called strict"
    assert gidd.of(data, "count").to_json() == {
        "name": "gidd-512-nopack", "layout": "document", "length": 512, "normaliser": strict.to_json()["normaliser"],
        "pad": "drop", "average": "batches", "batch": 64, "estimator": "sampled"}
    with pytest.raises(ConfigError, match="did you mean 'gidd-512-nopack'"):
        protocol("gidd-512")


def test_what_does_not_fit_is_refused():
    gidd, mdlm = (protocol(name).of(DataConfig(), "count") for name in ("gidd-512-nopack", "mdlm-1024-pack"))
    check(gidd, BYTES, longest=512, who="this run")
    check(mdlm, BYTES, longest=None, who="a model without positions")
    with pytest.raises(ConfigError, match="rows of 1024 tokens, but gpt2-ish knows only 1000 positions; use --length 1000"):
        check(mdlm, BYTES, longest=1000, who="gpt2-ish")
    bare = Tokenizer({**BYTES._data, "added_tokens": []}, eos="", bos="")
    with pytest.raises(ConfigError, match="no BOS and no EOS; use --protocol strict"):
        check(gidd, bare, longest=512, who="this run")
    check(protocol("strict").of(DataConfig(), "count"), bare, longest=512, who="this run")
    with pytest.raises(ConfigError, match="at least 3 tokens"):
        check(mdlm.changed(length=2), BYTES, longest=512, who="this run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    world = make_world(folder)
    config = replace(CONFIG, train=replace(CONFIG.train, steps=2, warmup=1, valid_every=2))
    train(config, data=world["data"], tree=world["tree"], out=folder / "run", device="cpu")
    return {"run": folder / "run", **world}


def asked(run, **more):
    return verb.evaluate_run(run, **({"data": None, "split": "valid", "estimator": "auto", "pad": None, "repeats": 2,
                                      "limit": None, "batch": 4, "seed": 0, "say": lambda line: None} | more))


def test_eval_json_keeps_every_protocol_beside_the_strict_number(trained, tmp_path):
    run = open_run(trained["run"])
    eval_json = trained["run"] / "eval.json"
    gidd = asked(run, protocol="gidd-512-nopack", length=16)
    assert write_report([trained["run"]], tmp_path / "page.html").is_file(), "the page does without the strict number"
    strict = asked(run)
    kept = json.loads(eval_json.read_text())
    assert kept["bound"] == strict["bound"] and kept["protocol"]["name"] == "strict" and kept["is_a_bound"]
    other = kept["protocols"]["gidd-512-nopack with length=16"]
    assert other["bound"] == gidd["bound"] and other["protocol"]["average"] == "batches" and "ngrams" not in other
    assert other["averages"]["batches"] == other["bound"] and kept["averages"]["tokens"] == kept["bound"]
    assert other["estimator"] == "sampled" and kept["estimator"] in ("sampled", "count")
    packed = asked(run, protocol="mdlm-1024-pack", length=16)
    assert packed["pad"] == "pack" and packed["tokens"] == packed["documents"] * 16 and set(packed["ngrams"]) >= {"unigram"}
    assert set(json.loads(eval_json.read_text())["protocols"]) == {other["protocol"]["name"], packed["protocol"]["name"]}
    with pytest.raises(ConfigError, match="this run knows only 16 positions"):
        asked(run, protocol="mdlm-1024-pack")
    dropped = asked(run, pad="drop", length=8)
    assert dropped["protocol"]["name"] == "strict with pad=drop, length=8" and dropped["length"] == 8
    kept = json.loads(eval_json.read_text())
    assert kept["protocol"]["name"] == "strict", "a changed protocol leaves the run's own number alone"
    assert "strict with pad=drop, length=8" in kept["protocols"]
    write_report([trained["run"]], tmp_path / "page.html")


def test_the_gidd_number_is_a_mean_of_batch_ratios(trained):
    """The protocol's number from the rows' own numbers, worked out a second time."""
    run, chosen = open_run(trained["run"]), PROTOCOLS["gidd-512-nopack"].changed(length=16)
    rows = protocol_rows(chosen, TokenStore(trained["data"]))
    objective = run.assembly.objective.with_pad("drop")
    bound = evaluate_bound(run.assembly.model, objective, rows, batch=5, seed=0, repeats=2, estimator="sampled")
    nats, tokens = bound.estimates.sum(2).mean(0), (rows != BYTES.pad_id).sum(1)
    batches = [(nats[start:start + 3].sum() / tokens[start:start + 3].sum(), len(nats[start:start + 3]))
               for start in range(0, len(rows), 3)]
    by_hand = sum(ratio * size for ratio, size in batches) / len(rows)
    assert len(rows) == 10 and under(replace(chosen, batch=3), bound).nats == pytest.approx(float(by_hand), rel=1e-12)


def test_any_causal_model_stands_in_the_same_table(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verb, "load_judge", lambda spec, **options: toy_judge(20))
    line = ["eval", "hf:toy", "--data", str(trained["data"]), "--length", "16", "--out", str(tmp_path / "toy.json")]
    with pytest.raises(SystemExit) as code:
        main(line)
    shown = capsys.readouterr().out
    assert code.value.code == 0 and "protocol strict: average over tokens" in shown and "perplexity = " in shown
    result = json.loads((tmp_path / "toy.json").read_text())
    strict = asked(open_run(trained["run"]))
    assert (result["tokens"], result["bytes"]) == (strict["tokens"], strict["bytes"]), "the same rows"
    assert result["bits_per_byte"] == pytest.approx(result["bound"] * result["tokens"] / math.log(2) / result["bytes"])
    assert result["how"]["scored_as"] == "the same ids" and result["model"]["name"] == "toy"
    for more, words in [(["--protocol", "mdlm-1024-pack"], "toy knows only 20 positions; use --length 20"),
                        (["--pad", "drop"], "leave out --estimator and --pad")]:
        with pytest.raises(SystemExit) as code:
            main(["eval", "hf:toy", "--data", str(trained["data"]), *more])
        err = capsys.readouterr().err
        assert code.value.code == 2 and words in err and err.count("\n") == 1
    assert judge.load_judge is not verb.load_judge


@pytest.mark.parametrize("line,words", [
    (["eval", "RUN", "--protocol", "gidd"], "no evaluation protocol 'gidd'"),
    (["eval", "RUN", "--on", "wikitext"], "no text set 'wikitext'"),
    (["eval", "RUN", "--on", "ptb"], "give it as a file: --on ptb=PATH"),
    (["eval", "RUN", "--on", "lambada=nowhere.txt"], "nowhere.txt: no such file"),
    (["eval", "RUN", "--on", "lambada=x", "--data", "d"], "give either --on or --data"),
    (["eval", "RUN", "--out", "x"], "are for hub models"),
    (["eval", "hf:gpt2"], "give the folder: --data DIR"),
    (["eval", "none"], "no run folder none"),
])
def test_mistakes_are_one_line(trained, line, words, capsys):
    with pytest.raises(SystemExit) as code:
        main([str(trained["run"]) if word == "RUN" else word for word in line])
    err = capsys.readouterr().err
    assert code.value.code == 2 and words in err and err.count("\n") == 1


def test_a_set_is_scored_under_a_protocol_and_kept_by_its_name(trained, tmp_path, capsys):
    text = tmp_path / "passages.txt"
    text.write_text("The seed became a tree .\nA leaf fell .\n")
    with pytest.raises(SystemExit) as code:
        main(["eval", str(trained["run"]), "--on", f"lambada={text}", "--on", f"ptb={text}", "--repeats", "2", "--json"])
    assert code.value.code == 0
    printed = json.loads(capsys.readouterr().out)["sets"]
    kept = json.loads((trained["run"] / "eval.json").read_text())["sets"]
    assert kept["lambada"]["strict"] == printed["lambada"] and kept["ptb"]["strict"]["set"]["detokeniser"] == "ptb"
    assert kept["lambada"]["strict"]["set"]["documents"] == 2 and kept["lambada"]["strict"]["is_a_bound"]
    asked(open_run(trained["run"]))
    assert "sets" in json.loads((trained["run"] / "eval.json").read_text()), "a new strict number leaves them"
