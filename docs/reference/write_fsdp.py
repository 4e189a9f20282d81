# SPDX-License-Identifier: Apache-2.0
"""Write fsdp.md from the docstrings: ``python docs/reference/write_fsdp.py [FOLDER]``."""

import sys
from pathlib import Path

from write_dtensor import entry

import vescale.fsdp
import vescale.fsdp.checkpoint
import vescale.fsdp.state_dict

NAMES = (
    "clip_grad_norm_",
    "init_empty",
    "InitReport",
    "load_full_state_dict",
    "iter_full_parameters",
)
STATE_NAMES = tuple(name for name in vescale.fsdp.state_dict.__all__ if "state_dict" in name)
METHODS = ("save", "wait", "newest", "at", "load")
FILES = ("save_safetensors", "load_safetensors")
OPENING = """\
# Functions of vescale.fsdp

What works on a sharded model beside training it, written from the docstrings by
`docs/reference/write_fsdp.py`. *Collective* means that all ranks must call. Examples are in
[Clip, initialise, load and export](../how-to/clip-init-load-export.md) and [Move a script from
FSDP2](../how-to/migrate-from-fsdp2.md#5-load-your-checkpoints); of checkpoints in [Save a run, and
go on after a failure](../how-to/save-and-resume.md).
"""


def page() -> str:
    """Return fsdp.md."""
    found = [(name, getattr(vescale.fsdp, name)) for name in NAMES]
    state_dict = vescale.fsdp.state_dict
    found += [(f"state_dict.{name}", getattr(state_dict, name)) for name in STATE_NAMES]
    manager = vescale.fsdp.checkpoint.CheckpointManager
    found.append(("checkpoint.CheckpointManager", manager))
    found += [(f"CheckpointManager.{name}", getattr(manager, name)) for name in METHODS]
    found += [(f"checkpoint.{name}", getattr(vescale.fsdp.checkpoint, name)) for name in FILES]
    return OPENING + "".join(entry(name, value) for name, value in found)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "fsdp.md").write_text(page())
