# SPDX-License-Identifier: Apache-2.0
"""Write one checkpoint with torch's distributed checkpoint, and publish it once it is complete.

What runs here may run in a thread beside training, so it communicates in a process group of its own
and only there.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from vescale.fsdp.checkpoint import folder as on_disk
from vescale.fsdp.checkpoint.alike import beside, everyones
from vescale.fsdp.checkpoint.manifest import Manifest
from vescale.fsdp.phases import waiting

logger = logging.getLogger("vescale.fsdp.checkpoint")


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint to write; the same on every rank of ``group``."""

    folder: Path
    step: int
    progress: dict[str, Any]
    keep_last: int | None
    checksums: bool
    group: dist.ProcessGroup


def write(job: Job, state: dict[str, Any]) -> Path:
    """Write ``state`` and return the published checkpoint. Raises the same on all ranks."""
    partial = _start(job)
    try:
        with waiting("write of a checkpoint", group=job.group, aside=beside()):
            dcp.save(state, checkpoint_id=partial, process_group=job.group)
        return _finish(job, partial)
    finally:
        on_disk.stop(partial)


def write_behind(job: Job, state: dict[str, Any]) -> Future[Path]:
    """Copy ``state`` and return at once; the future has what ``write`` returns or raises.

    An error is also logged, on the first rank.
    """
    partial, first = _start(job), job.group.rank() == 0
    try:
        saved = dcp.async_save(state, checkpoint_id=partial, process_group=job.group)
    except BaseException:
        on_disk.stop(partial)
        raise
    saved = saved.upload_completion if isinstance(saved, AsyncSaveResponse) else saved

    def publish() -> Path:
        try:
            saved.result()
            return _finish(job, partial)
        except BaseException as error:
            if first:  # perhaps nobody waits any more
                logger.error(
                    "the checkpoint of step %d was not written: %s: %s (wait() waits for a save, "
                    "and destroy_process_group() ends it)",
                    *(job.step, type(error).__name__, error),
                )
            raise
        finally:
            on_disk.stop(partial)

    thread = ThreadPoolExecutor(1, thread_name_prefix="publish_checkpoint")
    published = thread.submit(publish)
    thread.shutdown(wait=False)
    return published


def on_first_rank(group: dist.ProcessGroup, what: str, action: Callable[[], Any]) -> Any:
    """Return on all ranks what ``action`` returns on the first; it can be pickled.

    If it raises, so do all ranks: the first its error, the others RuntimeError with its text.
    """
    answer: list[Any] = [None, None]
    error = None
    if group.rank() == 0:
        try:
            answer[0] = action()
        except Exception as caught:
            error = caught
            answer[1] = f"{type(caught).__name__}: {caught}"
    with waiting(f"answer of the first rank, which is to {what}", group=group, aside=beside()):
        dist.broadcast_object_list(answer, group_src=0, group=group)
    if error is not None:
        raise error
    if answer[1] is not None:
        raise RuntimeError(f"the first rank cannot {what}: {answer[1]}")
    return answer[0]


def share(names: list[str], group: dist.ProcessGroup) -> list[str]:
    """Return which of the files in a checkpoint this rank is to read through."""
    return names[group.rank() :: group.size()]


def _start(job: Job) -> Path:
    return on_first_rank(
        job.group, "start a checkpoint", lambda: on_disk.start(job.folder, job.step)
    )


def _written(partial: Path) -> dict[str, int]:
    """Return name and size of the files in ``partial``; raises RuntimeError where parts lack."""
    files, lacking = on_disk.files_in(partial), set()
    for place in (dcp.FileSystemReader(partial).read_metadata().storage_data or {}).values():
        if files.get(place.relative_path, -1) < place.offset + place.length:
            lacking.add(place.relative_path)
    if lacking:
        raise RuntimeError(
            f"{partial} lacks what ranks wrote to {sorted(lacking)}; pass a folder that is the "
            "same on all hosts, and that no other job writes to."
        )
    return files


def _finish(job: Job, partial: Path) -> Path:
    files = on_first_rank(job.group, "list what was written", lambda: _written(partial))
    sums, problem = {}, None
    try:
        if job.checksums:
            mine = share(list(files), job.group)
            sums = {name: on_disk.checksum(partial / name) for name in mine}
    except OSError as error:
        problem = f"rank {job.group.rank()} cannot read what was written: {error}"
    answers = everyones((sums, problem), job.group)
    if problems := [text for _, text in answers if text]:
        raise RuntimeError(f"{partial} was not published: {problems[0]}")
    checksums = {name: value for part, _ in answers for name, value in part.items()}

    def publish() -> Path:
        manifest = Manifest(
            job.step,
            on_disk.next_sequence(job.folder),
            job.group.size(),
            job.progress,
            {name: (nbytes, checksums.get(name)) for name, nbytes in files.items()},
        )
        final = on_disk.publish(partial, manifest)
        if job.keep_last is not None:
            on_disk.prune(job.folder, job.keep_last)
        return final

    return on_first_rank(job.group, "publish the checkpoint", publish)
