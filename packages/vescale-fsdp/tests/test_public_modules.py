# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

SCRIPT = """
import sys
import vescale.fsdp
assert "vescale.fsdp.optim" not in sys.modules, "not before it is used"
vescale.fsdp.optim.Muon, vescale.fsdp.state_dict.get_state_dict
vescale.fsdp.checkpoint.CheckpointManager, vescale.fsdp.inspect.layout
try:
    vescale.fsdp.nothing
except AttributeError as error:
    assert "no attribute 'nothing'" in str(error)
else:
    raise SystemExit(1)
"""


def test_public_modules_need_no_import_of_their_own():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
