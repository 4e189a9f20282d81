# SPDX-License-Identifier: Apache-2.0
"""Is what was built for a package fit to be uploaded? Looks into its sdist and its wheel."""

import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.version import Version

from tools.findings import Finding

LICENCES = ("LICENSE", "NOTICE")


def only(folder: Path, name: str, suffix: str) -> Path:
    """Return the one archive of a package in ``folder``; raises ValueError if there are others."""
    found = sorted(folder.glob(f"vescale_{name}-*{suffix}"))
    if len(found) != 1:
        raise ValueError(
            f"{folder} has {len(found)} files vescale_{name}-*{suffix}, and one was expected; "
            "build into an empty folder."
        )
    return found[0]


def metadata_of(wheel: Path) -> Message:
    """Return the METADATA of a wheel: its headers, and the README as payload."""
    with zipfile.ZipFile(wheel) as archive:
        info = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(info).decode())


def wheel_findings(wheel: Path, name: str, version: str) -> Iterator[Finding]:
    """Yield what is wrong with the metadata and the contents of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    metadata = metadata_of(wheel)
    info = f"vescale_{name}-{version}.dist-info"
    named = f"{metadata['Name']} {metadata['Version']}"
    wanted = f"vescale-{name} {version}"
    yield f"wheel is {wanted}", "" if named == wanted else f"says {named}"
    licence = metadata["License-Expression"]
    yield "wheel's licence", "" if licence == "Apache-2.0" else f"is {licence}"
    lost = {f"{info}/licenses/{file}" for file in LICENCES} - set(files)
    lost |= set(LICENCES) - set(metadata.get_all("License-File") or ())
    yield "wheel's licence files", f"lacks {sorted(lost)}" if lost else ""
    opening, readme = f"# vescale-{name}\n", str(metadata.get_payload())
    yield "wheel's README", "" if readme.startswith(opening) else f"does not open with {opening!r}"
    yield "wheel's README links", link_problem(readme)
    typed = f"vescale/{name}/py.typed"
    yield "wheel's py.typed", "" if typed in files else f"lacks {typed}"
    strays = [path for path in files if not path.startswith((f"vescale/{name}/", f"{info}/"))]
    yield "wheel holds nothing else", f"has {strays}" if strays else ""


def link_problem(readme: str) -> str:
    """Say which links and pictures of a README lead nowhere on an index: it has this file alone."""
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", readme, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(\s*<?([^)>\s]+)", text)
    targets += re.findall(r"^\s*\[[^\]]+\]:\s*<?([^>\s]+)", text, re.MULTILINE)
    targets += re.findall(r"""(?:href|src)=["']([^"']+)""", text)
    lost = [each for each in targets if not re.match(r"https?://|mailto:|#", each)]
    return f"link to {lost} by a full address, or name the path without a link" if lost else ""


def sdist_findings(sdist: Path) -> Iterator[Finding]:
    """Yield what an sdist lacks: licences, changelog, tests."""
    with tarfile.open(sdist) as archive:
        files = {str(PurePosixPath(*PurePosixPath(path).parts[1:])) for path in archive.getnames()}
    wanted = {*LICENCES, "README.md", "CHANGELOG.md", "PKG-INFO", "pyproject.toml"}
    lost = sorted(wanted - files)
    yield "sdist's files", f"lacks {lost}" if lost else ""
    tests = any(re.fullmatch(r"tests/(.+/)?test_\w+\.py", path) for path in files)
    yield "sdist's tests", "" if tests else "has none"


def lowest(wheels: Iterable[Path]) -> dict[str, str]:
    """Return the lowest version of each dependency, extras included, that all wheels allow.

    Our own packages are left out: the siblings of a release are those of the checkout.
    """
    found: dict[str, str] = {}
    for wheel in wheels:
        for text in metadata_of(wheel).get_all("Requires-Dist") or ():
            wanted = Requirement(text)
            ends = [part.version for part in wanted.specifier if part.operator == ">="]
            if ends and not wanted.name.startswith("vescale-"):
                known = found.get(wanted.name, ends[0])
                found[wanted.name] = max(known, ends[0], key=Version)
    return found
