"""Studies: many runs on the same data, trained, evaluated and set side by side by one command (`tdlm study NAME`)."""
from .engine import conduct
from .entry import Entry, Study
from .named import STUDIES, study

__all__ = ["STUDIES", "Entry", "Study", "conduct", "study"]
