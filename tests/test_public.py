"""The public names: each is there, is no module (whatever was imported before it), and importing costs what torch costs."""
from __future__ import annotations

import subprocess
import sys
import types

import tdlm
import tdlm.cli
from tdlm.recipes import RECIPES
from tdlm.registry import KINDS
from tdlm.train.plan import plan


def test_every_public_name_is_a_thing_and_not_a_folder():
    for name in tdlm.__all__:
        assert not isinstance(getattr(tdlm, name), types.ModuleType), f"tdlm.{name} is hidden by a module of the same name"


def test_importing_loads_nothing():
    code = "import sys, tdlm; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_recipes_have_the_sizes_of_the_papers():
    """Totals with the GPT-2 vocabulary and K=512; the baselines as in their own papers (GIDD: 169.6M)."""
    totals = {"small": 170_189_568, "base": 414_206_720, "mdlm-small": 169_662_546, "gidd-small": 169_662_546,
              "hdlm-small": 170_055_762, "sedd-small": 169_662_546, "gpt2-small": 124_475_904}
    for name, total in totals.items():
        assert plan(RECIPES[name])["parameters"]["total"] == total, name
    assert plan(RECIPES["joint-small"], branching=2)["parameters"]["head"] > 65_536 * 768


def test_every_method_has_a_recipe():
    used = {config.method.kind for config in RECIPES.values()}
    methods = {kind for kind, part in KINDS.items() if getattr(part, "role", None) == "method" and
               part.__module__.startswith("tdlm.")}
    assert used == methods
