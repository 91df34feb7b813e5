"""What is written is JSON for everybody, and whole."""
from __future__ import annotations

import json
import math
from pathlib import Path

from tdlm.files import json_text, write_json


def test_numbers_that_json_does_not_know_are_null(tmp_path: Path) -> None:
    value = {"perplexity": math.inf, "levels": [1.0, -math.inf], "of": ({"nan": math.nan}, "NaN", 3, None, True)}
    write_json(tmp_path / "value.json", value)
    expected = {"perplexity": None, "levels": [1.0, None], "of": [{"nan": None}, "NaN", 3, None, True]}
    assert json.loads((tmp_path / "value.json").read_text()) == json.loads(json_text(value)) == expected
    assert math.isinf(value["perplexity"]), "what is written is a copy"
