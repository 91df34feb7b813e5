"""The page is whole, self-contained, harmless and the same for the same inputs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from tdlm.errors import RunError
from tdlm.report import write_report

VOID = {"meta", "br", "input", "img", "link", "hr"}
EVIL = "</script><img src=x onerror=alert(1)><!--\"'&"


class Page(HTMLParser):
    """A strict reader: every element is closed in order; notes tags, attributes, scripts and the text."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.words.append(data)

    def values(self, *names):
        return [value or "" for _, name, value in self.attributes if name in names]

    @property
    def text(self):
        return " ".join(self.words)


def read(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(demo, tmp_path_factory):
    return read(write_report([demo], tmp_path_factory.mktemp("out") / "report.html"))


def test_sections_and_figures_are_there(page):
    for words in (
        "5.613",
        "274.07",
        "unigram",
        "trigram",
        "1.15 below",
        "From coarse to fine",
        "20,738",
        "793,600",
        "bounds -log p(x)",
        "9f3c2a7e41d05b86",
        "tdlm eval demo",
        "0123456789ab",
    ):
        assert words in page.text
    assert page.tags.count("svg") == 4 * 2 + 1 + 2  # four figures in two widths, the tree, two timelines
    assert {"r0-result", "r0-trace", "r0-samples", "r0-training", "r0-levels", "r0-tree", "r0-facts"} <= set(
        page.values("id")
    )


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    links = [value for value in page.values("href", "xlink:href") if value]
    assert links and all(value.startswith("#") and value[1:] in ids for value in links)
    inside = re.findall(r"url\(#([^)]+)\)", " ".join(value or "" for _, _, value in page.attributes))
    assert inside and set(inside) <= set(ids)


def test_nothing_is_loaded(demo, page, tmp_path):
    text = write_report([demo], tmp_path / "r.html").read_text(encoding="utf-8")
    assert page.values("src", "srcset", "data", "action", "poster") == []
    assert not re.search(r"@import|https?://|//[a-z]+\.", text)
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)", text))
    policy = next(value for value in page.values("content") if value.startswith("default-src"))
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_same_inputs_same_bytes(demo, make_run, tmp_path):
    again = make_run(tmp_path / "demo", steps=120)
    first = write_report([demo], tmp_path / "a.html").read_text().replace(str(demo), "")
    assert write_report([again], tmp_path / "b.html").read_text().replace(str(again), "") == first


def test_text_of_a_model_is_harmless(make_run, tmp_path):
    run = make_run(tmp_path / "evil", steps=40)
    frame = {"evaluations": 1, "time": 0.5, "height": [0, 1], "pieces": [EVIL, EVIL], "moved": [True, False]}
    (run / "trace.json").write_text(json.dumps({"title": EVIL, "prompt": EVIL, "frames": [frame]}))
    sample = {
        "text": EVIL + "\x00\ud800",
        "tokens": [1],
        "spans": [[0, 9, "given"], [3, 99, "given"], "x", [5, "a", "given"]],
    }
    (run / "samples.json").write_text(json.dumps({"settings": {EVIL: EVIL}, "samples": [sample]}))
    config = json.loads((run / "config.json").read_text())
    config["provenance"].update({"command": EVIL, "device": EVIL, "data_fingerprint": EVIL, EVIL: EVIL})
    config["config"]["name"] = EVIL
    (run / "config.json").write_text(json.dumps(config))
    score = json.loads((run / "eval.json").read_text())
    score.update({"pad": EVIL, "estimator": EVIL})
    (run / "eval.json").write_text(json.dumps(score))
    other = make_run(tmp_path / "<b>other$x_1$", steps=40)
    found = read(write_report([run, other], tmp_path / "out" / "r.html"))
    assert "img" not in found.tags and "b" not in [tag for tag, name, _ in found.attributes if name == "onerror"]
    assert not any(name.startswith("on") for _, name, _ in found.attributes)
    assert found.text.count("<img src=x onerror=alert(1)>") >= 5  # it is shown, as text
    data = json.loads(found.scripts[0])
    assert data["pieces"] == [EVIL]
    assert "<" not in found.scripts[0]


def test_a_picture_with_scripts_is_disarmed(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=40, only={"config.json"})
    (run / "tree.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'onload="alert(1)" width="9" height="9">'
        '<script>alert(1)</script><a xlink:href="http://x.y/"><rect id="a" style="fill:url(http://x.y/)"/></a>'
        '<image href="http://x.y/p.png"/><foreignObject><p>hi</p></foreignObject><use xlink:href="#a"/></svg>'
    )
    text = write_report([run], tmp_path / "r.html").read_text()
    assert "alert" not in text and "x.y" not in text and "foreignObject" not in text and "onload" not in text
    assert 'id="r0-tree-a"' in text and 'href="#r0-tree-a"' in text
    (run / "tree.svg").write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><style>p{color:red}</style></svg>'
    )
    text = write_report([run], tmp_path / "r.html").read_text()
    assert "p{color:red}" not in text and 'src="data:image/svg+xml;base64,' in text  # its rules cannot reach the page


