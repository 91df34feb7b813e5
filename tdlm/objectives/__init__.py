"""One file, one method: what is trained, what is published, and how it is sampled."""
from .base import Loss, Objective
from .tree import TreeMethod, TreeObjective

__all__ = ["Loss", "Objective", "TreeMethod", "TreeObjective"]
