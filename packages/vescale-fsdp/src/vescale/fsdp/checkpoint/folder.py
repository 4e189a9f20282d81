# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a folder: their names, what makes one complete, how one appears and goes.

A checkpoint is written under a hidden name, its manifest last, and renamed when all is on disk. So
whatever is called ``step-...`` was complete once, and its manifest, with the size of each file,
tells whether it still is. Knows no tensors and no ranks.
"""

import logging
import os
import shutil
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vescale.fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest, text_of

logger = logging.getLogger("vescale.fsdp.checkpoint")

NAME = "step-"
PARTIAL, OLD, DELETED = ".partial-", ".old-", ".deleted-"  # being written, replaced, removed
CHUNK_BYTES = 1 << 22

_being_written: set[Path] = set()  # by this process: another manager of the folder leaves them


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

    Removes what earlier saves left behind that did not come to their end. ``stop`` is to be called
    at the end, whatever it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recover(folder)
    for left in _named(folder, PARTIAL, DELETED):
        if left not in _being_written:
            _remove(left)
    partial = folder / f"{PARTIAL}{name_of(step)}-{_token()}"
    partial.mkdir()
    _being_written.add(partial)
    return partial


def stop(partial: Path) -> None:
    """Take note that nobody writes to ``partial`` any more: the next save may remove it."""
    _being_written.discard(partial)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, and give the finished checkpoint its name; return where it is.

    One of the same step, which a run that was set back has left, is replaced. A crash at any moment
    leaves either of them complete, perhaps under the name from which ``recover`` takes it back.
    """
    final = partial.with_name(name_of(manifest.step))
    _write(partial / MANIFEST, text_of(manifest))
    _sync_folder(partial)
    aside = partial.with_name(OLD + final.name)
    if os.path.lexists(final):
        final.rename(aside)
    partial.rename(final)
    _sync_folder(final.parent)
    if os.path.lexists(aside):
        _remove(aside)
    return final


def recover(folder: Path) -> None:
    """Give a checkpoint its name back whose successor was not published; remove replaced ones."""
    for aside in _named(folder, OLD + NAME):
        final = aside.with_name(aside.name.removeprefix(OLD))
        if os.path.lexists(final):
            _remove(aside)
        else:
            aside.rename(final)


def prune(folder: Path, keep_last: int) -> None:
    """Remove all complete checkpoints but the ``keep_last`` newest ones; leave others alone."""
    complete, _ = find(folder)
    for path, _ in complete[keep_last:]:
        gone = path.with_name(f"{DELETED}{path.name}-{_token()}")
        path.rename(gone)  # at once: one that is half removed must not look complete
        _remove(gone)


def find(folder: Path) -> tuple[list[tuple[Path, Manifest]], list[Skipped]]:
    """Return the checkpoints that are complete by their sizes, newest first, and the others.

    There is none where there is no folder. Raises OSError for one that cannot be listed.
    """
    complete, skipped = [], []
    for path in _named(folder, NAME):
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
        except ValueError as error:
            skipped.append(Skipped(path, str(error)))
        else:
            complete.append((path, manifest))
    for path in _named(folder, PARTIAL):
        skipped.append(Skipped(path, "was not written to its end"))
    complete.sort(key=lambda item: item[1].sequence, reverse=True)
    return complete, skipped


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Raise ValueError if a file of the checkpoint is not there or has another size."""
    for name, (nbytes, _) in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError as error:
            raise ValueError(f"lacks {name}") from error
        except OSError as error:
            raise ValueError(f"has {name} that cannot be read ({error})") from error
        if found != nbytes:
            raise ValueError(f"has {found} bytes of {name} and not {nbytes}")


def check_contents(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Raise ValueError if one of the named files has other contents than were written."""
    for name in names:
        expected = manifest.files[name][1]
        try:
            same = expected is None or checksum(path / name) == expected
        except OSError as error:
            raise ValueError(f"has {name} that cannot be read ({error})") from error
        if not same:
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
    for path in _named(folder, NAME):
        try:
            sequences.append(read_manifest(path).sequence)
        except ValueError:
            continue  # find() names it
    return max(sequences) + 1


def _named(folder: Path, *beginnings: str) -> list[Path]:
    """Return, sorted, what is in ``folder`` under such names; nothing where there is no folder.

    Path.glob() would return nothing for a folder that cannot be read, too.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names) if name.startswith(beginnings)]


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link. What cannot be removed is logged, and is in nobody's way.

    So a checkpoint that others still read, or that is a link to another disk, stops no save.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error)


def _token() -> str:
    return uuid.uuid4().hex[:8]


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
