# SPDX-License-Identifier: Apache-2.0
"""The page of public reports names tests that exist, and that are run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/explanation/public-reports.md"
TESTS = ROOT / "packages/vescale-fsdp/tests"
LINES = PAGE.read_text().splitlines()
ROWS = [line for line in LINES if re.match(r"\| (?!---|report|what )", line)]
NAMED = sorted(set(re.findall(r"`(\S+\.py)::(\w+)`", PAGE.read_text())))


def test_every_row_names_a_test():
    assert len(ROWS) > 50
    for row in ROWS:
        assert re.search(r"`\S+\.py::\w+`", row.split("|")[-2]), row


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_named_tests_exist_and_are_run(path):
    tree = ast.parse((TESTS / path).read_text())
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in (name for at, name in NAMED if at == path):
        assert name in functions, f"{path} has no {name}; correct {PAGE.name}"
        assert name.startswith("test_") or name in used, f"{path} never runs {name}"


def test_each_report_is_linked_once():
    links = re.findall(r"\((https://github\.com/\S+?)\)", PAGE.read_text())
    assert len(links) == len(set(links))
    assert len(links) > 35
