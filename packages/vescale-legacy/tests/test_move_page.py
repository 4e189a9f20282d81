# SPDX-License-Identifier: Apache-2.0
"""The how-to page about moving says what is true: its programs run, its names exist."""

import contextlib
import importlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

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


def check_programs(rank, world_size, train, debug, shown):
    run(train)
    assert VESCALE_DEVICE_MESH.shape == [2, 2]
    printed = run(debug).replace(f"on {DEVICE}(", "on cpu(")
    assert printed == (shown if rank == 1 else "")


def test_programs_run_and_print_what_is_shown(run_ranks):
    train, debug = blocks("python ranks=4")
    [shown] = blocks("text")
    run_ranks(check_programs, 4, train, debug, shown, exact=True)


def test_the_new_imports_work():
    [imports] = blocks("python")
    exec(imports, {})


def test_what_is_said_to_exist_is_what_exists():
    heads = re.findall(r"^### `(\w+)`$", PAGE.read_text(), re.MULTILINE)
    assert sorted(heads) == sorted(vescale.legacy.__all__)


def test_replacements_exist_and_missing_modules_are_missing():
    rows = table("| Old module | today |")
    assert len(rows) > 5
    for old, today in rows:
        for name in re.findall(r"`vescale\.(\w+)", old):
            assert not hasattr(vescale.legacy, name), f"{name} exists: move it to section 3"
        for name in re.findall(r"`((?:torch|vescale)(?:\.\w+)*)`", today):
            resolve(name)


def test_rewritten_calls_are_torchs(fake_world):
    fake_world(0, 4)
    mesh = VESCALE_DEVICE_MESH.init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    assert x.redistribute(mesh, [Replicate()], async_op=True).to_local().clone().shape == (8,)
    assert Partial("sum") == Partial()
    y = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)])
    product = y @ y.redistribute(mesh, [Shard(1)]).t()  # reshards one of them silently
    assert product.full_tensor().clone().shape == (8, 8)
