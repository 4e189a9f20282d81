# SPDX-License-Identifier: Apache-2.0
"""What it costs to draw a rank's part of a tensor as one device does, on the CPU, in one process.

    python -m benchmarks.random_cpu [--mib 1024] [--world 64]

Fills one part of ``normal_`` on a float32 tensor of that size: in a row (Shard(0), ragged) and in
columns (Shard(1)). Prints CPU time against the plain draw of the whole, and of a tensor of the
part's size, and the memory that the process grew by beyond the part. Exits with 1 if a target is
missed.
"""

import argparse
import resource
import time
from collections.abc import Callable

import torch
from torch.distributed.tensor import Placement, Shard

from vescale.dtensor import RaggedShard
from vescale.dtensor.random.cpu import fill_part
from vescale.dtensor.random.parts import strips_of

NORMAL = torch.ops.aten.normal_.default
EXTRA_MIB = 16  # beyond the part
WHOLE = 1.2  # most times the whole draw
LOCAL, JUMP_SECONDS = 3.0, 0.15  # most times the local draw, and a constant, for a part in a row


def seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def grown_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the whole tensor")
    parser.add_argument("--world", type=int, default=64, help="number of ranks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, world = options.mib * (1 << 18) // 4096, options.world
    shape, numel = (rows, 4096), rows * 4096
    units = [1] * world
    layouts: list[tuple[str, Placement]] = [
        ("Shard(0)", Shard(0)),
        ("ragged", RaggedShard((0,), units)),
        ("Shard(1)", Shard(1)),
    ]
    middle, missed, found = world // 2, False, []
    torch.empty(1 << 20).normal_()
    for name, placement in layouts:
        strips = strips_of(shape, [placement], (world,), (middle,))
        local = torch.zeros(sum(strip.numel for strip in strips))
        before = grown_mib()

        def fill(strips=strips, local=local):
            fill_part(NORMAL, (), numel, strips, local, None)

        took = seconds(fill)
        found.append((name, took, seconds(fill), grown_mib() - before, seconds(local.normal_)))
    whole = seconds(torch.empty(shape).normal_)
    print(f"whole: {whole:.2f} s CPU for {options.mib} MiB; part {options.mib / world:.0f} MiB")
    for name, cold, warm, mib, local_draw in found:
        in_a_row = name != "Shard(1)"
        limit = LOCAL * local_draw + JUMP_SECONDS if in_a_row else WHOLE * whole
        late = min(cold, warm) > limit or cold > WHOLE * whole or mib > EXTRA_MIB
        missed = missed or late
        print(
            f"{name:<9} first {cold:.3f} s, again {warm:.3f} s (<= {limit:.3f}), "
            f"{cold / whole:.2f} of the whole (<= {WHOLE}), "
            f"{mib:.1f} MiB more (<= {EXTRA_MIB}){'  MISSED' if late else ''}"
        )
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
