# SPDX-License-Identifier: Apache-2.0
"""Write dtensor.md from the docstrings: ``python docs/reference/write_dtensor.py [FOLDER]``."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import vescale.dtensor

METHODS = ("from_local", "redistribute", "full_tensor", "to_local", "local_block", "as_torch")
PLAN = ("param", "input", "output", "grad", "explain")
LIBRARY = ("ragged_spec", "make_ragged", "set_local", "adopt")  # of vescale.dtensor.tensor
OPENING = """\
# vescale.dtensor

The public names and their contracts, written from the docstrings by
`docs/reference/write_dtensor.py`. Shapes are in brackets, sizes in elements unless bytes are named,
*collective* means that all ranks must call. Which operators run on ragged tensors is in
[Operators on ragged tensors](ops.md).

From `vescale.dtensor` itself come also, unchanged, PyTorch's {torch_names}.

Scripts written for the RaggedShard of upstream veScale find these import paths, and no others of
its private modules:

| module | names |
|---|---|
{upstream}
"""
UPSTREAM = (
    "_api",
    "_collective_utils",
    "_dtensor_spec",
    "_redistribute",
    "_utils",
    "debug",
    "debug._comm_mode",
    "placement_types",
    "vescale_utils",
    "vescale_utils.checkpoint",
    "vescale_utils.ragged_shard_utils",
)


def reexported(name: str) -> bool:
    value = getattr(vescale.dtensor, name)
    return not getattr(value, "__module__", "").startswith("vescale.")


def signature(value: object) -> str:
    """Return the signature with short names of types."""
    text = str(inspect.signature(value))
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text).replace("'", "")


def entry(name: str, value: object, level: str = "###") -> str:
    """Return a heading, the signature and the docstring of a function, a class or a method."""
    called = inspect.unwrap(value)
    doc = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")
    shown = f"{name.rpartition('.')[2]}{signature(called)}"
    return f"\n{level} {name}\n\n```text\n{wrapped(shown)}\n```\n\n{doc}\n"


def wrapped(text: str, width: int = 88) -> str:
    """Break a signature, one parameter a line, when it is longer than ``width``."""
    if len(text) <= width:
        return text
    head, rest = text.split("(", 1)
    inner, tail = rest.rsplit(")", 1)
    parameters, depth, start = [], 0, 0
    for index, letter in enumerate(inner):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            parameters.append(inner[start:index].strip())
            start = index + 1
    parameters.append(inner[start:].strip())
    return f"{head}(\n" + "".join(f"    {item},\n" for item in parameters) + f"){tail}"


def public(module: ModuleType) -> list[str]:
    return [name for name in module.__all__ if not name.startswith("_")]


def upstream_row(name: str) -> str:
    found = importlib.import_module(f"vescale.dtensor.{name}")
    exported = getattr(found, "__all__", ["_break_ragged_box"])
    return f"| `vescale.dtensor.{name}` | {', '.join(f'`{inner}`' for inner in exported)} |"


def page() -> str:
    """Return dtensor.md."""
    names = public(vescale.dtensor)
    torch_names = ", ".join(f"`{name}`" for name in names if reexported(name))
    upstream = "\n".join(map(upstream_row, UPSTREAM))
    opening = OPENING.format(torch_names=torch_names, upstream=upstream)
    parts = [opening, "\n## Placement\n"]
    ours = [name for name in names if not reexported(name)]
    first = ["RaggedShard", "is_ragged_shard"]
    parts += [entry(name, getattr(vescale.dtensor, name)) for name in first]
    parts += ["\n## DTensor\n", entry("DTensor", vescale.dtensor.DTensor)]
    for name in METHODS:
        parts.append(entry(f"DTensor.{name}", getattr(vescale.dtensor.DTensor, name)))
    parts.append("\n## Making and moving\n")
    plan = importlib.import_module("vescale.dtensor.plan")
    rest = [name for name in ours if name not in (*first, "DTensor", *plan.__all__)]
    parts += [entry(name, getattr(vescale.dtensor, name)) for name in rest]
    parts += ["\n## vescale.dtensor.plan\n", entry("Plan", plan.Plan)]
    parts += [entry(f"Plan.{name}", getattr(plan.Plan, name)) for name in PLAN]
    parts += [entry(name, getattr(plan, name)) for name in ("parallelize", "llama_tp_sp")]
    for name in ("random", "state", "debug"):
        module = importlib.import_module(f"vescale.dtensor.{name}")
        parts.append(f"\n## vescale.dtensor.{name}\n")
        parts += [entry(inner, getattr(module, inner)) for inner in public(module)]
    tensor = importlib.import_module("vescale.dtensor.tensor")
    parts.append("\n## For libraries: vescale.dtensor.tensor\n")
    parts += [entry(name, getattr(tensor, name)) for name in LIBRARY]
    return "".join(parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    (folder / "dtensor.md").write_text(page())
