"""A tree over a tokenizer's vocabulary: tables and invariants, how it is built, how it is looked at."""
from .tree import Tree, split_bounds

__all__ = ["Tree", "split_bounds"]
