# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints of one run: save, keep the last ones, find the newest, go on from it."""

import logging
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from vescale.fsdp.checkpoint import folder as on_disk
from vescale.fsdp.checkpoint.alike import check_alike, everyones, share_error
from vescale.fsdp.checkpoint.folder import Skipped
from vescale.fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from vescale.fsdp.checkpoint.progress import from_json, to_json
from vescale.fsdp.checkpoint.rank_state import generators, pack, set_generators
from vescale.fsdp.checkpoint.reading import MODEL, OPTIMIZER, RANKS, read, read_rank_state
from vescale.fsdp.checkpoint.writing import Job, on_first_rank, share, write, write_behind
from vescale.fsdp.materialize import meta_names
from vescale.fsdp.state_dict import get_model_state_dict, get_optimizer_state_dict
from vescale.fsdp.state_dict.loading import device_of
from vescale.fsdp.state_dict.named_optimizers import NamedOptimizers, several

logger = logging.getLogger("vescale.fsdp.checkpoint")
RANDOM, OWN = "random", "own"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk; ``skipped`` are newer ones that cannot be used."""

    path: Path
    step: int
    world_size: int
    progress: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run goes on from.

    ``rank_state`` is what this rank saved, None if there was no such rank. ``same_random`` tells
    whether the random generators go on as in the run that saved: only with as many ranks.
    """

    checkpoint: Checkpoint
    rank_state: Any
    same_random: bool


