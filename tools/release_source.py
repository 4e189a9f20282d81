# SPDX-License-Identifier: Apache-2.0
"""Is the checkout ready to release a package? ``python -m tools.release_source fsdp``.

Reads files and git tags only; what is built from them is checked by release_archives.py. Instead of
a package a tag may be named (``vescale-fsdp-v0.1.0``), whose version has to be the package's.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from tools.findings import Finding, report

ROOT = Path(__file__).parents[1]
PACKAGES = ("dtensor", "fsdp", "legacy")  # each may depend on those before it
TAG = re.compile(r"vescale-(?P<name>\w+)-v(?P<version>\S+)")
LICENCES = ("LICENSE", "NOTICE")


def package_of(wanted: str) -> tuple[str, str | None]:
    """Return the package, and the version if ``wanted`` is a tag. Raises ValueError for others."""
    match = TAG.fullmatch(wanted)
    name, version = (match["name"], match["version"]) if match else (wanted, None)
    if name not in PACKAGES:
        raise ValueError(
            f"{wanted!r} is neither a package, one of {', '.join(PACKAGES)}, nor a release tag, "
            "such as vescale-fsdp-v0.1.0"
        )
    return name, version


def folder_of(name: str, root: Path = ROOT) -> Path:
    return root / "packages" / f"vescale-{name}"


def project_of(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Return the ``project`` table of a package."""
    return tomllib.loads((folder_of(name, root) / "pyproject.toml").read_text())["project"]


def check(name: str, tagged: str | None, root: Path = ROOT) -> Iterator[Finding]:
    """Yield every finding about package ``name``; ``tagged`` is the version that a tag names."""
    project = project_of(name, root)
    version = project["version"]
    yield f"version {version}", version_problem(version, tagged)
    text = (folder_of(name, root) / "CHANGELOG.md").read_text()
    yield f"changelog has {version}", changelog_problem(text, version)
    tag = f"vescale-{name}-v{version}"
    yield f"tag {tag}", tag_problem(tag, tagged, root)
    yield from dependency_findings(name, project, root)
    for file in LICENCES:
        theirs = folder_of(name, root) / file
        same = theirs.exists() and theirs.read_text() == (root / file).read_text()
        yield (
            f"licence file {file}",
            "" if same else f"copy {file} of the root into {theirs.parent}",
        )


def version_problem(version: str, tagged: str | None) -> str:
    try:
        known = Version(version)
    except InvalidVersion:
        return "is no version as PEP 440 wants it; write one such as 0.1.0"
    if str(known) != version or len(known.release) != 3 or known.local:
        return f"write three numbers, as in 0.1.0, not {version}"
    if tagged not in (None, version):
        return f"the tag says {tagged}; make them equal"
    return ""


def changelog_problem(text: str, version: str) -> str:
    """Say what a released version lacks: its dated section below an ``Unreleased`` one."""
    sections = re.findall(r"^## \[([^\]]+)\](.*)$", text, re.MULTILINE)
    names = [name for name, _ in sections]
    if names[:1] != ["Unreleased"]:
        return "put an empty `## [Unreleased]` above all other sections"
    if version not in names:
        return f"rename `## [Unreleased]` to `## [{version}] - YYYY-MM-DD`; see RELEASING.md"
    if names[1] != version:
        return f"the newest section is [{names[1]}], not [{version}]"
    if not re.fullmatch(r" - \d{4}-\d{2}-\d{2}", sections[1][1]):
        return f"write the day: `## [{version}] - YYYY-MM-DD`"
    body = text.split(f"## [{version}]", 1)[1].split("\n## [", 1)[0]
    if not re.search(r"^- \S", body, re.MULTILINE):
        return f"[{version}] lists no change"
    return ""


def tag_problem(tag: str, tagged: str | None, root: Path) -> str:
    """Say whether ``tag`` is on another commit, or, where a tag is released, is missing."""
    found = _git(root, "rev-parse", "--verify", "--quiet", f"refs/tags/{tag}^{{commit}}")
    if found and found != _git(root, "rev-parse", "HEAD"):
        return f"is on {found[:10]}, not on what is checked out; a released version never moves"
    if tagged and not found:
        return "does not exist here; fetch it, or name the package instead of the tag"
    return ""


def dependency_findings(name: str, project: dict[str, Any], root: Path) -> Iterator[Finding]:
    wanted = [Requirement(text) for text in project["dependencies"]]
    for requirement in wanted:
        yield f"range {requirement}", range_problem(requirement)
    siblings = [r for r in wanted if r.name.startswith("vescale-")]
    expected = [f"vescale-{before}" for before in PACKAGES[: PACKAGES.index(name)]]
    odd = sorted({r.name for r in siblings} ^ set(expected))
    yield "siblings", f"expected {expected}; odd are {odd}" if odd else ""
    for requirement in siblings:
        version = project_of(requirement.name.removeprefix("vescale-"), root)["version"]
        fits = requirement.specifier.contains(version)
        problem = "" if fits else f"{requirement} leaves it out; move the range"
        yield f"sibling {requirement.name} {version}", problem
    python = SpecifierSet(project["requires-python"])
    listed = {text.rpartition(" ")[2] for text in project["classifiers"] if ":: 3." in text}
    allowed = {f"3.{minor}" for minor in range(8, 30) if python.contains(f"3.{minor}.99")}
    odd = sorted(listed ^ allowed)
    yield f"Python {python}", f"the classifiers differ from it in {odd}" if odd else ""


def range_problem(requirement: Requirement) -> str:
    """Say whether a dependency has no lower end, is pinned, or, of ours or torch, has no upper."""
    operators = {part.operator for part in requirement.specifier}
    if "==" in operators or "===" in operators:
        return "give a range, not one version"
    if ">=" not in operators:
        return "give its lower end, with >="
    if (requirement.name == "torch" or requirement.name.startswith("vescale-")) and (
        "<" not in operators
    ):
        return "give its upper end, with <"
    return ""


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(wanted: str) -> int:
    """Print all findings about a package or tag; return the number of problems."""
    name, tagged = package_of(wanted)
    print(f"vescale-{name}, sources:", flush=True)
    return report(check(name, tagged))


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1]) else 0)
