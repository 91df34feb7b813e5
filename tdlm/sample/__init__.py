"""The reverse process: time grids, the draw of one outcome, and generation."""
from .draw import Choice, Frame, Sampled
from .generate import generate
from .grid import allocate
from .order import confidence, first_hitting

__all__ = ["Choice", "Frame", "Sampled", "allocate", "confidence", "first_hitting", "generate"]
