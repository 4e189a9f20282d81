# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters and gradients in the host's memory, while another device computes.

Shards are copied to the device on their way into a gather, and reduced gradients back. Both copies
run on streams of their own between two points of the current stream, as collectives do: each starts
after the work issued so far. On a mesh of CPUs there is nothing to copy.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

CPU = torch.device("cpu")


def check_offload(policy: OffloadPolicy) -> None:
    """Raise TypeError unless ``policy`` is torch's OffloadPolicy or CPUOffloadPolicy."""
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy={policy!r} is a {type(policy).__name__}, expected an OffloadPolicy; "
            "pass for example CPUOffloadPolicy()."
        )
    if isinstance(policy, CPUOffloadPolicy) and not isinstance(policy.pin_memory, bool):
        raise TypeError(
            f"offload_policy.pin_memory={policy.pin_memory!r} is a "
            f"{type(policy.pin_memory).__name__}, expected True or False."
        )


def offloads(policy: OffloadPolicy) -> bool:
    """Tell whether sharded parameters and gradients live on the CPU."""
    return isinstance(policy, CPUOffloadPolicy)


def check_home(policy: OffloadPolicy, home: torch.device, name: str) -> None:
    """Raise RuntimeError if the parameters of unit ``name`` were moved where none may live."""
    if offloads(policy) and home.type not in ("cpu", "meta"):
        raise RuntimeError(
            f"the unit {name or '(root)'!r} is wrapped with CPUOffloadPolicy, which keeps sharded "
            f"parameters on the CPU, but they were moved to {home}; move the model back with "
            "model.to('cpu'), materialise it with model.to_empty(device='cpu'), and move only "
            "inputs (and buffers, by name) to the device."
        )


class HostCopies:
    """Copies between the host and ``device``, in memory that is pinned with ``pin``."""

    def __init__(self, device: torch.device, *, pin: bool) -> None:
        self.device, self.pin = device, pin
        self._module = torch.get_device_module(device)
        self._inward = self._module.Stream(device)
        self._outward = self._module.Stream(device)
        self._leaving: tuple[torch.Event, torch.Tensor] | None = None
        self._receivers: list[weakref.WeakMethod] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory [numel] of the host, of undefined contents."""
        return torch.empty(numel, dtype=dtype, device=CPU, pin_memory=self.pin)

    @contextmanager
    def inward(self) -> Iterator[None]:
        """Let what is issued inside, copies and a collective of their results, overtake later work
        of the current stream."""
        self._inward.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._inward):
            yield

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Copy ``source`` of the host into ``target``, inside of ``inward``; casts on the device.

        Returns what to wait for before ``source`` is written or ``target`` used elsewhere.
        """
        if source.dtype != target.dtype:  # copy_ would cast on the host, and wait for that
            source = source.to(self.device, non_blocking=True)
        target.copy_(source, non_blocking=True)
        return self._inward.record_event()

    def await_inward(self, event: torch.Event) -> None:
        """Have the current stream wait for a copy."""
        self._module.current_stream(self.device).wait_event(event)

    def to_host(
        self, source: torch.Tensor, receive: Callable[[], None]
    ) -> tuple[torch.Tensor, torch.Event]:
        """Copy ``source`` of the current stream, and let go of it when the next one is copied.

        The result has no contents until ``synchronize()`` of the event returns. ``receive``, a
        bound method held weakly, is called by ``settle``.
        """
        current = self._module.current_stream(self.device)
        if self._leaving is not None:
            current.wait_event(self._leaving[0])  # then its memory may be used anew
        with torch.inference_mode(False):
            result = self.allocate(source.numel(), source.dtype)
        self._outward.wait_stream(current)
        with self._module.stream(self._outward):
            result.copy_(source, non_blocking=self.pin)
        event = self._outward.record_event()
        self._leaving = event, source
        self._receivers.append(weakref.WeakMethod(receive))
        return result, event

    def settle(self) -> None:
        """Hand over what leaves the device, also of other roots; let go of the last tensor."""
        while self._receivers:
            receive = self._receivers.pop(0)()
            if receive is not None:
                receive()
        if self._leaving is not None:
            self._leaving[0].synchronize()
            self._leaving = None


@functools.cache
def _shared(device: torch.device, pin: bool) -> HostCopies:
    return HostCopies(device, pin=pin)


def host_copies(policy: OffloadPolicy, device: torch.device) -> HostCopies | None:
    """Return how shards and gradients travel under ``policy``; None where they need not.

    All groups of a device share its streams. Memory of a mesh of CPUs is not pinned.
    """
    if not offloads(policy) or device.type == "cpu":
        return None
    return _shared(device, policy.pin_memory)  # type: ignore[attr-defined]  # a CPUOffloadPolicy
