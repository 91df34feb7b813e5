"""How states climb the tree: occupancies of a pure-birth chain over heights, forward and in reverse."""
from .base import Moment, Process, corrupt, draw_heights
from .cascade import Cascade
from .hierarchical import Hierarchical
from .overlapping import Overlapping
from .schedule import Cosine, Linear, Polynomial

__all__ = ["Cascade", "Cosine", "Hierarchical", "Linear", "Moment", "Overlapping", "Polynomial", "Process",
           "corrupt", "draw_heights"]
