# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself, in a file of its own that is written last."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"
FORMAT = 1
CHECKSUM = "crc32"  # of the rest of the manifest


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


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint at ``path``; raises ValueError saying what is wrong."""
    try:
        data = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError as error:
        raise ValueError(f"has no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"has a broken {MANIFEST} ({reason})") from error
    found = data.get("format") if isinstance(data, dict) else None
    if type(found) is int and found != FORMAT:
        raise ValueError(f"has format {found}, this version reads {FORMAT}")
    if type(found) is not int or not _is_whole(data):
        raise ValueError(f"has a broken {MANIFEST} (other contents than were written)")
    files = {name: (nbytes, crc) for name, (nbytes, crc) in data["files"].items()}
    return Manifest(data["step"], data["sequence"], data["world_size"], data["progress"], files)


def text_of(manifest: Manifest) -> str:
    """Return what the file of ``manifest`` has in it."""
    data = {
        "format": FORMAT,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "world_size": manifest.world_size,
        "progress": manifest.progress,
        "files": manifest.files,
    }
    return json.dumps({**data, CHECKSUM: _checksum_of(data)})


def _is_whole(data: dict[str, Any]) -> bool:
    """Tell whether this is what ``text_of`` wrote; its checksum may be missing."""
    expected = data.pop(CHECKSUM, None)
    if expected is not None and expected != _checksum_of(data):
        return False
    files = data.get("files")
    return (
        all(type(data.get(name)) is int for name in ("step", "sequence", "world_size"))
        and "progress" in data
        and isinstance(files, dict)
        and all(
            isinstance(entry, list) and [*map(type, entry)] in ([int, int], [int, type(None)])
            for entry in files.values()
        )
    )


def _checksum_of(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data).encode())
