"""The reverse process: time grids and generation."""
from .generate import Frame, Sampled, generate
from .grid import allocate

__all__ = ["Frame", "Sampled", "allocate", "generate"]
