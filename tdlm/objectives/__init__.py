"""One file, one method: what is trained, what is published, and how it is sampled."""
from .ar import Autoregressive, AutoregressiveObjective, AutoregressiveTree
from .base import Loss, Objective
from .gidd import GiddMethod, GiddObjective
from .hdlm import HdlmMethod, HdlmObjective
from .joint import JointMethod, JointObjective
from .mdlm import MdlmMethod
from .sedd import SeddMethod, SeddObjective
from .tree import TreeMethod, TreeObjective
from .two_step import TwoStepMethod

__all__ = ["Autoregressive", "AutoregressiveObjective", "AutoregressiveTree", "GiddMethod", "GiddObjective",
           "HdlmMethod", "HdlmObjective", "JointMethod", "JointObjective", "Loss", "MdlmMethod", "Objective", "SeddMethod",
           "SeddObjective", "TreeMethod", "TreeObjective", "TwoStepMethod"]
