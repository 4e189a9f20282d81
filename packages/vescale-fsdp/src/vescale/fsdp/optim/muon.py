# SPDX-License-Identifier: Apache-2.0
"""Muon for sharded matrices: gather each one to one owner, orthogonalize there, return the pieces.

Bitwise equal to ``torch.optim.Muon`` on the unsharded parameters. Casting to bfloat16 before the
matrix travels changes nothing, since Newton-Schulz begins and ends in bfloat16.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vescale.fsdp.arguments import check_bool
from vescale.fsdp.optim.blocks import MatrixSplit, RowBlock, row_blocks
from vescale.fsdp.optim.checks import (
    MATRICES,
    check_function,
    check_given,
    check_grad,
    check_group,
    check_integer,
    check_ns_options,
    check_options,
    check_params,
    check_same_layout,
    label_of,
)
from vescale.fsdp.optim.cuts import local_of, read_cut
from vescale.fsdp.optim.gather import Member
from vescale.fsdp.optim.muon_gather import ParamGather, mix
from vescale.fsdp.optim.newton_schulz import DEFAULT_COEFFICIENTS, Coefficients
from vescale.fsdp.optim.restoring import load_uncast
from vescale.fsdp.optim.roots import Matrix, Piece, RootPlan
from vescale.fsdp.optim.solver import NewtonSchulz, Solver
from vescale.fsdp.optim.update import narrow, scales

BUFFER = "momentum_buffer"
OWN_OPTIONS = ("wire_dtype", "matrix_split", "max_inflight_bytes", "batched_ns", "ns_fn")
_WIRE_DTYPES = (torch.bfloat16, torch.float32)


class Muon(Optimizer):
    """Drop-in for ``torch.optim.Muon`` that also takes sharded parameters, exactly.

    Parameters are matrices [rows, cols], or fused experts [experts, rows, cols], each a matrix:
    plain tensors, or DTensors with RaggedShard or Shard(0) on one mesh axis and Replicate on the
    others. A step updates the momentum where it lies, sends each cut matrix to one rank, its root,
    and the result back: two all-to-alls for each round, a round being one or a few matrices per
    rank. A round travels while the one before is computed. With every matrix whole on some rank
    nothing is communicated. On the first mesh axis that replicates over several ranks the replicas
    share the work, and send each other the results; other replicas repeat it. All ranks of a group
    must call ``step`` together. Traffic: the elements moved times ``wire_dtype``'s size, each way,
    and one byte for each parameter and pair of ranks.

    A matrix without gradient on some of its holders gets zeros there; one without gradient on any
    is skipped, momentum and weight decay included. Replicas must agree on that. A frozen parameter
    is skipped too, but its memory still travels: better leave it out.

    State: ``momentum_buffer``, created at once, in the parameter's placement and in the dtype of
    its gradient: ``grad_dtype`` where that is set, else its own. Gradients are cast to it.

    Args:
        params, lr, weight_decay, momentum, nesterov, eps, ns_steps, adjust_lr_fn: as in
            ``torch.optim.Muon``. Groups may override each of them.
        ns_coefficients: (a, b, c) of the iteration, or a list with one triple for each step.
        wire_dtype: dtype of the matrices on the wire and in ``ns_fn``: bfloat16 or float32. With
            the default ``ns_fn`` both give the same bits, at half or full traffic.
        ns_fn: ``ns_fn(matrix, ns_coefficients, ns_steps, eps)`` returns the orthogonalized
            ``matrix`` [rows, cols], and leaves its argument alone; default: ``newton_schulz``.
        matrix_split: ``matrix_split(fqn, shape)`` returns the row counts of the matrices that a
            parameter consists of, such as heads, or queries, keys and values; None for one. Each is
            orthogonalized, and its learning rate adjusted, by itself. Needs named parameters.
        max_inflight_bytes: the buffers of a step take at most twice as much, or what three
            matrices take. Less memory means more rounds.
        batched_ns: solve equal matrices of a round at once. Faster for many small ones on a GPU,
            and equal to one by one up to rounding only.

    Construction and ``add_param_group`` are collective: ranks compare their plans in one small
    all-gather for each process group.

    Raises:
        ValueError: an option is out of range, or a parameter is neither 2-D nor 3-D.
        NotImplementedError: a parameter has other placements.
        RuntimeError: the ranks' plans differ (on every rank).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = DEFAULT_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        wire_dtype: torch.dtype = torch.bfloat16,
        matrix_split: MatrixSplit | None = None,
        max_inflight_bytes: int = 1 << 30,
        batched_ns: bool = False,
        ns_fn: NewtonSchulz | None = None,
    ) -> None:
        check_given(params, "Muon", MATRICES)
        if wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype={wire_dtype}, expected torch.bfloat16 or torch.float32; anything "
                "narrower would change the result, and Newton-Schulz uses nothing wider."
            )
        if batched_ns and ns_fn is not None:
            raise ValueError("batched_ns=True has no use for ns_fn, which takes one matrix.")
        check_integer("max_inflight_bytes", max_inflight_bytes, 1)
        check_bool("batched_ns", batched_ns)
        check_function("ns_fn", ns_fn, "(matrix, ns_coefficients, ns_steps, eps)")
        check_function("matrix_split", matrix_split, "(fqn, shape)")
        self._wire_dtype, self._ns_fn, self._matrix_split = wire_dtype, ns_fn, matrix_split
        self._max_inflight_bytes, self._batched_ns = max_inflight_bytes, batched_ns
        self._gathers: list[ParamGather] | None = None
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        check_options(defaults)
        super().__init__(params, defaults)
        self._replan()

    @property
    def plans(self) -> tuple[RootPlan, ...]:
        """The plan of each process group, in the order of its first parameter: roots, loads,
        elements moved."""
        return tuple(gather.exchange.plan for gather in self._planned())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and plan anew; collective once the optimizer is constructed."""
        check_group(param_group, "Muon", MATRICES)
        for option in OWN_OPTIONS:
            if option in param_group:
                raise ValueError(
                    f"{option} is one choice for all groups; pass it to Muon(), not in a group."
                )
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:  # only now are the parameters a list, and the names beside it
            check_params(self.param_groups[-1], len(self.param_groups) - 1, "Muon")
            self._blocks_of(self.param_groups[-1])
        except Exception:  # whatever it was: the optimizer stays as it has been
            self.param_groups.pop()
            raise
        for param in self.param_groups[-1]["params"]:
            self._momentum(param)
        if self._gathers is not None:
            self._replan()

    @torch.no_grad()
    def step(  # type: ignore[override]  # one signature for torch's two
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter once; collective over each parameter's process group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathers = self._planned()
        options = {}
        for index, group in enumerate(self.param_groups):
            check_ns_options(group)
            for i, param in enumerate(group["params"]):
                check_grad(group, index, i)
                options[param] = group
        for gather in gathers:
            gather.step(options, self._momentum)
            for param in gather.params:
                del options[param]
        for param, group in options.items():  # this rank holds all of these
            if param.grad is not None:
                self._update_whole(param, group)
        # The updates went to local parts. Every rank counts them alike, whatever it holds.
        increment_version([p for group in self.param_groups for p in group["params"]])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as any optimizer does, but keep the momentum's saved dtype.

        The base class would cast it to the parameter's. A parameter that the state dict knows
        nothing of starts from zero momentum, as in a new optimizer.

        Raises ValueError when a saved buffer has another shape or placement than its parameter.
        """

        def restore(param: torch.Tensor, saved: dict[str, Any]) -> None:
            if BUFFER in saved:
                self.state[param][BUFFER] = saved[BUFFER].to(device=param.device)

        load_uncast(self, state_dict, restore)
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                check_same_layout(self._momentum(param), BUFFER, group, index, i)

    def __getstate__(self) -> dict[str, Any]:
        own = {f"_{option}": getattr(self, f"_{option}") for option in OWN_OPTIONS}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_gathers", None)  # a copy plans on first use

    def _planned(self) -> list[ParamGather]:
        if self._gathers is None:
            self._replan()
        return self._gathers  # type: ignore[return-value]  # made by now

    def _replan(self) -> None:
        cuts: dict[Any, list[Member]] = {}
        self._blocks: dict[torch.Tensor, tuple[RowBlock, ...]] = {}
        for index, group in enumerate(self.param_groups):
            self._blocks |= self._blocks_of(group)
            for i, param in enumerate(group["params"]):
                cut = read_cut(param, label_of(group, index, i)) if param.numel() else None
                if cut is not None:
                    member = Member(param, cut, self._blocks[param], _matrix_of(group))
                    cuts.setdefault((cut.group, cut.replica_group), []).append(member)
        self._gathers = [
            ParamGather(members, self._solver, self._max_inflight_bytes)
            for members in cuts.values()
        ]

    def _blocks_of(self, group: Mapping[str, Any]) -> dict[torch.Tensor, tuple[RowBlock, ...]]:
        """Return the matrices of each parameter of a group."""
        split, names = self._matrix_split, group.get("param_names")
        if split is not None and names is None:
            raise ValueError(
                "matrix_split goes by names, but a group has none; pass named parameters, such as "
                "[(fqn, parameter), ...] or those of split_params(model, named=True)."
            )
        names = names or [None] * len(group["params"])
        pairs = zip(group["params"], names, strict=True)
        return {param: row_blocks(param.shape, split, name) for param, name in pairs}

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if BUFFER not in state:
            dtype = getattr(param, "grad_dtype", None) or param.dtype
            state[BUFFER] = torch.zeros_like(
                param, dtype=dtype, memory_format=torch.preserve_format
            ).detach()
        return state[BUFFER]

    @property
    def _solver(self) -> Solver:
        return Solver(self._wire_dtype, self._batched_ns, self._ns_fn)

    def _update_whole(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        # Views: the local part of a ragged tensor is flat even over one rank. Strides as in torch.
        weights = local_of(param).view(param.shape)
        grad = local_of(param.grad)  # type: ignore[arg-type]  # it has one
        mixed = mix(local_of(self._momentum(param)), grad, group).view(param.shape)
        blocks = self._blocks[param]
        matrices = [_rows_of(mixed, block).to(self._wire_dtype) for block in blocks]
        updates = self._solver(matrices, [group] * len(blocks))
        for block, update in zip(blocks, updates, strict=True):
            rows = _rows_of(weights, block)
            decay, alpha = scales(block.shape, group)
            rows.mul_(decay)
            rows.add_(narrow(update, rows), alpha=alpha)


def _matrix_of(group: Mapping[str, Any]) -> Callable[[RowBlock, tuple[Piece, ...]], Matrix]:
    steps = group["ns_steps"]
    return lambda block, pieces: Matrix(*block.shape, pieces, steps)


def _rows_of(whole: torch.Tensor, block: RowBlock) -> torch.Tensor:
    matrix = whole[block.expert] if whole.ndim == 3 else whole
    return matrix.narrow(0, block.first, block.rows)
