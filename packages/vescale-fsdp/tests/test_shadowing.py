# SPDX-License-Identifier: Apache-2.0
"""What happens beside the old distribution vescale 0.0.1, which owns ``vescale/__init__.py``.

Imports are tried in interpreters that see only the folders a test makes: no site-packages, hence
no torch, so the check must come before any other import of ``vescale.fsdp``.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import vescale.dtensor
from vescale.fsdp._shadow import REINSTALL, check_namespace

FSDP = Path(__file__).parents[1] / "src" / "vescale" / "fsdp"
EXTEND_PATH = "import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n"


def ours(folder, *, dtensor=True):
    """Lay out ``folder`` as our wheels do, with or without the file that the old one shares."""
    shutil.copytree(FSDP, folder / "vescale/fsdp", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vescale/dtensor").mkdir()
    if dtensor:
        (folder / "vescale/dtensor/__init__.py").touch()
    return folder


def old(folder, init=""):
    (folder / "vescale/dtensor").mkdir(parents=True, exist_ok=True)
    (folder / "vescale/__init__.py").write_text(init)
    (folder / "vescale/dtensor/__init__.py").touch()
    return folder


def error_of_import(name, *path):
    """Return the last line that a fresh interpreter with this search path writes."""
    code = f"import sys\nsys.path[:0] = {[str(folder) for folder in path]}\nimport {name}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def assert_names_the_cure(error, init):
    assert error.startswith("ImportError: ")
    assert str(init) in error
    assert "`pip uninstall vescale`" in error
    assert f"`{REINSTALL}`" in error


def test_in_the_same_folder_the_message_names_the_cure(tmp_path):
    site = old(ours(tmp_path))
    assert_names_the_cure(error_of_import("vescale.fsdp", site), site / "vescale/__init__.py")


def test_a_package_that_extends_its_path_is_named_too(tmp_path):
    checkout, site = old(tmp_path / "old", EXTEND_PATH), ours(tmp_path / "ours")
    error = error_of_import("vescale.fsdp", checkout, site)
    assert_names_the_cure(error, checkout / "vescale/__init__.py")


@pytest.mark.parametrize("order", ["old first", "ours first"])
def test_in_another_folder_it_hides_us_and_python_speaks_instead(tmp_path, order):
    # A regular package wins over a namespace wherever it stands on the path: nothing of ours
    # runs. The how-to page lists this message.
    path = [old(tmp_path / "old"), ours(tmp_path / "ours")]
    error = error_of_import("vescale.fsdp", *(path if order == "old first" else path[::-1]))
    assert error == "ModuleNotFoundError: No module named 'vescale.fsdp'"


def test_what_is_missing_after_uninstalling_it_is_named(tmp_path):
    site = ours(tmp_path, dtensor=False)
    error = error_of_import("vescale.fsdp", site)
    assert error.startswith("ImportError: ")
    assert str(site / "vescale/dtensor") in error
    assert f"`{REINSTALL}`" in error


def test_without_vescale_dtensor_python_speaks(tmp_path):
    site = ours(tmp_path, dtensor=False)
    (site / "vescale/dtensor").rmdir()
    assert error_of_import("vescale.fsdp", site).startswith("ModuleNotFoundError: No module named")


def test_a_namespace_passes():
    check_namespace(sys.modules["vescale"])


def test_the_error_carries_the_path():
    package = ModuleType("vescale")
    package.__file__ = "/elsewhere/vescale/__init__.py"
    with pytest.raises(ImportError, match="PYTHONPATH") as caught:
        check_namespace(package)
    assert (caught.value.name, caught.value.path) == ("vescale", package.__file__)


def write_wheel(folder, name, version, files):
    """Write a wheel of empty files: enough for pip to install and uninstall."""
    info = f"{name}-{version}.dist-info"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents = dict.fromkeys(files, "")
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents[f"{info}/WHEEL"] = wheel
    contents[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*contents, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in contents.items():
            archive.writestr(file, text)
    return path


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="this environment has no pip")
def test_uninstalling_takes_the_shared_files_and_reinstalling_brings_them_back(tmp_path):
    shared = "vescale/dtensor/__init__.py"
    theirs = write_wheel(tmp_path, "vescale", "0.0.1", ["vescale/__init__.py", shared])
    mine = write_wheel(tmp_path, "vescale_dtensor", "0.1.0", [shared])
    venv.create(tmp_path / "env", with_pip=False)
    scripts = "Scripts" if os.name == "nt" else "bin"
    python = tmp_path / "env" / scripts / "python"

    def pip(*arguments):
        # Isolated from the settings of whoever runs this test, which may say where to install.
        command = [sys.executable, "-m", "pip", "--isolated", "--python", str(python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def installed():
        return {path.name for path in (tmp_path / "env").rglob("vescale/**/*.py")}

    offline = ("install", "--no-index", "--no-deps", "--no-compile", "--quiet")
    pip(*offline, str(theirs), str(mine))
    assert list((tmp_path / "env").rglob("vescale/__init__.py"))
    pip("uninstall", "--yes", "--quiet", "vescale")
    assert installed() == set(), "then the how-to page need not say to reinstall"
    # As REINSTALL does, from a file in the place of an index.
    pip(*offline, "--force-reinstall", str(mine))
    assert installed() == {"__init__.py"}
    assert not list((tmp_path / "env").rglob("vescale/__init__.py"))


def test_this_environment_is_sound():
    assert sys.modules["vescale"].__file__ is None
    assert vescale.dtensor.__file__ is not None
