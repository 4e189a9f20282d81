# SPDX-License-Identifier: Apache-2.0
"""Weights in the files that Hugging Face's tools read: safetensors, with an index where several.

Needs the extra ``safetensors``. Optimizer states are not for such files: see ``CheckpointManager``.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.fsdp.agreement import agree
from vescale.fsdp.fqns import sharded_parameters
from vescale.fsdp.full_parameters import iter_full_parameters
from vescale.fsdp.state_dict import LoadedKeys
from vescale.fsdp.state_dict.loading import device_of, load_model
from vescale.fsdp.state_dict.names import EXTRA_STATE, StateNames

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"


def save_safetensors(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5 << 30,
) -> None:
    """Write parameters and persistent buffers to ``folder``, as ``from_pretrained`` reads them.

    ``model.safetensors``, or several files of at most ``max_file_bytes`` (or one larger tensor) and
    their index. Global rank 0 writes, and holds one file's tensors beside its shards; the others
    hold a bucket of ``iter_full_parameters``. With ``dtype`` floating-point tensors are cast. A
    tied parameter is written once, under its first name. Files have other names at first: weights
    that were there are replaced when all new ones are complete.

    Write ``config.json`` and the tokenizer with their own ``save_pretrained``. Collective; raises
    ImportError without safetensors, and on all ranks what rank 0 meets when it writes.
    """
    files, error = None, None
    leads = not dist.is_initialized() or dist.get_rank() == 0
    try:
        library = _library()
        if isinstance(max_file_bytes, bool) or max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={max_file_bytes!r}, expected a positive number.")
        if leads:
            files = _Files(Path(folder), max_file_bytes, library)
    except Exception as caught:
        error = caught
    device = device_of(model)
    _agree(device, error)
    for name, tensor in _tensors(model, dtype):
        if files and not error:
            try:
                files.add(name, tensor)
            except Exception as caught:  # the gathers are collective: go through them to the end
                error = caught
    if files and not error:
        try:
            files.finish()
        except Exception as caught:
            error = caught
    _agree(device, error)


def load_safetensors(
    model: nn.Module, folder: str | Path, *, from_rank0: bool = False, strict: bool = True
) -> LoadedKeys:
    """Fill ``model`` with the weights in ``folder``; return missing and unexpected keys.

    The files are mapped into memory, and every rank reads the parts that it stores. With
    ``from_rank0`` only rank 0 needs them, and tensors travel one at a time. A model on the meta
    device gets its memory first. Names, ties, dtypes and errors are those of
    ``load_full_state_dict``; collective as it.
    """
    given, error = {}, None
    leads = not dist.is_initialized() or dist.get_rank() == 0
    try:
        if leads or not from_rank0:
            given = _mapped(Path(folder), _library())
    except Exception as caught:
        error = caught
    _agree(device_of(model), error)
    return load_model(model, given, src=0 if from_rank0 else None, strict=strict)


def _tensors(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
    names = StateNames(model)
    for fqn, tensor in iter_full_parameters(model, dtype=dtype):
        yield names.clean(fqn), tensor
    known = {names.clean(fqn) for fqn in sharded_parameters(model)}
    for key, value in names.targets().items():
        buffer = key not in known and key not in names.optional
        if buffer and isinstance(value, torch.Tensor) and key.rpartition(".")[2] != EXTRA_STATE:
            cast = dtype is not None and value.is_floating_point()
            yield key, value.detach().to(dtype) if cast else value.detach()


class _Files:
    """Files that are being written below ``folder``, under other names until they are complete."""

    def __init__(self, folder: Path, max_file_bytes: int, library: ModuleType) -> None:
        self._folder, self._most, self._library = folder, max_file_bytes, library
        self._partial = folder / ".partial-safetensors"
        shutil.rmtree(self._partial, ignore_errors=True)  # of a run that was killed
        self._partial.mkdir(parents=True)
        self._waiting: dict[str, torch.Tensor] = {}
        self._held = 0
        self._written: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor, and write a file where it would become too large with it."""
        if self._waiting and self._held + tensor.nbytes > self._most:
            self._write()
        self._waiting[name] = tensor.cpu().contiguous()
        self._held += tensor.nbytes
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write the rest and the index, and put all in place of what was there."""
        if self._waiting or not self._written:
            self._write()
        count = len(self._written)
        named = {
            i: ONE_FILE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}{SUFFIX}"
            for i in range(count)
        }
        for old in [*self._folder.glob(f"model*{SUFFIX}"), self._folder / INDEX]:
            old.unlink(missing_ok=True)
        for i, name in named.items():
            os.replace(self._partial / str(i), self._folder / name)
        if count > 1:
            places = {key: named[i] for i, keys in enumerate(self._written) for key in keys}
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            (self._partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
            os.replace(self._partial / INDEX, self._folder / INDEX)
        self._partial.rmdir()

    def _write(self) -> None:
        target = self._partial / str(len(self._written))
        self._library.torch.save_file(self._waiting, target, metadata={"format": "pt"})
        self._written.append([*self._waiting])
        self._waiting, self._held = {}, 0


def _mapped(folder: Path, library: ModuleType) -> dict[str, Any]:
    """Return the tensors of all files by name, mapped and not yet read."""
    if (folder / INDEX).exists():
        places = json.loads((folder / INDEX).read_text())["weight_map"]
        files = sorted({*places.values()})
    else:
        files = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    if not files:
        raise ValueError(f"{folder} has no {ONE_FILE}; pass a folder of weights in safetensors.")
    tensors: dict[str, Any] = {}
    for name in files:
        tensors |= library.torch.load_file(folder / name)
    return tensors


def _library() -> ModuleType:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "safetensors is not installed: pip install 'vescale-fsdp[safetensors]'"
        ) from error
    return safetensors


def _agree(device: torch.device, error: Exception | None) -> None:
    world = dist.group.WORLD
    agree([] if world is None else world, device, "read or write safetensors", "", error)
