# SPDX-License-Identifier: Apache-2.0
"""What a user installs: the three wheels, built here and installed side by side, offline."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tools import release_archives, release_source

ROOT = Path(__file__).parents[1]
PACKAGES = ("vescale-dtensor", "vescale-fsdp", "vescale-legacy")


def run(*command, **options):
    # The user's own pip settings (indexes, folders) must not help a wheel that is incomplete.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
    done = subprocess.run(
        [*map(str, command)], env=environ, capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build an sdist of each package, and from that its wheel, without network."""
    folder = tmp_path_factory.mktemp("dist")
    for name in PACKAGES:
        source = ROOT / "packages" / name
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory):
    """Return a folder of links to what this environment has installed, less our own packages.

    It spares a fresh environment the download of torch. Linking each entry, rather than naming
    this site-packages in the fresh one, leaves two things out: the .pth files of our editable
    installs, through which the checkout would be imported instead of the wheel, and our
    .dist-info folders, by which pip would take a wheel for already installed.
    """
    folder = tmp_path_factory.mktemp("borrowed")
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(site).iterdir():
            if "vescale" not in entry.name and entry.suffix != ".pth":
                (folder / entry.name).symlink_to(entry)
    return folder


@pytest.fixture
def fresh_python(tmp_path, borrowed):
    """Return the Python of a new environment that has torch and numpy, and nothing of ours."""
    venv.create(tmp_path / "venv")
    places = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    site = sysconfig.get_path("purelib", scheme="venv", vars=places)
    (Path(site) / "borrowed.pth").write_text(f"{borrowed}\n")
    return tmp_path / "venv/bin/python"


def install(python, dist, *packages):
    pip = (sys.executable, "-m", "pip", "--isolated", "--python", python)
    run(*pip, "install", "--no-index", "--find-links", dist, *packages)


def ask(python, code, cwd):
    """Run code that prints JSON, from a folder in which nothing of ours can be imported."""
    return json.loads(run(python, "-c", f"import json\n{code}", cwd=cwd))


def problems(findings):
    return [finding for finding in findings if finding[1]]


@pytest.mark.parametrize("name", release_source.PACKAGES)
def test_metadata_and_contents(dist, name):
    wheel = release_archives.only(dist, name, ".whl")
    version = release_source.project_of(name)["version"]
    assert not problems(release_archives.wheel_findings(wheel, name, version))
    assert not problems(
        release_archives.sdist_findings(release_archives.only(dist, name, ".tar.gz"))
    )


def test_what_a_wheel_should_not_have_is_seen(dist, tmp_path):
    wheel = shutil.copy(release_archives.only(dist, "fsdp", ".whl"), tmp_path)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("vescale/__init__.py", "")
    found = problems(release_archives.wheel_findings(Path(wheel), "fsdp", "9.9.9"))
    assert found[-1][0] == "wheel holds nothing else"
    assert "vescale/__init__.py" in found[-1][1]
    assert found[0][0] == "wheel is vescale-fsdp 9.9.9"


def test_lowest_versions_are_read_from_the_wheels(dist):
    lowest = release_archives.lowest(dist.glob("*.whl"))
    assert lowest["torch"] == "2.11"
    assert {"numpy", "matplotlib", "rich", "safetensors"} < set(lowest)
    assert not [name for name in lowest if name.startswith("vescale")]


@pytest.mark.parametrize("name", release_source.PACKAGES)
def test_the_sources_could_be_released(name):
    # All but the changelog, whose section gets its name at the release, and the tag.
    found = problems(release_source.check(name, None))
    assert not [what for what, _ in found if not what.startswith(("changelog", "tag"))]


@pytest.mark.parametrize("name", PACKAGES)
def test_the_changelog_has_a_place_for_the_next_release(name):
    assert "\n## [Unreleased]\n" in (ROOT / "packages" / name / "CHANGELOG.md").read_text()


def test_installing_fsdp_brings_dtensor(dist, fresh_python, tmp_path):
    install(fresh_python, dist, "vescale-fsdp")
    code = """
import importlib.metadata as m, vescale.fsdp, vescale.dtensor, vescale
names = sorted(d.name for d in m.distributions() if d.name.startswith("vescale"))
print(json.dumps([names, list(vescale.__path__), vescale.fsdp.__file__]))
"""
    names, path, file = ask(fresh_python, code, tmp_path)
    assert names == ["vescale-dtensor", "vescale-fsdp"]
    assert [Path(place).is_relative_to(tmp_path / "venv") for place in (*path, file)] == [True] * 2


def test_all_wheels_live_side_by_side(dist, fresh_python, tmp_path):
    install(fresh_python, dist, *PACKAGES)
    code = """
import importlib.metadata as m, vescale
import vescale.dtensor, vescale.fsdp, vescale.legacy
print(json.dumps([
    getattr(vescale, "__file__", None),
    [m.version(f"vescale-{x}") for x in ("dtensor", "fsdp", "legacy")],
    [vars(getattr(vescale, x))["__file__"] for x in ("dtensor", "fsdp", "legacy")],
]))
"""
    namespace, versions, files = ask(fresh_python, code, tmp_path)
    assert namespace is None
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)
    assert all(Path(file).is_relative_to(tmp_path / "venv") for file in files)
