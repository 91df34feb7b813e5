"""Studies: many runs on the same data, trained, evaluated and set side by side by one command (`tdlm study NAME`)."""
from .conductor import conduct
from .entry import SIZES, Entry, Size, Study, Wishes
from .named import STUDIES, study

__all__ = ["SIZES", "STUDIES", "Entry", "Size", "Study", "Wishes", "conduct", "study"]
