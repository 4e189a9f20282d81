# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: the standard library's own sources, or a file or folder of the user's.

Which bytes are trained on at which step depends on the text, the seed and the sizes only: a
checkpoint needs no more than a count, and any number of ranks goes through the same windows.
"""

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from lm.errors import BadInputError

# Installed packages and test suites differ between machines; the library itself hardly does.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
HELD_OUT = 20  # the last 1/20 of the text is for validation


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text in windows of ``length + 1`` bytes: each byte but the last has a next one."""

    source: str
    train: torch.Tensor
    validation: torch.Tensor
    length: int
    seed: int

    @property
    def windows(self) -> int:
        """Windows in the training text; one pass over the text sees each once."""
        return (len(self.train) - 1) // self.length

    def batch(self, first: int, count: int) -> torch.Tensor:
        """Return windows ``first`` to ``first + count`` of an endless stream: [count, length + 1].

        Every pass over the text is shuffled anew.
        """
        passes = (divmod(index, self.windows) for index in range(first, first + count))
        picked = [_shuffled(self.windows, self.seed + turn)[place] for turn, place in passes]
        return _cut(self.train, torch.stack(picked), self.length)

    def validation_batch(self, count: int) -> torch.Tensor:
        """Return ``count`` windows spread over the held-out text, always the same ones."""
        held = (len(self.validation) - 1) // self.length
        return _cut(self.validation, torch.arange(count) * held // count, self.length)


def load_corpus(data: str | None, length: int, seed: int) -> Corpus:
    """Read the text at ``data``, a file or folder, or that of the standard library.

    Files are taken in the order of their names. Raises BadInputError.
    """
    root = Path(data) if data else Path(sysconfig.get_path("stdlib"))
    source = str(data) if data else "the Python standard library"
    try:
        blob = b"\n".join(_texts(root, "" if data else ".py"))
    except OSError as error:
        raise BadInputError(
            f"--data {error.filename or root}: {error.strerror or error}; "
            "pass a readable text file or folder."
        ) from error
    least = (length + 1) * HELD_OUT
    if len(blob) < least:
        raise BadInputError(
            f"--data {source}: {len(blob):,} bytes of text, but --seq-len {length} needs at least "
            f"{least:,}; pass more text or a smaller --seq-len."
        )
    text = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    cut = len(text) - len(text) // HELD_OUT
    return Corpus(source, text[:cut], text[cut:], length, seed)


def _texts(root: Path, suffix: str) -> Iterator[bytes]:
    if not root.is_dir():
        yield root.read_bytes()
        return

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave an unreadable folder out in silence

    for folder, folders, files in os.walk(root, onerror=fail):
        # Sorted in place: the walk goes on in this order, on every machine the same.
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and f[0] != ".")
        for name in sorted(files):
            path = Path(folder, name)
            if name.endswith(suffix) and name[0] != "." and path.is_file():
                text = path.read_bytes()
                if b"\0" not in text:  # a binary file among the text
                    yield text


@lru_cache(maxsize=2)
def _shuffled(windows: int, seed: int) -> torch.Tensor:
    return torch.randperm(windows, generator=torch.Generator().manual_seed(seed))


def _cut(text: torch.Tensor, windows: torch.Tensor, length: int) -> torch.Tensor:
    places = windows[:, None] * length + torch.arange(length + 1)
    return text[places].long()
