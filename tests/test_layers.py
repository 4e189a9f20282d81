# SPDX-License-Identifier: Apache-2.0
"""The arrows of the architecture, as a test. Goes to tests/; see style.md, section 1."""

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
FORBIDDEN = {
    "vescale-dtensor/src/vescale/dtensor": ("vescale.fsdp", "vescale.legacy"),
    "vescale-fsdp/src/vescale/fsdp": ("vescale.legacy",),
    "vescale-fsdp/src/vescale/fsdp/planner.py": ("torch", "vescale.dtensor"),
    "vescale-fsdp/src/vescale/fsdp/dbuffer.py": ("torch.nn",),
}


def imported_names(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("place", "banned"), FORBIDDEN.items())
def test_imports_point_down(place, banned):
    root = PACKAGES / place
    assert root.exists(), f"{place} moved; update FORBIDDEN, or this rule guards nothing."
    prefixes = tuple(f"{name}." for name in banned)
    for path in [root] if root.suffix else root.rglob("*.py"):
        wrong = [name for name in imported_names(path) if f"{name}.".startswith(prefixes)]
        assert not wrong, f"{path.relative_to(PACKAGES)} must not import {wrong}"


def test_vescale_stays_a_namespace():
    # One stray __init__.py hides every sibling: "No module named 'vescale.fsdp'".
    assert not list(PACKAGES.glob("*/src/vescale/__init__.py"))
