# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE
from vescale.fsdp.agreement import MESSAGE_BYTES, agree, agree_on_order


def check_descriptions(rank, world_size):
    """The first line that differs is told, however far down, also where one rank has more."""
    group, device = dist.group.WORLD, torch.device(DEVICE)
    lines = [f"weight {number} of a large unit" for number in range(200)]
    assert len("\n".join(lines)) > 2 * MESSAGE_BYTES
    agree(group, device, "meet", "\n".join(lines))
    odd = world_size - 1
    changed = [*lines[:150], "another", *lines[151:]]
    with pytest.raises(RuntimeError, match=rf"rank {odd} .*'weight 150 .*' and 'another'\."):
        agree(group, device, "meet", "\n".join(changed if rank == odd else lines))
    with pytest.raises(RuntimeError, match=r"'nothing' and 'one more'\."):
        agree(group, device, "meet", "\n".join([*lines, "one more"] if rank == odd else lines))
    with pytest.raises(RuntimeError, match=r"'weight 7 .*' and 'nothing'\."):
        agree(group, device, "meet", "\n".join(lines[:7] if rank == odd else lines))


def check_fields(rank, world_size):
    """Of a line of fields, what it is about and the fields that differ are told."""
    group, device = dist.group.WORLD, torch.device(DEVICE)
    odd = world_size - 1
    first, other = "a unit; dtype=int8; lanes=1; size=2", "a unit; dtype=int4; lanes=1; size=3"
    told = "'a unit; dtype=int8; size=2' and 'a unit; dtype=int4; size=3'"
    with pytest.raises(RuntimeError, match=rf"rank 0 and rank {odd} .*: {told}\."):
        agree(group, device, "meet", other if rank == odd else first)
    with pytest.raises(RuntimeError, match=r"'a unit; dtype=int8; .*' and 'a unit; lanes=1'\."):
        agree(group, device, "meet", "a unit; lanes=1" if rank == odd else first)


def check_errors(rank, world_size):
    """The rank with the error raises it as it is, before any difference is looked for."""
    group, device = dist.group.WORLD, torch.device(DEVICE)
    odd = world_size - 1
    error = ArithmeticError("too odd") if rank == odd else None
    kind = ArithmeticError if rank == odd else RuntimeError
    with pytest.raises(kind, match="too odd"):
        agree(group, device, "meet", f"a description of {rank}", error)
    agree(group, device, "meet", "the next one")


def check_all(rank, world_size):
    check_descriptions(rank, world_size)
    check_fields(rank, world_size)
    check_errors(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
def test_differences_and_errors_are_told_to_everyone(run_ranks, world_size):
    run_ranks(check_all, world_size)


def check_order(rank, world_size):
    group, device = dist.group.WORLD, torch.device(DEVICE)
    orders = [[3, 1, 5], [3, 4, 1], [0, 1]]
    assert agree_on_order(orders[rank], 6, group, device) == [0, 3, 4, 1, 2, 5]


def test_one_order_keeps_those_of_all_ranks(run_ranks):
    run_ranks(check_order, 3, exact=True)
