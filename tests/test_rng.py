"""Counter-based numbers: the ends of the interval, what a row depends on, and times spread evenly over a global batch."""
from __future__ import annotations

import pytest
import torch

from tdlm.rng import Draws, to_uniform


def test_uniforms_keep_away_from_both_ends():
    """0 has an infinite weight, and at 1 a last step would move nobody: the smallest and the largest word reach neither."""
    least, most = to_uniform(torch.tensor([0, -1])).tolist()
    assert least == 2.0**-54 and most == 1 - 2.0**-53


def test_a_row_has_its_own_numbers_wherever_it_stands():
    whole = Draws(3, 5, "train", torch.arange(8))
    part = Draws(3, 5, "train", torch.tensor([6, 2]), total=8)
    for tag in ("state", "time"):
        assert torch.equal(part.uniform(tag, 4), whole.uniform(tag, 4)[[6, 2]])
        assert torch.equal(part.strata(tag), whole.strata(tag)[[6, 2]])
    others = [Draws(4, 5, "train", whole.rows), Draws(3, 6, "train", whole.rows), Draws(3, 5, "valid", whole.rows)]
    assert all((other.uniform("state", 4) != whole.uniform("state", 4)).all() for other in others)
    assert (whole.uniform("state", 4) != whole.uniform("time", 4)).all()


@pytest.mark.parametrize("total", [1, 2, 7, 512])
def test_every_stretch_of_one_over_the_batch_holds_a_time(total):
    times = Draws(0, 1, "train", torch.arange(total)).strata("time").sort().values
    assert torch.equal((times * total).floor(), torch.arange(total).double())
    assert torch.allclose(times.diff(), torch.full((total - 1,), 1 / total, dtype=torch.float64), rtol=0, atol=1e-15)


def test_many_numbers_at_once_are_the_numbers_one_by_one():
    draws, tags = Draws(3, 5, "sample", torch.tensor([4, 0, 7])), ["height 0", "height 1"]
    each = torch.stack([draws.uniform(tag, 6) for tag in tags])
    assert torch.equal(draws.uniforms(tags, 6), each)
    tag, row, column = (torch.arange(36) // 18, torch.arange(36) // 6 % 3, torch.arange(36) % 6)
    assert torch.equal(draws.single(tags, tag, row, column), each.flatten())