def test_a_judge_stands_beside_the_samples(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=40)
    samples, human = ({"count": 256, "perplexity": value, "entropy": 5.4, "distinct": {"2": 0.6}} for value in (148.04, 25.1))
    quality = {"judge": {"name": EVIL}, "samples": samples, "human": human}
    (run / "quality.json").write_text(json.dumps(quality))
    held = json.loads((run / "samples.json").read_text())
    held["groups"][0]["evaluations"] = {"mean": 61.4, "max": 64}
    (run / "samples.json").write_text(json.dumps(held))
    found = read(write_report([run], tmp_path / "r.html"))
    assert "148.0" in found.text and "25.1" in found.text and "256 samples" in found.text and "img" not in found.tags
    assert "61 network evaluations" in found.text


def test_missing_parts_name_the_command(make_run, tmp_path):
    run = make_run(tmp_path / "bare", only={"config.json"})
    text = read(write_report([run], tmp_path / "r.html")).text
    for command in ("tdlm eval", "tdlm sample", "tdlm train", "tdlm tree show"):
        assert command in text


def test_before_the_evaluation_the_last_validation_stands_in(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=40, only={"config.json", "metrics.jsonl"})
    text = read(write_report([run], tmp_path / "r.html")).text
    assert "last validation during training" in text and "nats per token on 20,700 validation tokens" in text


def test_runs_measured_differently_never_share_a_table(demo, make_run, tmp_path):
    alike = make_run(tmp_path / "alike", steps=40, bound=5.4)
    other = make_run(tmp_path / "other", steps=40, bound=5.0, pad="given-length")
    found = read(write_report([demo, alike, other], tmp_path / "r.html"))
    text = re.sub(r"\s+", " ", found.text)
    assert "not measured alike" in text and "2 separate tables" in text
    first, second = text[text.index("Group 1 evaluated") :].split("Group 2 evaluated", 1)
    assert "5.400" in first and "5.000" not in first and "5.000" in second.split("What the settings")[0]
    assert "given-length" in text
    same = read(write_report([demo, alike], tmp_path / "s.html")).text
    assert "not measured alike" not in same and "train.steps: 120 -> 40" in same


def test_pad_mode_drop_is_called_no_bound(make_run, tmp_path):
    run = make_run(tmp_path / "run", steps=40, pad="drop", only={"eval.json"})
    text = read(write_report([run], tmp_path / "r.html")).text
    assert "Not a bound." in text and "\N{LESS-THAN OR EQUAL TO}" not in text


def test_odd_values_do_not_stop_the_page(make_run, tmp_path):
    run = make_run(tmp_path / "odd", steps=40)
    (run / "eval.json").write_text('{"bound": NaN, "levels": [null, "x"], "ngrams": 7, "pad": null, "provenance": []}')
    (run / "samples.json").write_text('{"samples": [{"text": null}, 3, {}], "settings": []}')
    (run / "trace.json").write_text(
        '{"frames": [{"height": [1, 2], "pieces": ["a"]}, {"height": [99999, null], "pieces": [1, null]}]}'
    )
    (run / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "bound": null, "levels": [null, 1.0]}\n[]\n{"kind": "valid"}\n{"ki'
    )
    (run / "config.json").write_text(
        '{"config": null, "provenance": {"parameters": {"blocks": "many"}, "versions": 3}}'
    )
    read(write_report([run], tmp_path / "r.html"))


def test_deep_trees_and_missed_levels(make_run, tmp_path):
    run = make_run(tmp_path / "deep", steps=60, height=9)
    found = read(write_report([run], tmp_path / "r.html"))
    assert "level 8 (nothing to group)" in found.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", "not valid JSON"),
        ("metrics.jsonl", "{\n{}\n", "line 1"),
        ("eval.json", "\udcff", "cannot be read"),
        ("tree.svg", "<p", "not valid SVG"),
        ("tree.svg", "<p/>", "instead of"),
        ("tree.safetensors", "xx", "damaged"),
        ("tree.svg", '<!DOCTYPE svg [<!ENTITY a "b">]><svg/>', "entities"),
    ],
)
def test_damage_is_named(make_run, tmp_path, name, content, words):
    run = make_run(tmp_path / "run", steps=40, only={"config.json"})
    (run / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError, match=words) as caught:
        write_report([run], tmp_path / "r.html")
    assert "\n" not in str(caught.value) and not (tmp_path / "r.html").exists()


def test_no_run_folder(tmp_path):
    with pytest.raises(RunError, match="no run to report on"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunError, match="no run folder"):
        write_report([tmp_path / "nothing"], tmp_path / "r.html")
    with pytest.raises(RunError, match="so it is no run folder"):
        write_report([tmp_path], tmp_path / "r.html")
