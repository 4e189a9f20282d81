# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages of public modules, for mkdocstrings to fill from docstrings.

Read from the sources, nothing is imported; so a build needs no torch.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
# By package; "" is the package itself. Each has a page of its own.
MODULES = {
    "dtensor": ("", "random", "plan", "state", "debug"),
    "fsdp": ("", "optim", "state_dict", "checkpoint", "inspect", "planner"),
    "legacy": ("", "dtensor", "dmodule", "ddp", "optim", "devicemesh_api", "debug"),
}


def names() -> list[str]:
    """Return the full names of all public modules."""
    return [f"vescale.{x}.{y}".rstrip(".") for x, modules in MODULES.items() for y in modules]


def page(module: str) -> str:
    """Return the page of a module: its docstring, then each name that its ``__all__`` lists.

    Names of other projects are listed without their documentation.
    """
    tree = parse(module)
    page = f"# {module}\n\n{(ast.get_docstring(tree) or '').strip()}\n"
    homes = {name: home(module, name) for name in exported(tree)}
    if theirs := [name for name, where in homes.items() if not where]:
        listed = ", ".join(f"`{name}`" for name in theirs)
        page += f"\nFrom PyTorch, unchanged: {listed}.\n"
    for where in homes.values():
        if where and not source_of(where):  # modules have pages of their own
            page += f"\n::: {where}\n"
    return page


def home(module: str, name: str) -> str:
    """Return the full name of where ``name`` is defined; "" if that is another project."""
    if source_of(f"{module}.{name}"):
        tree = parse(module)
        if not any(origin == f"{module}.{name}.{name}" for origin in imports(tree).values()):
            return f"{module}.{name}"
    origin = imports(parse(module)).get(name)
    if origin is None:
        return f"{module}.{name}"
    parent, _, last = origin.rpartition(".")
    if not parent.startswith("vescale.") or parent.endswith("._torch_compat"):
        return ""
    return home(parent, last)


def exported(tree: ast.Module) -> list[str]:
    """Return the public names of a module: those of ``__all__``, else what it defines."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
            break
    else:
        defined = (ast.FunctionDef, ast.ClassDef)
        listed = [node.name for node in tree.body if isinstance(node, defined)]
    return sorted((name for name in listed if not name.startswith("_")), key=str.lower)


def imports(tree: ast.Module) -> dict[str, str]:
    """Return the full name behind each name that a module imports from another."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def parse(module: str) -> ast.Module:
    path = source_of(module)
    if path is None:
        raise ValueError(f"{module} is no module of packages/; see MODULES of {__file__}.")
    return ast.parse(path.read_text())


def source_of(module: str) -> Path | None:
    """Return the file of a module; None if there is no such module."""
    package, *inner = module.split(".")[1:]
    place = Path(ROOT, f"packages/vescale-{package}/src/vescale", package, *inner)
    files = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in files if path.exists()), None)