class CheckpointManager:
    """Save a run to ``folder`` so that a crash at any moment leaves the last checkpoint usable.

    Tensors are written and read by ``torch.distributed.checkpoint``, each rank its part; any number
    of ranks, in any layout, can go on from it, and so can FSDP2. A checkpoint is a folder
    ``step-...`` below ``folder``, which all ranks can reach. It appears under that name in one
    rename, when everything is on disk.

    Args:
        folder: where checkpoints are; made at the first save.
        keep_last: how many complete checkpoints to keep, None for all. Older ones are removed once
            a new one is published.
        asynchronous: return from ``save`` when the state has been copied, and write it while
            training goes on. A save begins by waiting for the one before. Errors are raised by the
            next ``save``, ``wait``, ``newest`` or ``load``.
        checksums: keep a CRC-32 of every file, and compare it in ``newest``. Each rank reads its
            share of the files once more, after a save and before a load; without, only sizes tell.
        same_keys: whether all ranks have the same keys. False for pipeline stages: then only what
            several ranks have is compared before a save.
        timeout: of the manager's own process group (gloo), None for torch's default.

    All methods are collective over the default process group, and raise the same on all ranks.
    Construction is, too.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int | None = None,
        asynchronous: bool = False,
        checksums: bool = True,
        same_keys: bool = True,
        timeout: timedelta | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "CheckpointManager needs a process group; call torch.distributed."
                "init_process_group() first, with store=HashStore(), rank=0 and world_size=1 in "
                "one process."
            )
        error = None
        try:
            _check_keep_last(keep_last)
            self.folder = Path(folder).absolute()  # os.chdir() does not move it
        except (TypeError, ValueError) as caught:
            error = caught
        self._keep_last, self._checksums, self._same_keys = keep_last, checksums, same_keys
        self._asynchronous = asynchronous
        # Weakly: destroy_process_group ends the threads of a group only if nothing else holds it,
        # and a thread of gloo that lets go of a tensor while Python ends aborts the process.
        self._group_ref = weakref.ref(dist.new_group(backend="gloo", timeout=timeout))
        self._pending: Future[Path] | None = None
        share_error("make a CheckpointManager", error, self._group)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        progress: dict[str, Any] | None = None,
        rank_state: Any = None,
    ) -> Path:
        """Write model, optimizers and random generators; return where the checkpoint is (to be).

        ``progress`` is what all ranks know of the run: losses, place in the data, the state of a
        scheduler; what JSON has, and dicts with numbers as keys. ``rank_state`` is what only this
        rank knows, such as its data loader's ``state_dict()``: numbers, texts, tensors, dicts and
        lists of them.

        Raises ValueError where the ranks do not have the same keys, shapes, dtypes, placements,
        options, step or progress, before anything is written, and names what differs;
        CheckpointException (of torch), OSError or RuntimeError where it cannot be written.
        """
        self.wait()
        state, named, progress, error = {}, None, progress or {}, None
        try:
            _check_step(step)
            progress = to_json(progress)
            _check_memory(model)
            state = {MODEL: get_model_state_dict(model), RANKS: self._own(model, rank_state)}
            if optimizers := several(optimizers):
                named = NamedOptimizers(model, optimizers)
        except Exception as caught:  # of hooks and of what is pickled, which may raise anything
            error = caught
        share_error("save", error, self._group)
        if named:
            state[OPTIMIZER] = get_optimizer_state_dict(model, optimizers)
        alike: dict[str, Any] = {key: state[key] for key in (MODEL, OPTIMIZER) if key in state}
        alike |= {"step": step, "progress": from_json(progress)}
        check_alike(alike, self._group, same_keys=self._same_keys)
        job = Job(self.folder, step, progress, self._keep_last, self._checksums, self._group)
        if self._asynchronous:
            self._pending = write_behind(job, state)
            return self.folder / on_disk.name_of(step)
        return write(job, state)

    def wait(self) -> Path | None:
        """Wait for an asynchronous save; return the checkpoint, None if there was none to wait for.

        Raises what went wrong with it.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            return pending.result()
        finally:
            if pending.done():  # else a KeyboardInterrupt: it goes on, and uses the group
                self._pending = None

    def newest(self) -> Checkpoint | None:
        """Return the complete checkpoint that was saved last, None where there is none.

        Broken and half-written ones are logged as warnings with what is wrong, and skipped.
        """
        return self._newest()[0]

    def _newest(self) -> tuple[Checkpoint | None, list[Skipped]]:
        self.wait()

        def look() -> tuple[list[tuple[Path, Manifest]], list[Skipped]]:
            on_disk.recover(self.folder)
            return on_disk.find(self.folder)

        complete, skipped = on_first_rank(self._group, "look for checkpoints", look)
        usable = None
        for path, manifest in complete:
            if reason := self._contents_problem(path, manifest):
                skipped.append(Skipped(path, reason))
            else:
                usable = path, manifest
                break
        for item in skipped if self._group.rank() == 0 else ():
            logger.warning("%s is not used: it %s.", item.path, item.reason)
        return (_checkpoint(*usable, tuple(skipped)) if usable else None), skipped

    def at(self, path: str | Path) -> Checkpoint:
        """Return the checkpoint at ``path``; raises ValueError, with the reason, for a broken one.

        One without a manifest is taken to be torch's own, of step 0.
        """
        path = self._path(path)

        def look() -> Manifest | str:
            if not (path / MANIFEST).exists():
                return Manifest(0, 0, 0, {}, {})
            try:
                manifest = read_manifest(path)
                on_disk.check_sizes(path, manifest)
            except ValueError as error:
                return str(error)
            return manifest

        manifest = on_first_rank(self._group, "look at a checkpoint", look)
        reason = manifest if isinstance(manifest, str) else self._contents_problem(path, manifest)
        if reason:
            raise ValueError(f"{path} {reason}; pass a complete checkpoint, or None.")
        return _checkpoint(path, manifest, ())

    def load(
        self,
        model: nn.Module,
        optimizers: Optimizer | Iterable[Optimizer] = (),
        *,
        checkpoint: Checkpoint | str | Path | None = None,
        strict: bool = True,
        random: bool = True,
    ) -> Restored | None:
        """Fill model and optimizers from ``checkpoint``, or the newest; return None without one.

        Everything is filled in place, and a model on the meta device gets its memory first. With
        ``random=True`` the generators of Python, NumPy and torch go on as they were, if there are
        as many ranks as there were. What torch's checkpoints of FSDP2 have under "model" and
        "optimizer" is loaded from a path, too.

        Raises RuntimeError where there are checkpoints and none can be used, instead of beginning
        anew; ValueError, before anything is changed, naming keys that are missing or that nothing
        wants, shapes and dtypes that do not fit, and a path with a broken checkpoint.
        ``strict=False`` loads what fits by its name.
        """
        self.wait()
        if len({*everyones(checkpoint is None, self._group)}) > 1:
            raise ValueError("some ranks load from a checkpoint and others None; pass one to all.")
        if checkpoint is None:
            checkpoint, skipped = self._newest()
            _check_not_all_broken(self.folder, checkpoint, skipped)
        elif not isinstance(checkpoint, Checkpoint):
            checkpoint = self.at(checkpoint)
        if checkpoint is None:
            return None
        read(checkpoint.path, model, optimizers, self._group, strict=strict)
        same = checkpoint.world_size == self._group.size()
        generators = read_rank_state(checkpoint.path, RANDOM, self._group) if same else None
        if random and generators is not None:
            set_generators(generators, device_of(model))
        own = read_rank_state(checkpoint.path, OWN, self._group)
        return Restored(checkpoint, own, random and generators is not None)

    @property
    def _group(self) -> dist.ProcessGroup:
        group = self._group_ref()
        if group is None:
            raise RuntimeError(
                "the process group of this CheckpointManager was destroyed; make another manager "
                "after torch.distributed.init_process_group()."
            )
        return group

    def _path(self, given: Any) -> Path:
        path, error = Path(), None
        try:
            path = Path(given).absolute()
        except TypeError as caught:
            error = caught
        share_error("look at a checkpoint", error, self._group)
        return path

    def _own(self, model: nn.Module, rank_state: Any) -> dict[str, Any]:
        rank = str(self._group.rank())
        own = {RANDOM: {rank: pack(generators(device_of(model)))}}
        if rank_state is not None:
            own[OWN] = {rank: pack(rank_state)}
        return own

    def _contents_problem(self, path: Path, manifest: Manifest) -> str | None:
        problem = None
        try:
            on_disk.check_contents(path, manifest, share([*manifest.files], self._group))
        except (OSError, ValueError) as error:
            problem = str(error)
        return next(filter(None, everyones(problem, self._group)), None)


def _checkpoint(path: Path, manifest: Manifest, skipped: tuple[Skipped, ...]) -> Checkpoint:
    return Checkpoint(
        path, manifest.step, manifest.world_size, from_json(manifest.progress), skipped
    )


def _check_not_all_broken(folder: Path, found: Checkpoint | None, skipped: list[Skipped]) -> None:
    broken = [f"{s.path.name} {s.reason}" for s in skipped if s.path.name.startswith(on_disk.NAME)]
    if found is None and broken:
        raise RuntimeError(
            f"{folder} has checkpoints, and none can be used: {'; '.join(broken)}. Repair them, or "
            "move them away to begin anew."
        )


def _check_keep_last(keep_last: int | None) -> None:
    bad = isinstance(keep_last, bool) or not isinstance(keep_last, int | None)
    if bad or (keep_last is not None and keep_last < 1):
        raise ValueError(f"keep_last={keep_last!r}, expected a positive integer or None.")


def _check_memory(model: nn.Module) -> None:
    if isinstance(model, nn.Module) and (names := meta_names(model)):
        raise ValueError(
            f"{', '.join(names[:10])} are on the meta device and have no values to save; call "
            "vescale.fsdp.init_empty(model, device), or load the model, first."
        )


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step={step!r}, expected an integer from 0 on.")
