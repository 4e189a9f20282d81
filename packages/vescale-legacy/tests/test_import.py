# SPDX-License-Identifier: Apache-2.0
"""Importing is free: nothing printed, nothing patched, nothing started."""

import subprocess
import sys

PROGRAM = """
import pdb
import sys
import torch
import torch.distributed
from torch.distributed.tensor import DTensor
from torch.utils.module_tracker import ModuleTracker
from torch.utils._python_dispatch import _get_current_dispatch_mode

watched = (torch, torch.Tensor, torch.jit, torch.nn.Module, torch.distributed, DTensor, pdb, sys)
# Importing a submodule sets it on its package: that is Python, not a patch.
kinds = type(sys)

def picture():
    return [{k: id(v) for k, v in vars(o).items() if type(v) is not kinds} for o in watched]

before = picture()
import vescale.legacy
import vescale.legacy.debug.pdb
assert picture() == before
assert _get_current_dispatch_mode() is None
assert not torch.distributed.is_initialized()
assert not torch.nn.modules.module._global_forward_pre_hooks
assert all(hasattr(vescale.legacy, name) for name in vescale.legacy.__all__)
"""


def test_importing_prints_nothing_and_patches_nothing():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
