# SPDX-License-Identifier: Apache-2.0
"""Muon for sharded matrices: gather each one to one owner, orthogonalize there, return the pieces.

Bitwise equal to ``torch.optim.Muon`` on the unsharded parameters. Casting to bfloat16 before the
matrix travels changes nothing, since Newton-Schulz begins and ends in bfloat16.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.dtensor.runs import locate
from vescale.fsdp.agreement import agree
from vescale.fsdp.optim.checks import (
    check_grad,
    check_ns_options,
    check_options,
    check_params,
    check_same_layout,
    label_of,
)
from vescale.fsdp.optim.cuts import Cut, read_cut
from vescale.fsdp.optim.exchange import OwnerGather
from vescale.fsdp.optim.newton_schulz import (
    DEFAULT_COEFFICIENTS,
    Coefficients,
    newton_schulz,
)
from vescale.fsdp.optim.restoring import load_uncast
from vescale.fsdp.optim.roots import Matrix, Piece, RootPlan, plan_roots
from vescale.fsdp.optim.update import add_as_whole, narrow, scales

BUFFER = "momentum_buffer"
_WIRE_DTYPES = (torch.bfloat16, torch.float32)

NewtonSchulz = Callable[[torch.Tensor, Coefficients, int, float], torch.Tensor]


class Muon(Optimizer):
    """Drop-in for ``torch.optim.Muon`` that also takes sharded parameters, exactly.

    Parameters are 2-D: plain tensors, or DTensors with RaggedShard or Shard(0) on one mesh axis and
    Replicate on the others (each replica then repeats the work). A step updates the momentum where
    it lies, sends all matrices of a process group to their roots in one all-to-all, and the results
    back in a second one; with every matrix whole on some rank it communicates nothing. All ranks of
    a group must call ``step`` together. Traffic: the elements moved times ``wire_dtype``'s size,
    each way, plus one element for each piece moved.

    A parameter without gradient on some ranks gets zeros there; one without gradient on any rank is
    skipped, momentum and weight decay included. A whole parameter follows its holder's gradient. A
    frozen parameter is skipped too, but its memory still travels: better leave it out.

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

    Construction and ``add_param_group`` are collective: ranks compare their plans in one small
    all-gather for each process group.

    Raises:
        ValueError: an option is out of range, or a parameter is not 2-D.
        NotImplementedError: a parameter has other placements.
        RuntimeError: the ranks' plans differ (on every rank).
    """

    def __init__(
        self,
        params,
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
        ns_fn: NewtonSchulz | None = None,
    ) -> None:
        if wire_dtype not in _WIRE_DTYPES:
            raise ValueError(
                f"wire_dtype={wire_dtype}, expected torch.bfloat16 or torch.float32; anything "
                "narrower would change the result, and Newton-Schulz uses nothing wider."
            )
        self._wire_dtype, self._ns_fn = wire_dtype, ns_fn
        self._gathers: list[_ParamGather] | None = None
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
        for option in ("wire_dtype", "ns_fn"):
            if option in param_group:
                raise ValueError(
                    f"{option} is one choice for all groups; pass it to Muon(), not in a group."
                )
        check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:  # only now are the parameters a list, and the names beside it
            check_params(self.param_groups[-1], len(self.param_groups) - 1)
        except Exception:  # whatever it was: the optimizer stays as it has been
            self.param_groups.pop()
            raise
        for param in self.param_groups[-1]["params"]:
            self._momentum(param)
        if self._gathers is not None:
            self._replan()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
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
            gather.step(self, options)
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
        own = {"_wire_dtype": self._wire_dtype, "_ns_fn": self._ns_fn}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_gathers", None)  # a copy plans on first use

    def _planned(self) -> list["_ParamGather"]:
        if self._gathers is None:
            self._replan()
        return self._gathers

    def _replan(self) -> None:
        cuts: dict[Any, list[tuple[torch.Tensor, Cut, int]]] = {}
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                cut = read_cut(param, label_of(group, index, i)) if param.numel() else None
                if cut is not None:
                    cuts.setdefault(cut.group, []).append((param, cut, group["ns_steps"]))
        self._gathers = [_ParamGather(members, self._wire_dtype) for members in cuts.values()]

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        if BUFFER not in state:
            dtype = getattr(param, "grad_dtype", None) or param.dtype
            state[BUFFER] = torch.zeros_like(
                param, dtype=dtype, memory_format=torch.preserve_format
            ).detach()
        return state[BUFFER]

    def _mix(self, param: torch.Tensor, group: Mapping[str, Any], *, keep: bool) -> torch.Tensor:
        """Return the matrix to orthogonalize, shaped like the local shard; may be the momentum.

        ``keep`` stores the new momentum. A missing gradient counts as zeros.
        """
        buffer = _local(self._momentum(param))
        if param.grad is None:
            grad = torch.zeros_like(buffer)
        else:
            grad = _local(param.grad).to(buffer.dtype)
        weight = 1 - group["momentum"]
        mixed = buffer.lerp_(grad, weight) if keep else buffer.lerp(grad, weight)
        return grad.lerp(mixed, group["momentum"]) if group["nesterov"] else mixed

    def _orthogonalize(self, matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        ns_fn = self._ns_fn or newton_schulz
        result = ns_fn(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        if result.shape != matrix.shape:
            raise ValueError(
                f"ns_fn returned shape {tuple(result.shape)} for a matrix of shape "
                f"{tuple(matrix.shape)}; it must return the same shape."
            )
        return result.to(self._wire_dtype)

    def _update_whole(self, param: torch.Tensor, group: Mapping[str, Any]) -> None:
        # Views: the local part of a ragged tensor is flat even over one rank. Strides as in torch.
        weights = _local(param).view(param.shape)
        matrix = self._mix(param, group, keep=True).view(param.shape).to(self._wire_dtype)
        update = self._orthogonalize(matrix, group)
        decay, alpha = scales(param, group)
        weights.mul_(decay)
        weights.add_(narrow(update, weights), alpha=alpha)


class _ParamGather:
    """The cut parameters of one process group, and the exchange of their matrices."""

    def __init__(
        self, members: list[tuple[torch.Tensor, Cut, int]], wire_dtype: torch.dtype
    ) -> None:
        self.params = [param for param, _, _ in members]
        first = members[0][1]
        self._starts = []
        matrices = []
        for param, cut, ns_steps in members:
            before, _ = locate(cut.runs, first.group.rank())
            self._starts.append(before)
            matrices.append(Matrix(*param.shape, tuple(_pieces(cut)), ns_steps))
        plan = plan_roots(matrices, first.group.size())
        description = f"{wire_dtype} on the wire\n{plan.describe()}"
        agree(first.group, first.device, "plan Muon's exchange", description)
        self.exchange = OwnerGather(plan, first.group, dtype=wire_dtype, device=first.device)

    def step(self, muon: Muon, options: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        def pack(index: int, out: torch.Tensor) -> bool:
            param = self.params[index]
            wanted = param.grad is not None
            # Without a gradient here this is a guess: the momentum is kept only once the answer
            # shows that another rank has one.
            mixed = muon._mix(param, options[param], keep=wanted)
            out.copy_(mixed.reshape(-1))
            return wanted

        def solve(index: int, flat: torch.Tensor) -> torch.Tensor:
            param = self.params[index]
            return muon._orthogonalize(flat.view(param.shape), options[param])

        def unpack(index: int, piece: torch.Tensor) -> None:
            param = self.params[index]
            if param.grad is None:
                muon._mix(param, options[param], keep=True)
            local = _local(param)
            decay, alpha = scales(param, options[param])
            local.mul_(decay)
            update = narrow(piece, local).to(local.device).view(local.shape)
            add_as_whole(local, update, alpha, self._starts[index], param.shape)

        self.exchange.run(pack, solve, unpack)


def _pieces(cut: Cut) -> Iterator[Piece]:
    """Yield what each rank holds, without the ranks that hold nothing."""
    rank = start = 0
    for numel, ranks in cut.runs:
        if numel:
            for index in range(ranks):
                yield Piece(rank + index, start + index * numel, numel)
        rank, start = rank + ranks, start + ranks * numel


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
