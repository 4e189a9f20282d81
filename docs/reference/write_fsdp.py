# SPDX-License-Identifier: Apache-2.0
"""Write fsdp.md from the docstrings: ``python docs/reference/write_fsdp.py [FOLDER]``."""

import sys
from pathlib import Path

from write_dtensor import entry

import vescale.fsdp

NAMES = (
    "clip_grad_norm_",
    "init_empty",
    "InitReport",
    "load_full_state_dict",
    "iter_full_parameters",
)
OPENING = """\
# Functions of vescale.fsdp

What works on a sharded model beside training it, written from the docstrings by
`docs/reference/write_fsdp.py`. *Collective* means that all ranks must call. Examples are in
[Clip, initialise, load and export](../how-to/clip-init-load-export.md).
"""


def page() -> str:
    """Return fsdp.md."""
    return OPENING + "".join(entry(name, getattr(vescale.fsdp, name)) for name in NAMES)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "fsdp.md").write_text(page())
