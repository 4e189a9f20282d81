# SPDX-License-Identifier: Apache-2.0
"""Experimental: draw a rank's part alone on a CUDA device, as one device of its model would.

Off unless asked for: a whole tensor is drawn then, and the part kept. ``benchmarks/random_cuda.py``
compares every line of this with torch's operators on a GPU.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.dtensor._torch_compat import compile_cuda_kernel
from vescale.dtensor.random.parts import Strip
from vescale.dtensor.random.philox import THREADS_OF_BLOCK, Draws, dropout_vector, thread_limit

aten = torch.ops.aten

INDEX_CHUNK = 1 << 22  # elements of a part for one launch, whose indices are written out
MOST_BYTES = 1 << 31  # torch splits the iterator of larger tensors, and draws otherwise
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
UNIFORM, NORMAL, BERNOULLI, EXPONENTIAL = range(4)
KINDS = {
    aten.uniform_.default: (UNIFORM, (0.0, 1.0)),
    aten.normal_.default: (NORMAL, (0.0, 1.0)),
    aten.bernoulli_.float: (BERNOULLI, (0.5,)),
    aten.exponential_.default: (EXPONENTIAL, (1.0,)),
}
DROPOUT = "_dropout_mask"  # the name of the fill of the fused operator's mask

Kernel = Callable[["Launch", torch.Tensor, torch.Tensor], None]

# Calls curand's own functions, as torch's kernels do, so that the last bits agree.
SOURCE = r"""
#include <curand_kernel.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

__device__ float unit(curandStatePhilox4_32_10_t* state, int lane) {
  float4 r = curand_uniform4(state);
  return lane == 0 ? r.x : lane == 1 ? r.y : lane == 2 ? r.z : r.w;
}
__device__ double unit_double(curandStatePhilox4_32_10_t* state, int lane) {
  double2 r = curand_uniform2_double(state);
  return lane == 0 ? r.x : r.y;
}
__device__ float gauss(curandStatePhilox4_32_10_t* state, int lane) {
  float4 r = curand_normal4(state);
  return lane == 0 ? r.x : lane == 1 ? r.y : lane == 2 ? r.z : r.w;
}
__device__ double gauss_double(curandStatePhilox4_32_10_t* state, int lane) {
  double2 r = curand_normal2_double(state);
  return lane == 0 ? r.x : r.y;
}

