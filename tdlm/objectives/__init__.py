"""One file, one method: what is trained, what is published, and how it is sampled."""
from .ar import Autoregressive, AutoregressiveObjective, AutoregressiveTree
from .base import Loss, Objective
from .tree import TreeMethod, TreeObjective

__all__ = ["Autoregressive", "AutoregressiveObjective", "AutoregressiveTree", "Loss", "Objective", "TreeMethod", "TreeObjective"]
