"""Settings typed on the command line: what is read as a list of numbers, and what is not."""
from __future__ import annotations

from typing import Literal

import pytest

from tdlm.config import override
from tdlm.errors import ConfigError
from tdlm.recipes import recipe
from tdlm.registry import from_json


@pytest.mark.parametrize("typed,thresholds", [("0.3", (0.3,)), ("0.3,", (0.3,)), ("0.3,0.6", (0.3, 0.6)),
                                              ("(0.3, 6e-1)", (0.3, 0.6)), ("none", None)])
def test_a_list_may_have_one_number(typed, thresholds):
    """A tree of height 2 has one threshold."""
    assert override(recipe("small"), "method.process.thresholds", typed).method.process.thresholds == thresholds


@pytest.mark.parametrize("name,path,typed", [("small", "method.process.thresholds", "0.3,abc"), ("small", "method.clip", ""),
                                             ("hdlm-small", "method.clip", "0,nan"), ("small", "train.steps", "1,2")])
def test_what_is_no_list_of_numbers_is_refused(name, path, typed):
    with pytest.raises(ConfigError):
        override(recipe(name), path, typed)


@pytest.mark.parametrize("name,path,typed,says", [
    ("small", "train.ema", "x", "--set train.ema: a number or none is expected, got 'x'"),
    ("small", "train.lr", "1e400", "--set train.lr: a number is expected, got '1e400'"),
    ("small", "train.weight_decay", "nan", "--set train.weight_decay: a number is expected, got 'nan'"),
    ("small", "train.micro_batch", "1.5", "--set train.micro_batch: a whole number or none is expected, got '1.5'"),
    ("hdlm-small", "method.clip", "1,2,3", "--set method.clip: a list of 2 values or none is expected, got '1,2,3'"),
    ("small", "train.betas", "0.9", "--set train.betas: a list of 2 values is expected, got '0.9'"),
    ("small", "train.dtype", "half", "--set train.dtype: 'half' is not allowed; choose one of 'float32', 'bfloat16'"),
])
def test_a_mistake_is_told_all_that_would_fit(name, path, typed, says):
    with pytest.raises(ConfigError) as caught:
        override(recipe(name), path, typed)
    assert str(caught.value) == says


def test_a_mistake_inside_one_of_several_options_is_told_itself():
    for expected in (tuple[float, ...] | None, None | tuple[float, ...], tuple[int, ...] | tuple[float, ...]):
        with pytest.raises(ConfigError, match=r"^x\[1\]: a number is expected, got 'a'$"):
            from_json(expected, [1.5, "a"], "x")
    with pytest.raises(ConfigError, match=r"^x: 'a' or 'b' or none is expected, got 'c'$"):
        from_json(Literal["a", "b"] | None, "c", "x")
    assert from_json(tuple[str, ...] | tuple[float, ...], [1.5], "x") == (1.5,)