// torch's flags switch the conversions of these types off, so they are called by name.
__device__ void narrow(float x, float* out) { *out = x; }
__device__ void narrow(float x, __half* out) { *out = __float2half_rn(x); }
__device__ void narrow(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ void single(
    int kind, curandStatePhilox4_32_10_t* state, int lane, double a, double b, T* out) {
  if (kind == 0) {
    T low, high;
    narrow(float(a), &low);
    narrow(float(b), &high);
    narrow(unit(state, lane) * (widen(high) - widen(low)) + widen(low), out);
    if (widen(*out) == widen(high)) *out = low;
  } else if (kind == 1) {
    narrow(gauss(state, lane) * float(b) + float(a), out);
  } else {
    float u = unit(state, lane);
    const float tiny = 1.1920928955078125e-7f / 2.0f;
    float log_u = u >= 1.0f - tiny ? -tiny : __logf(u);
    narrow(kind == 2 ? (u < float(a) ? 1.0f : 0.0f) : -1.0f / float(a) * log_u, out);
  }
}
__device__ double twice(int kind, curandStatePhilox4_32_10_t* state, int lane, double a, double b) {
  if (kind == 1) return gauss_double(state, lane) * b + a;
  double u = unit_double(state, lane);
  if (kind == 0) {
    double value = u * (b - a) + a;
    return value == b ? a : value;
  }
  if (kind == 2) return u < a ? 1.0 : 0.0;
  const double tiny = 2.220446049250313e-16 / 2.0;
  return -1.0 / a * (u >= 1.0 - tiny ? -tiny : log(u));
}

// numbers: count, kind, type, seed, offset, threads, unroll, vector.
extern "C" __global__ void vescale_fill(
    void* out, const long long* index, const long long* numbers, double a, double b) {
  const long long count = numbers[0];
  const int kind = numbers[1], type = numbers[2], unroll = numbers[6], vector = numbers[7];
  const unsigned long long seed = numbers[3], offset = numbers[4], threads = numbers[5];
  long long k = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  for (; k < count; k += (long long)gridDim.x * blockDim.x) {
    unsigned long long i = index[k], thread, call;
    int lane;
    if (vector > 1) {
      unsigned long long group = i / vector;
      int inside = i % vector;
      thread = group % threads;
      call = group / threads * ((vector + 3) / 4) + inside / 4;
      lane = inside % 4;
    } else {
      unsigned long long turn = i / threads;
      thread = i % threads;
      call = turn / unroll;
      lane = turn % unroll;
    }
    curandStatePhilox4_32_10_t state;
    curand_init(seed, thread, offset + 4 * call, &state);
    if (type == 0) single(kind, &state, lane, a, b, (float*)out + k);
    if (type == 1) ((double*)out)[k] = twice(kind, &state, lane, a, b);
    if (type == 2) single(kind, &state, lane, a, b, (__half*)out + k);
    if (type == 3) single(kind, &state, lane, a, b, (__nv_bfloat16*)out + k);
    if (type == 4) ((bool*)out)[k] = unit(&state, lane) < float(a);
  }
}
"""
TYPES = {dtype: number for number, dtype in enumerate((*FLOATS, torch.bool))}


@dataclass(frozen=True)
class Launch:
    """Which numbers to draw, and what to make of them; ``args`` are those of the operator."""

    kind: int
    args: tuple[float, ...]
    draws: Draws


_replay = False


def set_replay(enabled: bool) -> None:
    """Draw parts alone on CUDA devices, or whole tensors. Experimental; alike on all ranks."""
    global _replay
    _replay = bool(enabled)


def serves(func: Any, local: torch.Tensor, numel: int) -> bool:
    """Tell whether ``fill_part`` is to draw: it is switched on, and knows the operator."""
    if not _replay or local.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return False
    if getattr(func, "__name__", "") == DROPOUT:
        return numel < MOST_BYTES // 8
    known = func in KINDS and (local.dtype in FLOATS or func is aten.bernoulli_.float)
    return known and local.dtype in TYPES and numel * local.dtype.itemsize < MOST_BYTES


def fill_part(
    func: Any,
    args: Sequence[Any],
    numel: int,
    strips: Sequence[Strip],
    local: torch.Tensor,
    generator: torch.Generator | None,
) -> None:
    """Fill ``local``, flat, with the elements ``strips`` of ``func`` on a tensor of ``numel``."""
    if func in KINDS:  # raises what the operator raises
        func(torch.empty(0, dtype=local.dtype, device=local.device), *args)
    if generator is None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state()
    seed, offset = state.view(torch.int64).tolist()
    properties = torch.cuda.get_device_properties(local.device)
    most = thread_limit(
        properties.multi_processor_count, properties.max_threads_per_multi_processor
    )
    launch = launch_of(func, args, numel, local.dtype, seed, offset, most)
    write_part(launch, strips, local, _launch)
    state.view(torch.int64)[1] = offset + launch.draws.advance
    generator.set_state(state)


def launch_of(
    func: Any,
    args: Sequence[Any],
    numel: int,
    dtype: torch.dtype,
    seed: int,
    offset: int,
    most_threads: int,
) -> Launch:
    """Return what ``func`` draws for a whole tensor of ``numel`` elements."""
    if func not in KINDS:  # dropout: its probability to drop, and its operand's dtype
        p, of = args
        vector = dropout_vector(numel, of.itemsize)
        return Launch(BERNOULLI, (1 - p,), Draws(numel, seed, offset, most_threads, vector))
    kind, defaults = KINDS[func]
    double = dtype is torch.float64
    draws = Draws(numel, seed, offset, most_threads, double=double)
    return Launch(kind, (*args, *defaults[len(args) :]), draws)


def write_part(
    launch: Launch, strips: Sequence[Strip], local: torch.Tensor, kernel: Kernel
) -> None:
    """Let ``kernel`` write the elements ``strips`` into ``local``, a chunk at a time."""
    for strip in strips:
        part = local[strip.start : strip.start + strip.numel]
        for start, index in _indices(strip, local.device):
            kernel(launch, index, part[start : start + len(index)])


def _indices(strip: Strip, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (start in the strip, indices of the whole tensor), a chunk at a time."""
    rows = torch.from_numpy(strip.rows).to(device)
    columns = None
    if len(strip.columns) > 1:
        columns = torch.cat([torch.arange(s, s + n, device=device) for s, n in strip.columns])
    for start in range(0, strip.numel, INDEX_CHUNK):
        place = torch.arange(start, min(start + INDEX_CHUNK, strip.numel), device=device)
        row, inside = rows[place // strip.width], place % strip.width
        column = inside + strip.columns[0][0] if columns is None else columns[inside]
        yield start, row * strip.row_numel + column


def _launch(launch: Launch, index: torch.Tensor, out: torch.Tensor) -> None:
    draws, (a, b) = launch.draws, (*launch.args, 0.0)[:2]
    numbers = (len(index), launch.kind, TYPES[out.dtype], draws.seed, draws.offset, draws.threads)
    on_device = torch.tensor([*numbers, draws.unroll, draws.vector], device=out.device)
    blocks = min(-(-len(index) // THREADS_OF_BLOCK), 1 << 16)
    arguments = [out, index, on_device, float(a), float(b)]
    _kernel()((blocks, 1, 1), (THREADS_OF_BLOCK, 1, 1), arguments)


@functools.cache
def _kernel() -> Callable[..., None]:
    return compile_cuda_kernel(SOURCE, "vescale_fill")
