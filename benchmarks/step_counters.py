# SPDX-License-Identifier: Apache-2.0
"""What one training step dispatches, copies, sends and allocates, counted."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

COPIES = {"copy_", "_to_copy", "clone", "cat", "_chunk_cat", "chunk_cat", "all_gather_copy_in"}
COPIES |= {"_foreach_copy_"}
SPLITS = {"split_with_sizes_copy"}
LARGE = 2**14  # bytes; smaller allocations are no buffers


class Count(TorchDispatchMode):
    """Count operators, bytes written by copies, and collectives with their payload's bytes.

    A gather by messages counts once, and so does a reduction by an all-to-all. Copies that a
    backend makes inside of a collective are not seen; those of Python are.

    ``detached`` counts ``aten::detach`` apart: autograd hands every tensor that a hook saved to
    backward as a new object of the same memory, and only a mode like this one sees an operator in
    that. ``torch.profiler`` shows none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.copied = self.payload = self.detached = 0
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].strip("_")
        if func.namespace == "c10d":
            self._calls[name] += 1
            self.payload += _payload(name, args)
            return out
        if func is torch.ops.aten.detach.default:
            self.detached += 1
            return out
        self.operators += 1
        if func._schema.name.partition("::")[2] in COPIES:
            written = args[0] if name in ("copy", "foreach_copy") else out
            written = (written,) if isinstance(written, torch.Tensor) else written or ()
            self.copied += sum(t.nbytes for t in written)
        elif name in SPLITS:
            pieces = (kwargs or {}).get("out") or out
            self.copied += sum(t.nbytes for t in pieces)
        return out

    @property
    def collectives(self) -> int:
        """How many there were, a gather by messages being one."""
        messages = self._calls["send"] // max(dist.get_world_size() - 1, 1)
        others = sum(n for name, n in self._calls.items() if name not in ("send", "recv"))
        return messages + others


def _payload(name: str, args: tuple) -> int:
    """Return the bytes of the full buffer that a collective gathers, or reduces."""
    size = dist.get_world_size()
    if name == "send":
        return args[0][0].nbytes * size // (size - 1)
    if name == "recv":
        return 0
    reduced = ("reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall_base")
    full = args[1] if name in reduced else args[0]
    return full.nbytes if isinstance(full, torch.Tensor) else sum(t.nbytes for t in full)


def memory_of(step: Callable[[], None], kept: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Run ``step``; return the most bytes of tensors at once, and how many large ones were made.

    ``kept`` are the tensors that live before it. CPU only, by what the allocator reports; what a
    backend allocates in threads of its own is not seen.
    """
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = large = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
        large += event.nbytes() >= LARGE
    return sum(storages.values()) + peak, large
