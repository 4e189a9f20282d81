# SPDX-License-Identifier: Apache-2.0
"""The arrows of the architecture, as a test: what each file may import, and what opens it.

Reads the sources only, so it runs without torch: ``nox -s layers``.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "packages"
DTENSOR = "vescale-dtensor/src/vescale/dtensor"
FSDP = "vescale-fsdp/src/vescale/fsdp"
ENTRY = (
    "vescale.fsdp.fully_shard",
    "vescale.fsdp.collecting",
    "vescale.fsdp.wrap_arguments",
    "vescale.fsdp.module",
    "vescale.fsdp.copying",
    "vescale.fsdp.comm_settings",
    "vescale.fsdp.finalization",
    "vescale.fsdp.forward_methods",
    "vescale.fsdp.sharing",
    "vescale.fsdp.gather_settings",
    "vescale.fsdp.reduce_settings",
    "vescale.fsdp.units",
)
MODULES = (*ENTRY, "vescale.fsdp.unit", "vescale.fsdp.schedule")
PARAMETERS = ("vescale.fsdp.param_group", *MODULES)
FORBIDDEN = {
    DTENSOR: ("vescale.fsdp", "vescale.legacy"),
    f"{DTENSOR}/layout.py": ("torch", "numpy"),
    FSDP: ("vescale.legacy",),
    f"{FSDP}/dbuffer.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/collectives.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/direct_collectives.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/custom_collectives.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/comm_options.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/data_mesh.py": ("torch.nn", *PARAMETERS),
    f"{FSDP}/gradients.py": ("torch.nn", "vescale.dtensor", *PARAMETERS),
    f"{FSDP}/managed.py": PARAMETERS,
    f"{FSDP}/sharded_gradients.py": PARAMETERS,
    f"{FSDP}/reduction.py": PARAMETERS,
    f"{FSDP}/param_group.py": MODULES,
    f"{FSDP}/sharded_group.py": PARAMETERS,
    f"{FSDP}/unit.py": ENTRY,
    f"{FSDP}/optim": MODULES,
    f"{FSDP}/simulate": PARAMETERS,
}
# Integers only: these import the standard library and each other, so that a layout question is
# answered without ranks, and one day without torch.
PURE = (
    f"{FSDP}/planner.py",
    f"{FSDP}/lanes.py",
    f"{FSDP}/lane_search.py",
    f"{FSDP}/padding_cause.py",
    f"{FSDP}/slices.py",
    f"{FSDP}/packing.py",
    f"{FSDP}/packing_exact.py",
    f"{FSDP}/shard_search.py",
    f"{FSDP}/validate.py",
    f"{FSDP}/granularity.py",
    f"{FSDP}/presets.py",
    f"{FSDP}/tiles.py",
    f"{FSDP}/optim/roots.py",
    f"{FSDP}/state_dict/flat.py",
    f"{FSDP}/checkpoint/folder.py",
    f"{FSDP}/checkpoint/manifest.py",
)
SOURCES = sorted(PACKAGES.glob("*/src/**/*.py"))


def module_name(place):
    return place.partition("/src/")[2].removesuffix(".py").replace("/", ".")


def parse(path):
    return ast.parse(path.read_text(), str(path))


def imported_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name, *roots):
    return f"{name}.".startswith(tuple(f"{root}." for root in roots))


def private(name):
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_torch_names(tree):
    """Yield the private names of torch in a file: imported, or reached from an imported name."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    torch_names = {short for short, full in bound.items() if under(full, "torch")}
    yield from (bound[short] for short in torch_names if private(bound[short]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.partition(".")[0] in torch_names and name.replace(".", "").isidentifier():
                yield from [name] if private(node.attr) else []


@pytest.mark.parametrize(("place", "banned"), FORBIDDEN.items(), ids=FORBIDDEN)
def test_imports_point_down(place, banned):
    root = PACKAGES / place
    assert root.exists(), f"{place} moved; update FORBIDDEN, or this rule guards nothing."
    for path in [root] if root.suffix else root.rglob("*.py"):
        wrong = [name for name in imported_names(parse(path)) if under(name, *banned)]
        assert not wrong, f"{path.relative_to(PACKAGES)} must not import {wrong}"


@pytest.mark.parametrize("place", PURE)
def test_planning_is_pure_python(place):
    root = PACKAGES / place
    assert root.exists(), f"{place} moved; update PURE, or this rule guards nothing."
    allowed = (*sys.stdlib_module_names, *map(module_name, PURE))
    wrong = [name for name in imported_names(parse(root)) if not under(name, *allowed)]
    assert not wrong, f"{place} may import the standard library and {PURE}, not {wrong}"


def test_private_torch_names_have_one_home():
    wrong = {
        str(path.relative_to(PACKAGES)): names
        for path in SOURCES
        if path.name != "_torch_compat.py" and (names := sorted(private_torch_names(parse(path))))
    }
    assert not wrong, f"move these to the package's _torch_compat.py, with a test: {wrong}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._foreach_add_(x, y)", ["torch._foreach_add_"]),
        ("import torch.distributed as dist\ndist.c10d._get()", ["dist.c10d._get"]),
        ("from torch.nn import _reduction", ["torch.nn._reduction"]),
        ("from torch._C import Size", ["torch._C.Size"]),
        ("import torch\ntorch.Tensor.__add__(self._x, torch.zeros(1))", []),
        ("from mine import _helper\n_helper.torch._private", []),
    ],
)
def test_a_private_torch_name_is_seen(source, found):
    assert list(private_torch_names(ast.parse(source))) == found


def test_vescale_stays_a_namespace():
    # One stray __init__.py hides every sibling: "No module named 'vescale.fsdp'".
    assert not list(PACKAGES.glob("*/src/vescale/__init__.py"))
    assert sorted(path.parent.name for path in PACKAGES.glob("*/src/vescale/*/py.typed")) == [
        path.name.removeprefix("vescale-") for path in sorted(PACKAGES.iterdir())
    ]


def test_every_file_names_its_licence():
    folders = ("packages", "tests", "testing", "examples", "benchmarks", "docs")
    files = [
        *ROOT.glob("*.py"),
        *(path for name in folders for path in ROOT.glob(f"{name}/**/*.py")),
    ]
    bare = [
        str(path.relative_to(ROOT))
        for path in files
        if not path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ]
    assert len(files) > 20
    assert not bare, f"open these with the SPDX line: {bare}"
