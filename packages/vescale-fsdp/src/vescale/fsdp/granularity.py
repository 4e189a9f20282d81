# SPDX-License-Identifier: Apache-2.0
"""How finely a tensor may be cut: ``Elements``, ``Rows``, ``Block``, ``Whole``.

A granularity says where a rank boundary may fall in a tensor's row-major memory. It looks at
integer shapes only, so that a layout can be planned without torch. All sizes are in elements.
"""

import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vescale.fsdp.lanes import AnyPlan

FORMS = "elements, rows, rows:N, block:DIMS:N, whole"


class Granularity:
    """Base of ``Elements``, ``Rows``, ``Block`` and ``Whole``: values, compared by their fields."""

    __slots__ = ()

    def dims(self, shape: Sequence[int], *, fqn: str = "") -> tuple[int, ...]:
        """Return the leading dims that the cut runs over: the ``dims`` of a RaggedShard.

        ``()`` means that the tensor is never cut; it is so for every 0-dim tensor. Raises
        ValueError, with ``fqn`` where it is given, if ``shape`` has too few dims.
        """
        raise NotImplementedError(f"{type(self).__name__} must define dims().")

    def block_numel(self, shape: Sequence[int], *, fqn: str = "") -> int:
        """Return the elements of one block, which no rank boundary cuts; at least 1.

        It may exceed the tensor's size, which then stays whole. Raises like ``dims``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define block_numel().")

    def unit_numel(self, shape: Sequence[int], *, fqn: str = "") -> int:
        """Return the elements of one unit of a RaggedShard over ``dims(shape)``; at least 1.

        A block is a whole number of units: ``n`` rows for ``Rows(n)``. Raises like ``dims``.
        """
        return max(1, math.prod(shape[len(self.dims(shape, fqn=fqn)) :]))


@dataclass(frozen=True, slots=True)
class Elements(Granularity):
    """Cut anywhere: no padding but the alignment of the shards."""

    def dims(self, shape: Sequence[int], *, fqn: str = "") -> tuple[int, ...]:
        return tuple(range(len(shape)))

    def block_numel(self, shape: Sequence[int], *, fqn: str = "") -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Whole(Granularity):
    """Never cut: one rank owns the tensor."""

    def dims(self, shape: Sequence[int], *, fqn: str = "") -> tuple[int, ...]:
        return ()

    def block_numel(self, shape: Sequence[int], *, fqn: str = "") -> int:
        return max(1, math.prod(shape))


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Block(Granularity):
    """Cut between blocks of ``n`` units of the first ``dims`` dims, flattened.

    Of fused experts [experts, out, in], ``Block(2, 128)`` keeps 128 rows of the matrix
    [experts * out, in] together. Only the last block of a tensor may be short.
    """

    leading: int
    n: int

    def __init__(self, dims: int, n: int) -> None:
        object.__setattr__(self, "leading", _positive(dims, "Block", "dims"))
        object.__setattr__(self, "n", _positive(n, type(self).__name__, "n"))

    def dims(self, shape: Sequence[int], *, fqn: str = "") -> tuple[int, ...]:
        if not shape:
            return ()
        if len(shape) < self.leading:
            where = f"{fqn}: " if fqn else ""
            raise ValueError(
                f"{where}{self} needs a tensor of at least {self.leading} dims, got shape "
                f"{tuple(shape)}; use Rows({self.n}) or fewer dims for this tensor."
            )
        return tuple(range(self.leading))

    def block_numel(self, shape: Sequence[int], *, fqn: str = "") -> int:
        return self.n * self.unit_numel(shape, fqn=fqn) if shape else 1

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Block):
            return NotImplemented
        return (self.leading, self.n) == (other.leading, other.n)

    def __hash__(self) -> int:
        return hash((self.leading, self.n))

    def __repr__(self) -> str:
        return f"Block(dims={self.leading}, n={self.n})"


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class Rows(Block):
    """Cut between blocks of ``n`` rows (indices of dim 0): the same as ``Block(1, n)``."""

    def __init__(self, n: int = 1) -> None:
        Block.__init__(self, 1, n)

    def __repr__(self) -> str:
        return f"Rows(n={self.n})"


def default_granularity(shape: Sequence[int]) -> Granularity:
    """Return ``Rows(1)``; ``Elements()`` for fewer than two dims, ``Block(2, 1)`` for more.

    The latter cuts fused experts between any two of their rows: whole experts would pad a world of
    more ranks than experts many times over.
    """
    if len(shape) < 2:
        return Elements()
    return Rows(1) if len(shape) == 2 else Block(2, 1)


def resolve_granularity(
    granularity: Granularity | Callable[[str, Any], Granularity] | None, fqn: str, param: Any
) -> Granularity:
    """Return the granularity of the parameter ``fqn``; ``param`` needs a ``shape`` only.

    None is the default. A plain granularity is for tensors of two dims and more, and 1-D and 0-D
    ones stay ``Elements()``; ``Whole()`` is for all. What a callable ``(fqn, param)`` returns is
    taken as it is. Raises TypeError for anything else, ValueError where the shape does not fit.
    """
    shape = tuple(param.shape)
    if granularity is None:
        return default_granularity(shape)
    if isinstance(granularity, Granularity):
        chosen = granularity
        if len(shape) < 2 and not isinstance(chosen, Whole):
            chosen = Elements()
    elif callable(granularity) and not isinstance(granularity, type):
        _check_signature(granularity, fqn, param)
        chosen = granularity(fqn, param)
        if not isinstance(chosen, Granularity):
            raise TypeError(
                f"{fqn}: the granularity function returned {chosen!r}, expected Elements(), "
                "Rows(n), Block(dims, n) or Whole(), such as default_granularity(param.shape)."
            )
    else:
        raise TypeError(
            f"{fqn}: granularity={granularity!r} is neither a granularity nor a function "
            "(fqn, param) -> granularity; pass for example Rows(32), an instance."
        )
    chosen.dims(shape, fqn=fqn)
    return chosen


def _check_signature(function: Callable[..., Any], fqn: str, param: Any) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    try:
        signature.bind(fqn, param)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{fqn}: the granularity function {name}{signature} cannot be called with (fqn, "
            f"param): {error}; expected a function of a parameter's name and the parameter that "
            "returns a granularity, such as lambda fqn, param: Rows(32)."
        ) from error


def parse_granularity(text: str) -> Granularity:
    """Return the granularity that a command line names: one of the forms in ``FORMS``."""
    kind, *fields = text.strip().lower().split(":")
    makers = {
        ("elements", 0): Elements,
        ("whole", 0): Whole,
        ("rows", 0): Rows,
        ("rows", 1): Rows,
        ("block", 2): Block,
    }
    maker = makers.get((kind, len(fields)))
    if maker is None or not all(field.isdecimal() and int(field) > 0 for field in fields):
        raise ValueError(
            f"granularity {text!r} is not understood; use one of {FORMS}, with positive integers."
        )
    return maker(*map(int, fields))


def unit_runs(plan: AnyPlan, index: int, unit_numel: int) -> tuple[tuple[int, int], ...]:
    """Return the RaggedShard ``runs`` of tensor ``index``: units per rank over their gcd.

    At most five pairs ``(units, ranks)`` with a positive sum of units; an empty tensor gets one
    unit on rank 0, which owns nothing. ``unit_numel`` is that of the tensor's granularity. Raises
    ValueError if a rank holds no whole number of units.
    """
    runs = plan.shard_runs(index)
    sizes = {size for size, _ in runs if size}
    if not sizes:
        return ((1, 1), (0, plan.world_size - 1))
    if any(size % unit_numel for size in sizes):
        raise ValueError(
            f"{plan.requests[index].fqn}: unit_numel={unit_numel} does not divide its shards of "
            f"{sorted(sizes)} elements; pass the unit of the granularity that was planned with."
        )
    divisor = math.gcd(*sizes)
    return tuple((size // divisor, ranks) for size, ranks in runs)


def _positive(value: int, owner: str, name: str) -> int:
    try:
        if isinstance(value, bool):  # True is no count, though Python would take it for 1
            raise TypeError
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name}={value!r} is no integer; pass a count.") from None
    if value < 1:
        raise ValueError(f"{owner}: {name}={value} must be at least 1.")
    return value
