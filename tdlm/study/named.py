"""The studies that come with the package."""
from __future__ import annotations

from ..errors import ConfigError
from ..registry import suggest
from .ablations import BRANCHING, JOINT, LEVEL_WEIGHTS, LEVELS, SIZE_RATIO, TREES, WEIGHT_SCHEDULES
from .entry import Study
from .settings import METHODS, TOY
from .systems import EQUAL_COST, RIVALS, SMALL_BASE
from .texts import PICTURE, SAMPLE_SHEETS, STEP_ALLOCATION

STUDIES: dict[str, Study] = {found.name: found for found in (
    RIVALS, EQUAL_COST, SMALL_BASE, BRANCHING, SIZE_RATIO, LEVELS, LEVEL_WEIGHTS, WEIGHT_SCHEDULES, JOINT, TREES, STEP_ALLOCATION,
    SAMPLE_SHEETS, PICTURE)}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise ConfigError(f"no study {name!r}{suggest(name, STUDIES)}")
    return STUDIES[name]


__all__ = ["METHODS", "RIVALS", "STUDIES", "TOY", "study"]
