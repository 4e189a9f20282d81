# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, read instead of built: CI has no daemon to build it with."""

import ast
import json
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def instructions():
    """Return the Dockerfile as (instruction, rest) pairs, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def copied():
    return [
        source
        for name, rest in instructions()
        if name == "COPY"
        for source in rest.split()[:-1]  # the last one is where it goes
    ]


def ignored(path):
    """Tell whether .dockerignore hides a path; only the two plainest kinds of pattern are used."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("**/")
        assert re.fullmatch(r"[\w.-]+", pattern), f"teach this test the pattern {line}"
        parts = Path(path).parts if line != pattern else Path(path).parts[:1]
        if any(fnmatch(part, pattern) for part in parts):
            return True
    return False


def test_only_known_instructions_are_used():
    assert instructions()[0][0] == "FROM"
    assert {name for name, _ in instructions()} <= {"FROM", "WORKDIR", "COPY", "RUN", "CMD"}


@pytest.mark.parametrize("path", copied())
def test_what_is_copied_is_committed(path):
    assert (ROOT / path).exists()
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know what is tracked")
    command = ["git", "ls-files", "--", path]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = files.stdout.splitlines()
    assert tracked, f"{path} has no tracked file"
    assert not [name for name in tracked if ignored(name)]


def test_what_is_installed_was_copied_before():
    seen, installed = [], []
    for name, rest in instructions():
        seen += rest.split()[:-1] if name == "COPY" else []
        if name == "RUN":
            for path, extras in re.findall(r"\./([\w/-]+)(?:\[([\w,]+)\])?", rest):
                assert path in seen, f"RUN installs {path} before COPY brings it"
                project = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]
                unknown = set(filter(None, extras.split(","))) - set(
                    project.get("optional-dependencies", {})
                )
                assert not unknown, f"{path} has no extra {unknown}"
                installed.append(project["name"])
            assert re.search(r"-c (\S+)", rest)[1] in seen
    assert installed == ["vescale-dtensor", "vescale-fsdp"]


def test_the_image_runs_the_demo_of_nox():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    demo = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEMO"
    )
    name, rest = instructions()[-1]
    command = json.loads(rest)
    script = command.index("examples/train_lm.py")
    assert name == "CMD"
    assert command[script + 1 :] == demo.split()
    assert (ROOT / command[script]).parts[len(ROOT.parts)] in copied()
