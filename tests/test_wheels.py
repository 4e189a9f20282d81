# SPDX-License-Identifier: Apache-2.0
"""What a user installs: the three wheels, built here and installed side by side, offline."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("vescale-dtensor", "vescale-fsdp", "vescale-legacy")
RANGE = re.compile(r"(vescale-\w+)>=\d+\.\d+,<\d+\.\d+")


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


def wheel(dist, name):
    return next(dist.glob(f"{name.replace('-', '_')}-*.whl"))


def ask(python, code, cwd):
    """Run code that prints JSON, from a folder in which nothing of ours can be imported."""
    return json.loads(run(python, "-c", f"import json\n{code}", cwd=cwd))


@pytest.mark.parametrize("name", PACKAGES)
def test_metadata_and_contents(dist, name):
    project = tomllib.loads((ROOT / f"packages/{name}/pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel(dist, name)) as archive:
        files = archive.namelist()
        info = next(path for path in files if path.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(info).decode())
    short = name.removeprefix("vescale-")
    assert (metadata["Name"], metadata["Version"]) == (name, project["version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert sorted(metadata.get_all("License-File")) == ["LICENSE", "NOTICE"]
    assert {f"{Path(info).parent}/licenses/{file}" for file in ("LICENSE", "NOTICE")} < set(files)
    assert metadata.get_payload().startswith(f"# {name}\n")
    assert f"vescale/{short}/py.typed" in files
    assert "vescale/__init__.py" not in files
    strays = [path for path in files if not path.startswith((f"vescale/{short}/", "vescale_"))]
    assert not strays


@pytest.mark.parametrize("name", PACKAGES)
def test_siblings_are_wanted_by_range(name):
    project = tomllib.loads((ROOT / f"packages/{name}/pyproject.toml").read_text())["project"]
    wanted = project["dependencies"]
    assert not [text for text in wanted if "==" in text]
    siblings = [RANGE.fullmatch(text) for text in wanted if text.startswith("vescale")]
    assert [match and match[1] for match in siblings] == list(PACKAGES[: PACKAGES.index(name)])


@pytest.mark.parametrize("name", PACKAGES)
def test_changelog_and_licence_are_in_place(name):
    folder = ROOT / "packages" / name
    assert "\n## [Unreleased]\n" in (folder / "CHANGELOG.md").read_text()
    for file in ("LICENSE", "NOTICE"):
        assert (folder / file).read_text() == (ROOT / file).read_text()


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
