# SPDX-License-Identifier: Apache-2.0
"""Beside the old distribution, which its users are likely to have, the message names the cure."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vescale.legacy

LEGACY = Path(vescale.legacy.__file__).parent


def test_in_the_same_folder_the_message_names_the_cure(tmp_path):
    shutil.copytree(LEGACY, tmp_path / "vescale/legacy")
    old = tmp_path / "vescale/__init__.py"
    old.touch()
    # No site-packages, hence no torch: the check must come before any other import.
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import vescale.legacy"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {old} makes `vescale` one package")
    assert "`pip uninstall vescale`" in error


@pytest.mark.parametrize("package", ["vescale.dtensor", "vescale.fsdp"])
def test_the_check_is_the_same_in_all_packages(package):
    # find_spec, so that the other package need not be imported.
    other = Path(importlib.util.find_spec(package).origin).parent
    assert (LEGACY / "_shadow.py").read_bytes() == (other / "_shadow.py").read_bytes()
