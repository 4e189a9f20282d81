# SPDX-License-Identifier: Apache-2.0
"""The granularity that suits an optimizer, for ``fully_shard(granularity=...)``."""

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from vescale.fsdp.granularity import Granularity, Rows, default_granularity
from vescale.fsdp.tiles import Tiling, deserves_blocks

KINDS = ("adamw", "muon", "adamw8bit", "soap")
TILE = (32, 32)

Patterns = str | Sequence[str]


def granularity_for(
    kind: str,
    *,
    heads: Mapping[str, int] | None = None,
    experts: Patterns | None = None,
) -> Callable[[str, Any], Granularity]:
    """Return a function ``(fqn, param) -> Granularity`` for parameters that ``kind`` optimizes.

    ``"adamw"``, ``"muon"`` and ``"soap"`` take any cut, so they keep the default, which costs no
    padding. ``"adamw8bit"`` keeps tiles of 32 x 32 whole where its state is 8-bit: ``Rows(32)``
    for matrices, ``Block(2, 32)`` for fused experts. Capitals do not matter.

    Args:
        heads: patterns of FQNs, such as ``"*.q_proj.weight"``, and the rows of one head. Heads are
            then kept whole: with ``matrix_split`` into the same rows, Muon sends nothing of them.
        experts: patterns of FQNs of fused experts [experts, out, in]. The matrix of an expert is
            kept whole: Muon sends nothing of it. With more ranks than experts this costs padding.

    Where both an optimizer and a pattern ask for something, the least common multiple serves both.
    Patterns are shell-style, case-sensitive; the first that matches counts.

    Raises TypeError for patterns that are none, ValueError for another ``kind``, rows that are no
    positive integers, and, when the function is called, for a parameter that a pattern does not
    fit.
    """
    known = kind.lower() if isinstance(kind, str) else kind
    if known not in KINDS:
        raise ValueError(
            f"kind={kind!r}, expected the name of an optimizer, one of {', '.join(KINDS)}; for "
            "others that work element by element pass 'adamw'."
        )
    kind = known
    if heads is not None and not isinstance(heads, Mapping):
        raise TypeError(
            f"heads={heads!r} is a {type(heads).__name__}, expected patterns of names with the "
            "rows of one head; pass for example {'*.q_proj.weight': 128}."
        )
    heads, experts = dict(heads or {}), _listed(experts)
    for pattern, rows in heads.items():
        if type(rows) is not int or rows < 1:
            raise ValueError(f"heads[{pattern!r}]={rows!r}, expected the rows of one head.")

    def choose(fqn: str, param: Any) -> Granularity:
        shape = tuple(param.shape)
        rows = next((n for pattern, n in heads.items() if fnmatchcase(fqn, pattern)), None)
        if rows is not None:
            _check_heads(fqn, shape, rows)
            return _whole_heads(kind, shape, rows)
        if any(fnmatchcase(fqn, pattern) for pattern in experts):
            _check_experts(fqn, shape)
            return _whole_experts(kind, shape)
        if kind == "adamw8bit" and deserves_blocks(shape):
            return Tiling(shape, TILE).granularity
        return default_granularity(shape)

    return choose


def _whole_heads(kind: str, shape: tuple[int, ...], rows: int) -> Granularity:
    if kind == "adamw8bit" and deserves_blocks(shape):
        rows = math.lcm(rows, TILE[0])
    return Rows(rows)


def _whole_experts(kind: str, shape: tuple[int, ...]) -> Granularity:
    """Return the fewest whole experts that are whole tiles too, where that matters."""
    if kind != "adamw8bit" or not deserves_blocks(shape):
        return Rows(1)
    tiling = Tiling(shape, TILE)
    expert = math.prod(shape[1:])
    return Rows(math.lcm(expert, tiling.band_numel) // expert)


def _check_heads(fqn: str, shape: tuple[int, ...], rows: int) -> None:
    if len(shape) != 2 or shape[0] % rows:
        raise ValueError(
            f"{fqn} has shape {shape}, but heads of {rows} rows need two dims and a multiple of "
            f"{rows} rows; correct heads=, or narrow its pattern."
        )


def _check_experts(fqn: str, shape: tuple[int, ...]) -> None:
    if len(shape) < 3:
        raise ValueError(
            f"{fqn} has shape {shape}, expected fused experts [experts, out, in]; narrow the "
            "pattern of experts=, or use Rows(n) with the rows of one expert."
        )


def _listed(patterns: Patterns | None) -> tuple[str, ...]:
    if patterns is None:
        return ()
    listed = (patterns,) if isinstance(patterns, str) else patterns
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        raise TypeError(
            f"experts={patterns!r}, expected a pattern of names or a list of them; pass for "
            "example '*.experts.*'."
        )
    return tuple(listed)
