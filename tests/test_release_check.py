# SPDX-License-Identifier: Apache-2.0
"""The checks before a release, on what is wrong; test_wheels.py has them on the real wheels."""

import subprocess

import pytest
from packaging.requirements import Requirement

from tools import release_archives, release_check, release_source
from tools.findings import report

RELEASED = """# Changelog

## [Unreleased]

## [0.2.0] - 2027-01-31

### Added

- `fully_shard` does more.

## [0.1.0] - 2026-12-01

- All.
"""


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("fsdp", ("fsdp", None)),
        ("vescale-dtensor-v0.1.0", ("dtensor", "0.1.0")),
        ("vescale-legacy-v1.0.0rc1", ("legacy", "1.0.0rc1")),
    ],
)
def test_a_package_or_its_tag_is_named(wanted, found):
    assert release_source.package_of(wanted) == found


@pytest.mark.parametrize("wanted", ["vescale-fsdp", "v0.1.0", "vescale-other-v0.1.0"])
def test_anything_else_is_refused(wanted):
    with pytest.raises(ValueError, match="neither a package"):
        release_source.package_of(wanted)


@pytest.mark.parametrize(
    ("version", "tagged", "problem"),
    [
        ("0.1.0", None, ""),
        ("0.1.0", "0.1.0", ""),
        ("1.0.0rc1", None, ""),
        ("0.1.0", "0.2.0", "the tag says 0.2.0"),
        ("0.1", None, "three numbers"),
        ("0.1.0+local", None, "three numbers"),
        ("new", None, "PEP 440"),
    ],
)
def test_versions(version, tagged, problem):
    assert agrees(release_source.version_problem(version, tagged), problem)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("", "", ""),
        ("## [Unreleased]\n\n", "", "put an empty"),
        ("## [0.2.0] - 2027-01-31\n", "", "rename `## [Unreleased]`"),
        (" - 2027-01-31", "", "write the day"),
        ("- `fully_shard` does more.", "", "lists no change"),
        ("## [0.2.0] ", "## [0.3.0] - 2027-02-01\n\n## [0.2.0] ", "newest section is [0.3.0]"),
    ],
)
def test_changelogs(old, new, problem):
    assert agrees(release_source.changelog_problem(RELEASED.replace(old, new), "0.2.0"), problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("torch>=2.11,<2.16", ""),
        ("numpy>=1.26", ""),
        ("numpy==1.26", "a range"),
        ("numpy", "lower end"),
        ("torch>=2.11", "upper end"),
        ("vescale-dtensor>=0.1", "upper end"),
    ],
)
def test_ranges(text, problem):
    assert agrees(release_source.range_problem(Requirement(text)), problem)


def test_a_tag_never_moves(tmp_path):
    def git(*words):
        who = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def problem(tagged=None):
        return release_source.tag_problem("vescale-fsdp-v0.1.0", tagged, tmp_path)

    git("init")
    git("commit", "--allow-empty", "-m", "one")
    assert problem() == ""  # not tagged yet
    assert "does not exist here" in problem("0.1.0")
    git("tag", "vescale-fsdp-v0.1.0")
    assert problem() == problem("0.1.0") == ""
    git("commit", "--allow-empty", "-m", "two")
    assert "a released version never moves" in problem()


def test_findings_are_printed_and_counted(capsys):
    assert report([("one", ""), ("two", "is odd"), ("three", "is odder")]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "  ok    one",
        "  FAIL  two: is odd",
        "  FAIL  three: is odder",
    ]


def test_another_torch_beside_the_lowest_versions():
    pins = {"torch": "2.11", "numpy": "1.26"}
    assert release_check.constraints(pins, None) == "torch==2.11\nnumpy==1.26\n"
    assert release_check.constraints(pins, "2.13.0") == "torch==2.13.0\nnumpy==1.26\n"


def test_options():
    assert release_check.arguments([]).packages == [(x, None) for x in release_source.PACKAGES]
    assert release_check.arguments(["vescale-fsdp-v0.1.0"]).packages == [("fsdp", "0.1.0")]
    for words in (["--torch", "2.13.0"], ["other"]):
        with pytest.raises(SystemExit):
            release_check.arguments(words)


def agrees(found, part):
    return part in found if part else not found


@pytest.mark.parametrize(
    ("readme", "lost"),
    [
        ("[a](https://example.org/a.md) [b](#here) <me@example.org>", ""),
        ("`[a](b.md)`\n```python\nx[0](y)\n```\nAs in `docs/a.md`.", ""),
        ("[a](../../docs/a.md)", "../../docs/a.md"),
        ("![picture](layout.png)", "layout.png"),
        ("[a][1]\n\n[1]: CHANGELOG.md", "CHANGELOG.md"),
        ('<img src="docs/a.svg">', "docs/a.svg"),
    ],
)
def test_links_that_an_index_cannot_follow_are_found(readme, lost):
    problem = release_archives.link_problem(readme)
    assert (problem == "") == (lost == "")
    assert lost in problem
