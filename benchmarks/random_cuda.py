# SPDX-License-Identifier: Apache-2.0
"""Is the experimental CUDA replay what torch draws? For one GPU, in some minutes.

    python -m benchmarks.random_cuda [--quick]

Compares whole tensors and the generator's state for all operators, dtypes, lengths around the
number of threads, and offsets; then parts of random layouts, as virtual ranks; then times the
replay against torch's operator. Exits with 1 if a bit differs, or the replay is slower than its
target.
"""

import argparse
import functools
import random as python_random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Shard

from vescale.dtensor import RaggedShard, random
from vescale.dtensor.random import cuda
from vescale.dtensor.random.operators import _dropout_mask
from vescale.dtensor.random.parts import Strip, strips_of
from vescale.dtensor.random.philox import thread_limit

aten = torch.ops.aten
OPERATORS = {
    "uniform_": (aten.uniform_.default, (-1.0, 3.0)),
    "normal_": (aten.normal_.default, (1.0, 2.0)),
    "bernoulli_": (aten.bernoulli_.float, (0.3,)),
    "exponential_": (aten.exponential_.default, (1.5,)),
}
SCATTERED, CONTIGUOUS = 5.0, 2.0  # most times what torch's operator takes


def set_offset(offset: int) -> None:
    state = torch.cuda.get_rng_state()
    state.view(torch.int64)[1] = offset
    torch.cuda.set_rng_state(state)


def same(
    func: Any,
    args: Sequence,
    dtype: torch.dtype,
    shape: Sequence[int],
    strips: list[Strip],
    offset: int,
) -> bool:
    """Compare the replay of a part with torch's draw of the whole, and both generators."""
    whole = torch.empty(shape, dtype=dtype, device="cuda")
    local = torch.empty(sum(strip.numel for strip in strips), dtype=dtype, device="cuda")
    torch.manual_seed(3)
    set_offset(offset)
    func(whole, *args)
    state = torch.cuda.get_rng_state()
    torch.manual_seed(3)
    set_offset(offset)
    if not cuda.serves(func, local, whole.numel()):
        raise RuntimeError(f"{func} of {dtype} and shape {shape} is not replayed")
    cuda.fill_part(func, args, whole.numel(), strips, local, None)
    flat = whole.view(-1)
    parts = [flat[start : start + n] for strip in strips for start, n in strip.segments()]
    equal = torch.equal(local, torch.cat(parts) if parts else local)
    return equal and torch.equal(torch.cuda.get_rng_state(), state)


def cases(dtype: torch.dtype) -> list[tuple[str, Any, tuple, torch.dtype]]:
    found = [(name, func, args, dtype) for name, (func, args) in OPERATORS.items()]
    return [*found, ("native_dropout", _dropout_mask, (0.25, dtype), torch.bool)]


def compare_whole(lengths: Sequence[int], offsets: Sequence[int]) -> tuple[int, list[str]]:
    count, wrong = 0, []
    for of in cuda.FLOATS:
        for name, func, args, dtype in cases(of):
            for numel in lengths:
                strips = strips_of((numel,), [], (), ())
                for offset in offsets:
                    count += 1
                    if not same(func, args, dtype, (numel,), strips, offset):
                        wrong.append(f"{name} {of} numel={numel} offset={offset}")
    return count, wrong


def compare_parts(count: int) -> tuple[int, list[str]]:
    chance, wrong = python_random.Random(0), []
    for _ in range(count):
        name, func, args, dtype = chance.choice(cases(chance.choice(cuda.FLOATS)))
        shape = (chance.randint(1, 3000), chance.randint(1, 700))
        cut = chance.randint(0, shape[0] * shape[1] - 1)
        for mesh, placements, place in (
            ((4,), [Shard(chance.randint(0, 1))], (chance.randint(0, 3),)),
            ((2, 3), [Shard(0), Shard(1)], (chance.randint(0, 1), chance.randint(0, 2))),
            (
                (2,),
                [RaggedShard((0, 1), (cut, shape[0] * shape[1] - cut))],
                (chance.randint(0, 1),),
            ),
        ):
            if not same(func, args, dtype, shape, strips_of(shape, placements, mesh, place), 8):
                wrong.append(f"{name} {dtype} {shape} {placements} {place}")
    return 3 * count, wrong


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def compare_times(numel: int) -> list[str]:
    whole, missed = torch.empty(numel, device="cuda"), []
    plain = milliseconds(whole.uniform_)
    for name, shape, placements, mesh, target in (
        ("contiguous", (numel,), [], (), CONTIGUOUS),
        ("columns", (numel // 1024, 1024), [Shard(1)], (2,), SCATTERED),
    ):
        strips = strips_of(shape, placements, mesh, (0,) * len(mesh))
        local = torch.empty(sum(strip.numel for strip in strips), device="cuda")
        arguments = (*OPERATORS["uniform_"], numel, strips, local, None)
        took = milliseconds(functools.partial(cuda.fill_part, *arguments))
        ratio = took / plain
        print(f"{name:<12} {took:8.3f} ms, plain {plain:8.3f} ms, ratio {ratio:.2f} (<= {target})")
        missed += [name] if ratio > target else []
    return missed


def main() -> int:
    """Print what differs; return 1 if anything does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller tensors")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    random.set_mode("off", cuda_replay=True)
    properties = torch.cuda.get_device_properties(0)
    most = thread_limit(
        properties.multi_processor_count, properties.max_threads_per_multi_processor
    )
    around = [1, 255, 256, 1000, most - 1, most, most + 1, 4 * most - 1, 4 * most, 4 * most + 1]
    lengths = [*around, 5 * most + 17] + ([] if options.quick else [1 << 26])
    print(f"torch {torch.__version__}, {properties.name}, {most} threads")
    count, wrong = compare_whole(lengths, (0, 4, 2**32 - 4))
    print(f"whole tensors: {count} compared, {len(wrong)} differ", *wrong[:20], sep="\n  ")
    count, parts = compare_parts(20 if options.quick else 200)
    print(f"parts: {count} compared, {len(parts)} differ", *parts[:20], sep="\n  ")
    missed = compare_times(1 << 26)
    return int(bool(wrong or parts or missed))


if __name__ == "__main__":
    raise SystemExit(main())
