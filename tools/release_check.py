# SPDX-License-Identifier: Apache-2.0
"""Verify that packages can be released: sources, archives, metadata, and a fresh installation.

``nox -s release_check -- fsdp`` runs it, in an environment that has build and twine. It goes on
after a problem, and fails at the end if there was one.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

from tools import release_archives, release_source
from tools.findings import report
from tools.release_source import PACKAGES, ROOT


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "nox -s release_check --", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "packages", nargs="*", default=[*PACKAGES], metavar="PACKAGE", help="or a tag; default: all"
    )
    parser.add_argument(
        "--lowest",
        action="store_true",
        help="install once more, with the lowest versions of all dependencies, of some GB",
    )
    parser.add_argument(
        "--torch", metavar="VERSION", help="with --lowest: this torch, not the lowest one"
    )
    options = parser.parse_args(words)
    if options.torch and not options.lowest:
        parser.error("--torch has a meaning with --lowest only; constraints.txt has it otherwise")
    try:
        options.packages = [release_source.package_of(text) for text in options.packages]
    except ValueError as error:
        parser.error(str(error))
    return options


def constraints(pins: Mapping[str, str], torch: str | None) -> str:
    """Return lines for pip that pin each of ``pins``, with another ``torch`` where one is named."""
    pins = {**pins, "torch": torch} if torch else pins
    return "".join(f"{name}=={version}\n" for name, version in pins.items())


def extras_of(name: str) -> str:
    """Return what asks pip for all extras of a package: ``[plot,rich]``, or nothing."""
    extras = release_source.project_of(name).get("optional-dependencies", {})
    return f"[{','.join(extras)}]" if extras else ""


def build(name: str, dist: Path) -> None:
    folder = release_source.folder_of(name)
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, folder], check=True)


def metadata_problem(archives: list[Path]) -> str:
    """Return what twine says of the archives' metadata; "" if nothing."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *archives]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()


def works_installed(name: str, wheels: list[Path], pins: Path, work: Path) -> bool:
    """Install the wheels in a new environment, and tell whether what they bring works there.

    The wheels of siblings are those built here, whatever an index has under their names.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work))
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    wanted = [*map(str, wheels[:-1]), f"{wheels[-1]}{extras_of(name)}"]
    for command in (
        ("pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(pins), *wanted),
        ("pip", "check"),
        ("tools.release_installed", name),
    ):
        if subprocess.run([python, "-m", *command], cwd=ROOT, env=environ).returncode:
            return False
    shutil.rmtree(folder)  # of a gigabyte, with torch
    return True


def check(name: str, tagged: str | None, options: argparse.Namespace, work: Path) -> list[str]:
    """Print all findings about one package; return what failed, in a few words each."""
    failed = []
    print(f"vescale-{name}, sources:", flush=True)
    if report(release_source.check(name, tagged)):
        failed.append("sources")
    dist, needed = work / "dist", PACKAGES[: PACKAGES.index(name) + 1]
    for each in needed:
        if not list(dist.glob(f"vescale_{each}-*")):
            build(each, dist)
    wheels = [release_archives.only(dist, each, ".whl") for each in needed]
    sdist = release_archives.only(dist, name, ".tar.gz")
    print(f"vescale-{name}, archives:", flush=True)
    version = release_source.project_of(name)["version"]
    problems = report(release_archives.wheel_findings(wheels[-1], name, version))
    problems += report(release_archives.sdist_findings(sdist))
    problems += report([("twine check --strict", metadata_problem([wheels[-1], sdist]))])
    if problems:
        failed.append("archives")
    if not works_installed(name, wheels, ROOT / "constraints.txt", work):
        failed.append("installation")
    if options.lowest:
        pins = work / "lowest.txt"
        pins.write_text(constraints(release_archives.lowest(wheels), options.torch))
        print(f"beside {', '.join(pins.read_text().split())}:", flush=True)
        if not works_installed(name, wheels, pins, work):
            failed.append("installation beside the lowest versions")
    return failed


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory() as work:
        failed = {
            name: check(name, tagged, options, Path(work)) for name, tagged in options.packages
        }
    for name, what in failed.items():
        print(f"vescale-{name}: {'not ready: ' + ', '.join(what) if what else 'ready'}")
    if not options.lowest:
        print("The lowest versions of dependencies were not tried; --lowest does.")
    return 1 if any(failed.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
