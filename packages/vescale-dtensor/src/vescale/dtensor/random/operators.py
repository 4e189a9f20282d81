# SPDX-License-Identifier: Apache-2.0
"""Random operators on DTensors, each by one or more in-place fills.

A handler is called as ``handler(func, args, kwargs)``, below autograd, with a DTensor of any class
as the first argument; it returns what the operator returns. While a batch is active, it may be a
plain tensor, and handlers of factories are called too.
"""

from collections.abc import Callable
from typing import Any

import torch

from vescale.dtensor._torch_compat import TorchDTensor
from vescale.dtensor.random.batch import active
from vescale.dtensor.random.fill import fill

aten = torch.ops.aten

OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _inplace(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x, args, kwargs = args[0], args[1:], dict(kwargs)
    generator = kwargs.pop("generator", None)
    names = [argument.name for argument in func._schema.arguments[1 + len(args) :]]
    named = [kwargs.pop(name) for name in names if name in kwargs]  # in order: none between them
    fill(func, x, (*args, *named), generator)
    return x


def _like(fill_func: Any) -> Callable:
    """``rand_like(x)`` and its like: an empty tensor, laid out as ``x``, and a fill."""

    def handler(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        out = _empty_like(args[0], kwargs)
        fill(fill_func, out, args[1:], kwargs.get("generator"))
        return out

    return handler


def _randint_like(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    bounds = args[1:] if "low" in func._overloadname else (0, *args[1:])
    out = _empty_like(args[0], kwargs)
    fill(getattr(aten.random_, "from"), out, bounds, kwargs.get("generator"))
    return out


def _bernoulli_p(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    out = torch.empty_like(args[0])
    fill(aten.bernoulli_.float, out, args[1:] or (kwargs["p"],), kwargs.get("generator"))
    return out


def _bernoulli(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    out = torch.empty_like(args[0])
    return _coins(func, out, args[0], kwargs.get("generator"))


def _bernoulli_(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    x, p = args[0], args[1] if len(args) > 1 else kwargs["p"]
    if isinstance(p, TorchDTensor) or (active() is not None and isinstance(p, torch.Tensor)):
        return _coins(func, x, p, kwargs.get("generator"))
    fill(func, x, (p,), kwargs.get("generator"))
    return x


def _coins(func: Any, x: torch.Tensor, p: Any, generator: Any) -> torch.Tensor:
    """Fill ``x`` with 1 where a uniform number is below ``p``, as torch does on the CPU."""
    placed = _placed(x)
    if _placed(p) != placed or (p.shape, p.stride()) != (x.shape, x.stride()):
        raise NotImplementedError(
            f"{func} on {placed} with probabilities of {_placed(p)}: both must "
            "have one shape, one order in memory and one placement; redistribute the probabilities."
        )
    local = _local(x)
    if local.is_meta:
        return x
    if local.device.type != "cpu" and not _replicated(x):
        raise NotImplementedError(
            f"{func} with a tensor of probabilities on {placed} of {local.device.type!r}: only the "
            "CPU's draws can be split; redistribute to Replicate first."
        )
    if _replicated(x):
        aten.bernoulli_.Tensor(local, p._local_tensor, generator=generator)
        return x
    wide = torch.float64 if p.dtype is torch.float64 else torch.float32
    uniform = torch.empty_like(x, dtype=wide)
    fill(aten.uniform_.default, uniform, (0.0, 1.0), generator)
    local.copy_(_local(uniform) < _local(p).to(wide))
    return x


def _native_dropout(func: Any, args: tuple, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout as one operator: on accelerators, and where it is called by this name."""
    named = dict(zip(("input", "p", "train"), args, strict=False), **kwargs)
    x, p, train = named["input"], named["p"], named["train"]
    mask = torch.empty_like(x, dtype=torch.bool)
    if train is False:
        _local(mask).fill_(True)
        return x.clone(), mask
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if _local(mask).device.type in ("cpu", "meta"):
        fill(aten.bernoulli_.float, mask, (1 - p,))
        scale = torch.tensor(scale, dtype=x.dtype).item()  # the CPU's operator rounds it first
    else:
        fill(_dropout_mask, mask, (p, x.dtype))
    return x * mask * scale, mask


def _dropout_mask(
    mask: torch.Tensor, p: float, dtype: torch.dtype, generator: torch.Generator | None = None
) -> None:
    """Fill ``mask`` with that of the fused operator on a tensor of ``dtype``, laid out alike."""
    ones = torch.ones_like(mask, dtype=dtype)
    mask.copy_(aten.native_dropout.default(ones, p, True)[1])


def _factory(fill_func: Any) -> Callable:
    """``rand(size)`` and its like, of a batch: an empty tensor, and a fill."""

    def handler(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        names = [argument.name for argument in func._schema.arguments]
        named = dict(zip(names, args, strict=False), **kwargs)
        bounds = (named.get("low", 0), named["high"]) if "high" in named else ()
        options = {name: named[name] for name in OPTIONS if named.get(name) is not None}
        if bounds:
            options.setdefault("dtype", torch.int64)
        out = torch.empty(named["size"], **options)
        fill(fill_func, out, bounds, named.get("generator"))
        return out

    return handler


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local_tensor if isinstance(x, TorchDTensor) else x


def _placed(x: torch.Tensor) -> tuple:
    return (x._spec.placements, x._spec.mesh) if isinstance(x, TorchDTensor) else ()


def _replicated(x: torch.Tensor) -> bool:
    if active() is not None or not isinstance(x, TorchDTensor):
        return False
    return all(placement.is_replicate() for placement in x._spec.placements)


def _empty_like(x: TorchDTensor, kwargs: dict) -> torch.Tensor:
    options = {name: kwargs[name] for name in OPTIONS if kwargs.get(name) is not None}
    return torch.empty_like(x, **options)


def _overloads(packet: Any, names: tuple[str, ...]) -> list:
    return [getattr(packet, name) for name in packet.overloads() if name in names]


HANDLERS = {
    **dict.fromkeys(
        (
            aten.bernoulli_.float,
            aten.cauchy_.default,
            aten.exponential_.default,
            aten.geometric_.default,
            aten.log_normal_.default,
            aten.normal_.default,
            aten.random_.default,
            getattr(aten.random_, "from"),
            aten.random_.to,
            aten.uniform_.default,
        ),
        _inplace,
    ),
    **dict.fromkeys(
        _overloads(aten.rand_like, ("default", "generator")), _like(aten.uniform_.default)
    ),
    **dict.fromkeys(
        _overloads(aten.randn_like, ("default", "generator")), _like(aten.normal_.default)
    ),
    **dict.fromkeys(
        _overloads(aten.randint_like, ("default", "generator", "low_dtype", "low_generator_dtype")),
        _randint_like,
    ),
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli_p,
    aten.bernoulli_.Tensor: _bernoulli_,
    aten.native_dropout.default: _native_dropout,
}

# Of plain tensors, which only a batch makes parts of anything.
FACTORIES = {
    **dict.fromkeys((aten.rand.default, aten.rand.generator), _factory(aten.uniform_.default)),
    **dict.fromkeys((aten.randn.default, aten.randn.generator), _factory(aten.normal_.default)),
    **dict.fromkeys(
        (
            aten.randint.default,
            aten.randint.generator,
            aten.randint.low,
            aten.randint.low_generator,
        ),
        _factory(getattr(aten.random_, "from")),
    ),
}
