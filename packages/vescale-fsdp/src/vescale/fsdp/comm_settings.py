# SPDX-License-Identifier: Apache-2.0
"""Methods of a wrapped module that change what its collectives are made of."""

from typing import Any

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.comm_options import KINDS, Custom, can_be_direct, separate_group
from vescale.fsdp.custom_collectives import Comm
from vescale.fsdp.units import ModuleMixin, groups_of


class CommSettings(ModuleMixin):
    """Mixed into ``FSDPModule``. Call them between two steps, alike on every rank."""

    def set_collectives(self, kind: str, *, recurse: bool = True) -> None:
        """Choose the collectives: ``"torch"``, ``"direct"``, or ``"auto"``, the default.

        Direct ones are for gloo with CPU tensors, and "auto" takes them there and torch's
        elsewhere. They gather by messages between pairs of ranks, and reduce by an all-to-all and
        a sum in the order of ranks, in the memory of one more gradient buffer. What
        ``set_custom_all_gather`` and ``set_custom_reduce_scatter`` set goes first.

        Raises ValueError for another ``kind``, and for direct ones where they cannot be.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}, expected one of {', '.join(map(repr, KINDS))}.")
        check_bool("recurse", recurse)
        groups = groups_of(self, recurse)
        if kind == "direct":
            for group in groups:
                device = group.device
                if group.process_group is not None and not can_be_direct(
                    group.process_group, device
                ):
                    raise ValueError(
                        f"direct collectives are for gloo with CPU tensors, and the unit "
                        f"{group.name!r} is on {device} with another backend; pass 'auto'."
                    )
        for group in groups:
            group.comm.kind = kind
            group.apply_comm()

    def set_custom_all_gather(self, comm: Comm | None, *, in_place: bool = False) -> None:
        """Gather this module's parameters with ``comm``, an ``AllGather`` of FSDP2's protocol.

        None goes back to the default. As in FSDP2, ``comm.allocate`` gives the memory that the
        gather writes to, which may be the same each time, and this module's parameters are copied
        out of it. With ``in_place`` it is never called: the gather writes to where the parameters
        are, in memory that torch allocated, and nothing is copied.

        Raises TypeError for what does not have the protocol's methods.
        """
        custom = _custom(comm, in_place, "AllGather")
        for group in groups_of(self, recurse=False):
            group.comm.all_gather = custom
            group.apply_comm()

    def set_custom_reduce_scatter(self, comm: Comm | None, *, in_place: bool = False) -> None:
        """Reduce this module's gradients with ``comm``, a ``ReduceScatter`` of FSDP2's protocol.

        None goes back to the default. As in FSDP2, ``comm.allocate`` gives the memory for the
        input and the result; gradients are copied to and from it. With ``in_place`` it is never
        called, and nothing is copied. The operation is a sum where the backend has no average, and
        is then scaled.

        Raises TypeError for what does not have the protocol's methods.
        """
        custom = _custom(comm, in_place, "ReduceScatter")
        for group in groups_of(self, recurse=False):
            group.comm.reduce_scatter = custom
            group.apply_comm()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Choose whether this module's data travel in memory that the process group allocates.

        A backend may move it faster (NCCL over NVLink SHARP), and it costs a copy after each
        gather and around each reduction. No effect where the backend has no allocator, as gloo.

        Raises ValueError together with a custom all-gather or reduce-scatter.
        """
        check_bool("enable", enable)
        groups = groups_of(self, recurse=False)
        for group in groups:
            if group.comm.all_gather is not None or group.comm.reduce_scatter is not None:
                raise ValueError(
                    f"the unit {group.name!r} has a custom all-gather or reduce-scatter, which "
                    "allocates its own memory; set that to None first, or leave this call out."
                )
        for group in groups:
            group.comm.group_memory = enable
            group.apply_comm()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Choose whether gradients are reduced over a process group of their own.

        The network may then carry a reduction and a gather at the same time. Collective: with
        ``enable`` one process group is made for each set of sharding ranks, once.
        """
        check_bool("enable", enable)
        check_bool("recurse", recurse)
        for group in groups_of(self, recurse):
            if enable and group.process_group is not None:
                separate_group(group.process_group)
            group.comm.separate = enable
            group.apply_comm()

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Choose how many reductions may run at once, 1 by default, before one is waited for.

        More of them hide reductions that take longer than the backward of a unit, each for the
        memory of one more gradient buffer. Gradients of the next unit are written meanwhile in any
        case.

        Raises TypeError unless it is an int, ValueError below 1.
        """
        number = max_input_buffers
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"max_input_buffers={number!r} is a {type(number).__name__}, not int.")
        if number < 1:
            raise ValueError(f"max_input_buffers={number}, expected at least 1.")
        check_bool("recurse", recurse)
        for group in groups_of(self, recurse):
            group.reduce_options.in_flight = number


def _custom(comm: Any, in_place: bool, protocol: str) -> Custom | None:
    check_bool("in_place", in_place)
    if comm is None:
        return None
    if not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise TypeError(
            f"comm is a {type(comm).__name__}, expected an object that can be called and has "
            f"allocate(size, *, dtype, device), as torch's {protocol} describes."
        )
    return Custom(comm, in_place)
