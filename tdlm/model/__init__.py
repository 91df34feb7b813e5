"""The network: a backbone that returns hidden states and a head that gives a distribution over children."""
from .adaptive import Adaptive, AdaptiveHead
from .causal import Causal, CausalBackbone
from .dense import Dense, DenseHead
from .head import LevelHead, PerLevel, Shared, SharedHead, Tied, TiedHead
from .joint import JointHead, Neighbourhood
from .model import Model
from .path import Path, PathHead
from .transformer import Backbone

__all__ = ["Adaptive", "AdaptiveHead", "Backbone", "Causal", "CausalBackbone", "Dense", "DenseHead", "JointHead",
           "LevelHead", "Model", "Neighbourhood", "Path", "PathHead", "PerLevel", "Shared", "SharedHead", "Tied", "TiedHead"]
