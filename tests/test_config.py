"""Settings typed on the command line: what is read as a list of numbers, and what is not."""
from __future__ import annotations

import pytest

from tdlm.config import override
from tdlm.errors import ConfigError
from tdlm.recipes import recipe


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
