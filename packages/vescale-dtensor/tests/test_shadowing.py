# SPDX-License-Identifier: Apache-2.0
"""Beside the old distribution, which shares files with this package, the message names the cure."""

import shutil
import subprocess
import sys
from pathlib import Path

import vescale.dtensor

DTENSOR = Path(vescale.dtensor.__file__).parent


def test_in_the_same_folder_the_message_names_the_cure(tmp_path):
    shutil.copytree(DTENSOR, tmp_path / "vescale/dtensor")
    old = tmp_path / "vescale/__init__.py"
    old.touch()
    # No site-packages, hence no torch: the check must come before any other import.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vescale.dtensor"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {old} makes `vescale` one package")
    assert "`pip uninstall vescale`" in error
