# SPDX-License-Identifier: Apache-2.0
"""The how-to page about moving says what is true: its programs run, its names exist."""

import contextlib
import importlib
import io
import re
from pathlib import Path
from types import ModuleType

import pytest

import vescale.legacy
from testing.ranks import DEVICE
from vescale.legacy.devicemesh_api import VESCALE_DEVICE_MESH

PAGE = Path(__file__).parents[3] / "docs/how-to/move-from-old-vescale.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the page, so a whole checkout")


def blocks(info):
    return re.findall(rf"^```{info}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def table(heading):
    rows = PAGE.read_text().partition(heading)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def resolve(name):
    """Return what a dotted name stands for, importing as much of it as is a module."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"nothing is called {name}")


def run(code):
    """Run a program of the page as the file train.py; return what it prints."""
    # The ranks of this suite have a process group already, and close it themselves.
    code = code.replace("dist.destroy_process_group()", "").replace('"cpu"', repr(DEVICE))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "train.py", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def check_programs(rank, world_size, others, debug, shown):
    for program in others:
        run(program)
        assert VESCALE_DEVICE_MESH.shape == [2, 2]
    printed = run(debug).replace(f"on {DEVICE}(", "on cpu(")
    assert printed == (shown if rank == 1 else "")


def test_programs_run_and_print_what_is_shown(run_ranks):
    *others, debug = blocks("python ranks=4")
    [shown] = blocks("text")
    run_ranks(check_programs, 4, others, debug, shown, exact=True)


def test_the_new_imports_work():
    [imports] = blocks("python")
    exec(imports, {})


def test_what_is_said_to_exist_is_what_exists():
    lines = re.findall(r"^### (.+)$", PAGE.read_text(), re.MULTILINE)
    heads = [name for line in lines for name in re.findall(r"`(\w+)`", line)]
    modules = [
        n for n in vescale.legacy.__all__ if isinstance(getattr(vescale.legacy, n), ModuleType)
    ]
    assert sorted(heads) == sorted(modules)


def test_replacements_exist_and_missing_modules_are_missing():
    rows = table("| Old module | today |")
    assert len(rows) > 5
    for old, today in rows:
        for name in re.findall(r"`vescale\.(\w+)", old):
            if ": states of" in old:
                continue
            assert not hasattr(vescale.legacy, name), f"{name} exists: move it to section 3"
        for name in re.findall(r"`((?:torch|vescale)(?:\.\w+)*)`", today):
            resolve(name)


def test_functions_that_replace_methods_exist():
    for names, now in table("| Old method | now |"):
        if "functions of these names" not in now:
            continue
        for name in re.findall(r"`\.?(?:\w+\.)?(\w+)[(`]", names):
            homes = re.findall(r"`(vescale[\w.]+)`", now)
            assert any(hasattr(importlib.import_module(home), name) for home in homes), name
