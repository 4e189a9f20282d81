# SPDX-License-Identifier: Apache-2.0
"""What SECURITY.md says of the packages, read from their sources; needs no torch."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
RUN_OR_READ = {"pickle", "marshal", "shelve", "subprocess", "ctypes", "dill", "cloudpickle", "yaml"}
CONNECT = {"socket", "urllib", "http", "requests", "ssl", "xmlrpc"}
OBJECTS = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def name_of(path):
    return path.as_posix().partition("/src/vescale/")[2]


def called(tree):
    """Yield the last name of every function that is called, and the call."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


def unsafe_loads(tree):
    """Yield the lines of torch.load without ``weights_only=True``."""
    for _, call in called(tree):
        safe = any(
            word.arg == "weights_only" and ast.unparse(word.value) == "True"
            for word in call.keywords
        )
        if ast.unparse(call.func) == "torch.load" and not safe:
            yield call.lineno


def imported(tree):
    """Yield the packages that a file imports: the first part of each name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
            if node.module == "torch":  # `from torch import load` would hide a torch.load
                yield from (f"torch.{a.name}" for a in node.names if a.name == "load")


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.load(f)", [1]),
        ("x = 1\ntorch.load(f, weights_only=False)", [2]),
        ("torch.load(f, weights_only=flag)", [1]),
        ("torch.load(f, weights_only=True)\nmanager.load(f)", []),
    ],
)
def test_an_unsafe_load_is_seen(source, lines):
    assert list(unsafe_loads(ast.parse(source))) == lines


def test_sources_load_weights_only_and_run_nothing():
    wrong = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        wrong += [f"{name_of(path)}:{line}: torch.load" for line in unsafe_loads(tree)]
        names = {*imported(tree)} & {*RUN_OR_READ, *CONNECT, "torch.load"}
        names |= {name for name, call in called(tree) if isinstance(call.func, ast.Name)} & {
            "eval",
            "exec",
            "__import__",
        }
        wrong += [f"{name_of(path)}: {name}" for name in sorted(names)]
    assert len(SOURCES) > 100
    assert not wrong


def test_objects_travel_where_the_page_says():
    text = (ROOT / "SECURITY.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py)` \|", text, re.MULTILINE))
    found = {
        name_of(path)
        for path in SOURCES
        if OBJECTS & {name for name, _ in called(ast.parse(path.read_text()))}
    }
    assert found == listed
