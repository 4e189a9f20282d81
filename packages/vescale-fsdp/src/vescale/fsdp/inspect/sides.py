# SPDX-License-Identifier: Apache-2.0
"""The two sides of a comparison: tensors in memory, or in a checkpoint's folder."""

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from vescale.dtensor.matching import Path as Keys
from vescale.dtensor.matching import leaves, name_of
from vescale.fsdp.checkpoint.alike import describe
from vescale.fsdp.checkpoint.folder import NAME
from vescale.fsdp.checkpoint.reading import MODEL, by_path
from vescale.fsdp.state_dict import get_model_state_dict

Described = tuple[tuple[int, ...], torch.dtype]


class InMemory:
    """The tensors of a model, or of a state as nested dicts and lists, by path."""

    def __init__(self, given: nn.Module | Mapping[str, Any], name: str) -> None:
        state = get_model_state_dict(given) if isinstance(given, nn.Module) else dict(given)
        self.name = name
        self.tensors = {p: x.detach() for p, x in leaves(state) if isinstance(x, torch.Tensor)}

    def open(self) -> None:
        """Raise ValueError unless the tensors have values."""
        for path, x in self.tensors.items():
            if x.is_meta:
                raise ValueError(
                    f"{name_of(path)} of {self.name} is on the meta device and has no values; call "
                    "init_empty() or load a checkpoint first."
                )

    @property
    def has_model(self) -> bool:
        """Whether it is a state with a model's inside, under ``"model"``."""
        return any(path[0] == MODEL and len(path) > 1 for path in self.tensors)

    def described(self) -> dict[Keys, Described]:
        """Return shape and dtype of each tensor, by path."""
        return {path: (tuple(x.shape), x.dtype) for path, x in self.tensors.items()}

    def lines(self) -> Iterator[str]:
        """Yield what all ranks must have alike, a line for each tensor."""
        for path, x in self.tensors.items():
            yield f"{name_of(path)}: {describe(x)}"


class InFolder:
    """The tensors of a checkpoint of ``torch.distributed.checkpoint``, by path."""

    def __init__(self, folder: str | os.PathLike, name: str) -> None:
        self.folder, self.name = Path(folder), name

    def open(self) -> None:
        """Read what the folder has; raises ValueError for one that is no checkpoint."""
        if not (self.folder / ".metadata").is_file():
            inside = sorted(path.name for path in self.folder.glob(f"{NAME}*"))
            hint = f"it has {inside[-1]!r}, so pass that" if inside else "it has no .metadata"
            raise ValueError(
                f"{self.name} is {str(self.folder)!r}, which is no checkpoint of "
                f"torch.distributed.checkpoint: {hint}; expected the folder that it was saved to."
            )
        self._reader = _Reader(self.folder)
        metadata = self._reader.read_metadata()
        paths = by_path(metadata)
        keys = dict(zip(paths, metadata.state_dict_metadata, strict=True))
        self.entries = {
            path: Saved(keys[path], tuple(entry.size), entry.properties.dtype)
            for path, entry in paths.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def described(self) -> dict[Keys, Described]:
        """Return shape and dtype of each tensor, by path."""
        return {path: (saved.shape, saved.dtype) for path, saved in self.entries.items()}

    def lines(self) -> Iterator[str]:
        """Yield what all ranks must have alike, a line for each tensor."""
        for path, saved in self.entries.items():
            yield f"{name_of(path)}: {saved.dtype} {saved.shape}"

    def take_model(self) -> None:
        """Keep what is under ``"model"``, by its names there, if there is anything."""
        inside = {path[1:]: entry for path, entry in self.entries.items() if path[0] == MODEL}
        self.entries = {path: entry for path, entry in inside.items() if path} or self.entries

    def read(self, path: Keys) -> torch.Tensor:
        """Return the whole tensor, on the CPU."""
        saved = self.entries[path]
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        self.read_into(path, whole)
        return whole

    def read_into(self, path: Keys, target: torch.Tensor) -> None:
        """Fill ``target``, plain or this rank's part of a DTensor; other ranks need not."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({self.entries[path].key: target}, storage_reader=self._reader, no_dist=True)


class Saved(NamedTuple):
    """A tensor in a checkpoint: its key there, its shape and its dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Reader(dcp.FileSystemReader):
    """Reads the metadata of its checkpoint once, however many tensors are loaded."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


Side = InMemory | InFolder


def side(given: Any, name: str) -> Side:
    """Return what ``diff`` got as the argument ``name``."""
    if isinstance(given, nn.Module | Mapping):
        return InMemory(given, name)
    if isinstance(given, str | os.PathLike):
        return InFolder(given, name)
    raise TypeError(
        f"{name} is a {type(given).__name__}, expected an nn.Module, a state dict, or the folder "
        "of a checkpoint."
    )
