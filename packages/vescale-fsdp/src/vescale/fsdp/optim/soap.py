# SPDX-License-Identifier: Apache-2.0
"""SOAP for sharded matrices: the state of each block lives on one rank, gradients travel to it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import Replicate
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from vescale.dtensor import DTensor, RaggedShard
from vescale.fsdp.arguments import check_bool
from vescale.fsdp.optim.blocks import RowBlock
from vescale.fsdp.optim.checks import (
    MATRICES,
    check_betas,
    check_given,
    check_grad,
    check_group,
    check_integer,
    check_number,
    check_params,
    check_placed,
    label_of,
)
from vescale.fsdp.optim.cuts import Cut, local_of, read_cut
from vescale.fsdp.optim.eigenbasis import SoapOptions, soap_update, state_shapes
from vescale.fsdp.optim.gather import BlockGather, Member, Transfer
from vescale.fsdp.optim.restoring import load_uncast
from vescale.fsdp.optim.roots import Matrix, Piece, RootPlan
from vescale.fsdp.optim.soap_blocks import (
    BLOCK_SIZE,
    FREQUENCY,
    bands_of,
    cut_into,
    matrix_of,
)

_WIRE_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


class SOAP(Optimizer):
    """Adam in the eigenbasis of each block's gradients (arXiv:2409.11321), exact when sharded.

    Parameters are matrices, or fused experts [experts, rows, cols], placed as ``Muon`` takes them.
    A matrix is divided into blocks of at most ``block_size`` rows and columns. A band of blocks,
    that is its rows, has one root, which holds the factors, bases and moments of its blocks. In a
    step gradients travel to the roots, and updates back, in rounds that overlap with computation as
    Muon's do. The result is that of one process, bit for bit, on any number of ranks.

    The first gradient of a parameter only makes the bases. These are refreshed after every
    ``precondition_frequency`` further ones, not all blocks in the same step. A parameter without
    gradient on some ranks gets zeros there; one without gradient on any is skipped. Replicas repeat
    the work. All ranks of a group must call ``step`` together.

    State of a parameter: ``step``, and six tensors for each block: plain for whole parameters, else
    DTensors that one rank owns; torch.distributed.checkpoint moves them to other roots. For an
    m x n block they have 2 (m^2 + n^2 + m n) elements: float32, or float64 if ``wire_dtype`` is.

    Args:
        params, lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``. Groups may override each
            of them, and ``shampoo_beta``, ``precondition_frequency`` and ``kl``.
        shampoo_beta: for the averages of the factors; None: the second of ``betas``.
        precondition_frequency: steps between refreshes of a basis.
        kl: weigh each factor by the inverse of the other (arXiv:2509.03378).
        block_size: at most so many rows and columns in a block.
        wire_dtype: of gradients and updates on the wire. bfloat16 halves the traffic, and rounds.
        max_inflight_bytes: the buffers of a step take at most twice as much, or three bands.

    Construction and ``add_param_group`` are collective.

    Raises:
        ValueError: an option is out of range, or a parameter is neither 2-D nor 3-D.
        NotImplementedError: a parameter has other placements.
        RuntimeError: the ranks' plans differ (on every rank).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        shampoo_beta: float | None = None,
        precondition_frequency: int = FREQUENCY,
        kl: bool = False,
        block_size: int = BLOCK_SIZE,
        wire_dtype: torch.dtype = torch.float32,
        max_inflight_bytes: int = 1 << 30,
    ) -> None:
        check_given(params, "SOAP", MATRICES)
        if wire_dtype not in _WIRE_DTYPES:
            raise ValueError(f"wire_dtype={wire_dtype}, expected one of {_WIRE_DTYPES}.")
        for name, value in (("block_size", block_size), ("max_inflight_bytes", max_inflight_bytes)):
            check_integer(name, value, 1)
        self._transfer = Transfer(wire_dtype, max_inflight_bytes, share_replicas=False)
        self._block_size = block_size
        self._gathers: list[BlockGather] | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "shampoo_beta": shampoo_beta,
            "precondition_frequency": precondition_frequency,
            "kl": kl,
        }
        _check_options(defaults)
        super().__init__(params, defaults)
        # Groups that were planned together: a copy must find the same roots.
        self._batches = [list(range(len(self.param_groups)))]
        self._replan()

    @property
    def plans(self) -> tuple[RootPlan, ...]:
        """The plan of each process group, in the order of its first parameter."""
        return tuple(gather.exchange.plan for gather in self._planned())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and plan anew; its parameters' state is made. Collective.

        The roots of the parameters before stay what they were.
        """
        check_group(param_group, "SOAP", MATRICES)
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:  # only now are the parameters a list, and the names beside it
            check_params(self.param_groups[index], index, "SOAP")
        except Exception:  # whatever it was: the optimizer stays as it has been
            self.param_groups.pop()
            raise
        if hasattr(self, "_batches"):
            gathers = self._planned()
            self._batches.append([index])
            gathers += self._plan([index])

    @torch.no_grad()
    def step(  # type: ignore[override]  # one signature for torch's two
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update every parameter once; collective over each parameter's process group."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathers, options = self._planned(), {}
        for index, group in enumerate(self.param_groups):
            for i, param in enumerate(group["params"]):
                check_grad(group, index, i)
                options[param] = group
        for gather in gathers:
            self._step_gathered(gather, options)
            for param in gather.params:
                del options[param]
        for param, group in options.items():  # this rank holds all of these
            if param.grad is not None:
                self._step_whole(param, group)
        increment_version([p for group in self.param_groups for p in group["params"]])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as any optimizer does, but never cast the state.

        Raises ValueError for state that lies elsewhere than on the roots of this optimizer:
        torch.distributed.checkpoint brings it there.
        """
        self._planned()
        labels = {
            param: label_of(group, index, i)
            for index, group in enumerate(self.param_groups)
            for i, param in enumerate(group["params"])
        }

        def restore(param: torch.Tensor, saved: dict[str, Any]) -> None:
            mine = self._new_state(param)
            if saved.keys() != mine.keys():
                raise ValueError(
                    f"{labels[param]}: the loaded state has {len(saved)} tensors, expected "
                    f"{len(mine)}; load with the block_size that it was saved with."
                )
            for name, value in mine.items():
                loaded = torch.as_tensor(saved[name])
                check_placed(loaded, value, f"{labels[param]}: {name}")
                local_of(value).copy_(local_of(loaded))
            self.state[param] = mine

        load_uncast(self, state_dict, restore)
        self._make_missing_state()

    def __getstate__(self) -> dict[str, Any]:
        names = ("_transfer", "_block_size", "_batches")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_gathers", None)  # a copy plans on first use

    def _planned(self) -> list[BlockGather]:
        if self._gathers is None:
            self._replan()
        return self._gathers  # type: ignore[return-value]  # made by now

    def _replan(self) -> None:
        self._bands: dict[torch.Tensor, tuple[RowBlock, ...]] = {}
        self._owners: dict[torch.Tensor, tuple[Cut, list[int]]] = {}  # of cut parameters
        self._gathers = []
        for indices in self._batches:
            self._gathers += self._plan(indices)

    def _plan(self, indices: Sequence[int]) -> list[BlockGather]:
        """Return the exchanges of some groups, and make the state that is not there yet."""
        cuts: dict[Any, list[Member]] = {}
        for index in indices:
            group = self.param_groups[index]
            for i, param in enumerate(group["params"]):
                bands = bands_of(param.shape, self._block_size)
                self._bands[param] = bands
                cut = read_cut(param, label_of(group, index, i)) if param.numel() else None
                if cut is not None:
                    member = Member(param, cut, bands, self._describer(group))
                    cuts.setdefault(cut.group, []).append(member)
        gathers = []
        for members in cuts.values():
            gather = BlockGather(members, self._transfer, "plan SOAP's exchange")
            gathers.append(gather)
            roots = iter(gather.exchange.plan.roots)
            for member in members:
                self._owners[member.param] = member.cut, [next(roots) for _ in member.blocks]
        self._make_missing_state()
        return gathers

    def _make_missing_state(self) -> None:
        for param in self._bands:
            if param not in self.state:
                self.state[param] = self._new_state(param)

    def _describer(
        self, group: Mapping[str, Any]
    ) -> Callable[[RowBlock, tuple[Piece, ...]], Matrix]:
        frequency, size = group["precondition_frequency"], self._block_size
        return lambda band, pieces: matrix_of(band, pieces, size, frequency)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.promote_types(self._transfer.dtype, torch.float32)

    def _blocks(self, bands: Sequence[RowBlock]) -> Iterator[tuple[int, str, tuple[int, int]]]:
        """Yield (number of the band, name of the state, its shape) for every block."""
        for number, band in enumerate(bands):
            for place, cols in enumerate(cut_into(band.cols, self._block_size)):
                for name, shape in state_shapes(band.rows, cols).items():
                    yield number, f"{number}.{place}.{name}", shape

    def _new_state(self, param: Any) -> dict[str, Any]:
        """Return zeros: plain tensors for a whole parameter, else DTensors on the roots."""
        state = {"step": torch.tensor(0.0)}
        cut, owners = self._owners.get(param, (None, ()))
        for number, name, shape in self._blocks(self._bands[param]):
            if cut is None:
                device = local_of(param).device
                state[name] = torch.zeros(shape, dtype=self._dtype, device=device)
                continue
            owner, ranks = owners[number], cut.group.size()
            placements: list = [Replicate()] * param.device_mesh.ndim
            units = [(0, owner), (1, 1), (0, ranks - 1 - owner)]
            placements[cut.axis] = RaggedShard.from_runs((), units)
            numel = shape[0] * shape[1] if cut.group.rank() == owner else 0
            local = torch.zeros(numel, dtype=self._dtype, device=cut.device)
            state[name] = DTensor.from_local(local, param.device_mesh, placements, shape=shape)
        return state

    def _update_band(
        self, param: torch.Tensor, band: int, grad: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the update of one band [rows, cols] on its root, and advance its blocks."""
        state, step = self.state[param], int(self.state[param]["step"])
        beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
        options = SoapOptions(tuple(group["betas"]), beta, group["eps"], group["kl"])
        update, rows, start = torch.empty_like(grad), grad.size(0), 0
        for place, cols in enumerate(cut_into(grad.size(1), self._block_size)):
            block = {
                name: local_of(state[f"{band}.{place}.{name}"]).view(shape)
                for name, shape in state_shapes(rows, cols).items()
            }
            part = grad.narrow(1, start, cols).contiguous()
            refresh = (step + band + place) % group["precondition_frequency"] == 0
            result = soap_update(part, block, options, step, refresh=refresh)
            update.narrow(1, start, cols).copy_(result)
            start += cols
        return update

    def _step_gathered(self, gather: BlockGather, options: Mapping) -> None:
        flags = gather.gradient_flags()
        wanted = [any(has) for has in zip(*flags, strict=True)]
        for param, has in zip(gather.params, wanted, strict=True):
            self.state[param]["step"] += has
        numbers = _numbers_in_params(gather.places)
        flats = [local_of(param).contiguous().view(-1) for param in gather.params]

        def pack(index: int, out: Any) -> None:
            number, piece = gather.local_piece(index)
            grad = gather.params[number].grad
            if grad is None:
                out.zero_()
            else:
                out.copy_(local_of(grad).reshape(-1).narrow(0, *piece))

        def solve(indices: Sequence[int], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            (index,), (grad,) = indices, grads
            number, block, _ = gather.places[index]
            param = gather.params[number]
            whole = grad.view(block.shape).to(self._dtype)
            return [self._update_band(param, numbers[index], whole, options[param])]

        def unpack(index: int, update: torch.Tensor) -> None:
            number, piece = gather.local_piece(index)
            _apply(flats[number].narrow(0, *piece), update, options[gather.params[number]])

        gather.exchange.run([wanted[number] for number, _, _ in gather.places], pack, solve, unpack)
        for param, flat in zip(gather.params, flats, strict=True):
            if not local_of(param).is_contiguous():
                local_of(param).copy_(flat.view(local_of(param).shape))

    def _step_whole(self, param: Any, group: Mapping[str, Any]) -> None:
        self.state[param]["step"] += 1
        weights, grad = (local_of(t).view(param.shape) for t in (param, param.grad))
        for number, band in enumerate(self._bands[param]):
            rows, part = (
                (t[band.expert] if t.ndim == 3 else t).narrow(0, band.first, band.rows)
                for t in (weights, grad)
            )
            sent = part.to(self._transfer.dtype).contiguous()  # as if it had travelled
            update = self._update_band(param, number, sent.to(self._dtype), group)
            _apply(rows, update.to(self._transfer.dtype), group)


def _apply(weights: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Decay and update ``weights`` in place, with the same bits wherever an element lies."""
    lr = float(group["lr"])
    wide = torch.promote_types(weights.dtype, update.dtype)
    result = weights.to(wide) * (1 - lr * group["weight_decay"])
    weights.copy_(result.sub_(update.to(weights.device, wide) * lr))


def _numbers_in_params(places: Sequence[tuple[int, RowBlock, int]]) -> list[int]:
    """Return for each matrix which one of its parameter's it is."""
    numbers: list[int] = []
    seen: dict[int, int] = {}
    for number, _, _ in places:
        numbers.append(seen.get(number, 0))
        seen[number] = numbers[-1] + 1
    return numbers


def _check_options(group: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, group[name])
    check_betas(group["betas"])
    beta = group["shampoo_beta"]
    if beta is not None:
        check_number("shampoo_beta", beta)
        if not beta < 1:
            raise ValueError(f"shampoo_beta={beta}, expected a number in [0, 1), or None.")
    check_integer("precondition_frequency", group["precondition_frequency"], 1)
    check_bool("kl", group["kl"])
