# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder: their names, what makes one complete, how one appears and goes.

A checkpoint is written under a hidden name, its manifest last, and renamed when all is on disk. So
whatever is called ``step-...`` was complete once, and its manifest, with the size of each file,
tells whether it still is. Knows no tensors and no ranks.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
FORMAT = 1
NAME = "step-"
PARTIAL, OLD, DELETED = ".partial-", ".old-", ".deleted-"  # being written, replaced, removed
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself.

    ``sequence`` counts the saves in a folder: the newest has the highest, whatever its ``step``.
    ``files`` has the size in bytes and the CRC-32 (None: not formed) of every other file.
    """

    step: int
    sequence: int
    world_size: int
    progress: dict[str, Any]
    files: dict[str, tuple[int, int | None]]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that cannot be used, and why."""

    path: Path
    reason: str


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"{NAME}{step:09d}"


def start(folder: Path, step: int) -> Path:
    """Make an empty folder to write the checkpoint of ``step`` to, and return it.

    Removes what earlier saves left behind that did not come to their end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    for left in [*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DELETED}*")]:
        shutil.rmtree(left)
    partial = folder / f"{PARTIAL}{name_of(step)}"
    partial.mkdir()
    return partial


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, and give the finished checkpoint its name; return where it is.

    One of the same step, which a run that was set back has left, is replaced. A crash at any moment
    leaves either of them complete, perhaps under the name from which ``recover`` takes it back.
    """
    final = partial.with_name(name_of(manifest.step))
    _write(partial / MANIFEST, json.dumps(_as_json(manifest)))
    _sync_folder(partial)
    aside = partial.with_name(OLD + final.name)
    if final.exists():
        final.rename(aside)
    partial.rename(final)
    _sync_folder(final.parent)
    if aside.exists():
        shutil.rmtree(aside)
    return final


def recover(folder: Path) -> None:
    """Give a checkpoint its name back whose successor was not published; remove replaced ones."""
    for aside in folder.glob(f"{OLD}{NAME}*"):
        final = aside.with_name(aside.name.removeprefix(OLD))
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)


def prune(folder: Path, keep_last: int) -> None:
    """Remove all complete checkpoints but the ``keep_last`` newest ones; leave others alone."""
    complete, _ = find(folder)
    for path, _ in complete[keep_last:]:
        gone = path.with_name(DELETED + path.name)
        path.rename(gone)  # at once: one that is half removed must not look complete
        shutil.rmtree(gone)


def find(folder: Path) -> tuple[list[tuple[Path, Manifest]], list[Skipped]]:
    """Return the checkpoints that are complete by their sizes, newest first, and the others."""
    complete, skipped = [], []
    for path in sorted(folder.glob(f"{NAME}*")):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except ValueError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            complete.append((path, manifest))
    for path in sorted(folder.glob(f"{PARTIAL}*")):
        skipped.append(Skipped(path, "was not written to its end"))
    complete.sort(key=lambda item: item[1].sequence, reverse=True)
    return complete, skipped


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``; raises ValueError saying what is wrong."""
    try:
        data = json.loads((path / MANIFEST).read_text())
        if data["format"] != FORMAT:
            raise ValueError(f"has format {data['format']!r}, this version reads {FORMAT}")
        files = {name: (nbytes, crc) for name, (nbytes, crc) in data["files"].items()}
        return Manifest(data["step"], data["sequence"], data["world_size"], data["progress"], files)
    except FileNotFoundError as error:
        raise ValueError(f"has no {MANIFEST}") from error
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"has a broken {MANIFEST} ({error!r})") from error


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise ValueError if a file of the checkpoint is not there or has another size."""
    for name, (nbytes, _) in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"lacks {name}")
        found = file.stat().st_size
        if found != nbytes:
            raise ValueError(f"has {found} bytes of {name} and not {nbytes}")


def check_contents(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise ValueError if one of the named files has other contents than were written."""
    for name in names:
        expected = manifest.files[name][1]
        if expected is not None and checksum(path / name) != expected:
            raise ValueError(f"has {name} with other contents than were written")


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def files_in(path: Path) -> dict[str, int]:
    """Return name and size in bytes of the files in a checkpoint, other than its manifest."""
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }


def next_sequence(folder: Path) -> int:
    """Return a number above those of all checkpoints in ``folder`` that have a manifest."""
    sequences = [0]
    for path in folder.glob(f"{NAME}*"):
        try:
            sequences.append(read_manifest(path).sequence)
        except ValueError:
            continue  # find() names it
    return max(sequences) + 1


def _as_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "progress": manifest.progress,
        "files": manifest.files,
    }


def _write(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    """Let the names in ``path`` outlive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
