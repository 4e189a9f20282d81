# SPDX-License-Identifier: Apache-2.0
"""``VESCALE_DEVICE_MESH``: the process-wide mesh of the old API, over torch's ``DeviceMesh``.

Meshes are stock ones, so any torch API takes them; this file only remembers one of them and
answers in the old names. Axes are called ``dim`` here because the old keywords are.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale.legacy._errors import LegacyStateError, LegacyValueError
from vescale.legacy._torch_compat import mesh_without_groups

__all__ = ["VESCALE_DEVICE_MESH", "VeDeviceMesh"]

PP, DP, TP = "PP", "DP", "TP"
STRATEGIES = (PP, DP, TP)
DEVICE_TYPES = ("cuda", "cpu", "meta")
RANKS_PER_HOST_WITHOUT_DEVICES = 8  # what the old API assumed where it could not count


class VeDeviceMesh:
    """Hold the current mesh, and answer for each strategy: pipeline, data and tensor parallel.

    Names may be anything, but a method about a strategy or a stage looks for the axes PP, DP
    and TP and raises ``ValueError`` on a mesh with other names, unless its own text says that
    it goes by position. Before ``init_device_mesh`` every method but ``get(**kwargs)`` raises
    ``RuntimeError``. Both errors are ``AssertionError`` too, as in the old API.
    """

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None

    def init_device_mesh(
        self,
        device_type: str,
        mesh_shape: Sequence[int],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        check_uniqueness: bool = False,
    ) -> DeviceMesh:
        """Create the mesh, row-major over the ranks, and make it the current one.

        Collective, and starts the default process group when there is none, as torch's does.
        ``mesh_shape`` has 1 to 3 axes; default names are the last of PP, DP, TP. A mesh made
        before is replaced, or with ``check_uniqueness`` a ``ValueError``. ``RuntimeError`` (from
        torch): repeated names, one name too many or too few, more ranks than the world has.
        """
        if check_uniqueness and self._mesh is not None:
            raise ValueError(
                f"the mesh is already {self._mesh}; call get() for it, or leave "
                "check_uniqueness=False to replace it."
            )
        shape = _checked_shape(mesh_shape)
        names = STRATEGIES[-len(shape) :] if mesh_dim_names is None else tuple(mesh_dim_names)
        self._mesh = init_device_mesh(_device_type(device_type), shape, mesh_dim_names=names)
        return self._mesh

    def get(self, **kwargs: Any) -> DeviceMesh:
        """Return the current mesh; without one, create it with ``init_device_mesh(**kwargs)``.

        Keywords are ignored when there is a mesh already.
        """
        if self._mesh is None and kwargs:
            return self.init_device_mesh(**kwargs)
        return self._current()

    def __getitem__(self, name: str | tuple[str, ...]) -> DeviceMesh:
        """Return the child mesh along ``name`` that holds this rank; unknown name: ``KeyError``."""
        return self._current()[name]

    # The mesh as it is.

    @property
    def ndim(self) -> int:
        """How many axes the mesh has."""
        return self._current().ndim

    @property
    def shape(self) -> list[int]:
        """How many ranks each axis has."""
        return list(self._current().shape)

    def size(self, dim: int | None = None) -> int:
        """Return how many ranks the mesh has, or its axis ``dim``."""
        return self._current().size(dim)

    def get_coordinate(self) -> list[int] | None:
        """Return this rank's place on every axis; None when the mesh does not hold it."""
        coordinate = self._current().get_coordinate()
        return None if coordinate is None else list(coordinate)

    @property
    def _MESH_DIM_NAMES_MAPPING(self) -> dict[int, str]:
        return dict(enumerate(self._names())) if self._mesh is not None else {}

    @property
    def _MESH_DIM_NAMES_LOOKUP(self) -> dict[str, int]:
        return {name: index for index, name in self._MESH_DIM_NAMES_MAPPING.items()}

    # Coordinates.

    def get_strategy_coordinate(self, local_rank: int | None = None) -> list[int]:
        """Return the place on every axis of this rank, or of the global rank ``local_rank``."""
        mesh = self._current()
        rank = dist.get_rank() if local_rank is None else local_rank
        place = (mesh.mesh == rank).nonzero()
        if not len(place):
            raise LegacyValueError(
                f"rank {rank} is not on {mesh}, which holds {mesh.mesh.flatten().tolist()}."
            )
        return place[0].tolist()

    def lookup_rank(self, dim: int | str) -> int:
        """Return this rank's place on one axis, given by index or name."""
        return self.get_strategy_coordinate()[self._index(dim)]

    def get_strategy_size(self, dim: int | str) -> int:
        """Return how many ranks one axis has, given by index or name."""
        return self._current().size(self._index(dim))

    def get_local_rank(self) -> int:
        """Return this rank's number within its host: the rank modulo devices per host.

        Where the device type has no devices to count (cpu, meta), a host has 8.
        """
        device_type = self._current().device_type
        count = torch.cuda.device_count() if device_type == "cuda" else 0
        return dist.get_rank() % (count or RANKS_PER_HOST_WITHOUT_DEVICES)

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage. Without a PP axis: 0 on 1-D, ``ValueError`` on 2-D."""
        # One axis less than a pipeline needs is a mistake; one axis in all is plain DP or TP.
        if self._current().ndim > 1:
            self._require(PP)
        return self._place(PP)

    def get_data_parallel_rank(self) -> int:
        """Return this rank's place on DP; 0 without that axis."""
        return self._place(DP)

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's place on TP; 0 without that axis."""
        return self._place(TP)

    def is_first_stage(self) -> bool:
        """Tell whether this rank is on the first stage of the pipeline."""
        return self.get_pipeline_parallel_rank() == 0

    def is_last_stage(self) -> bool:
        """Tell whether this rank is on the last stage of the pipeline."""
        stages = self.get_strategy_size(PP) if PP in self._names() else 1
        return self.get_pipeline_parallel_rank() == stages - 1

    # Child meshes.

    def get_pipeline_parallel_mesh(self) -> DeviceMesh:
        """Return the 1-D mesh of the *last* axis, as the old API did whatever its name.

        For the ranks that hold the other stages of this rank's pipeline use ``["PP"]``.
        """
        return self[self._names()[-1]]

    def get_data_parallel_mesh(self) -> DeviceMesh:
        """Return the 1-D mesh along DP that holds this rank."""
        return self[self._require(DP)]

    def get_tensor_parallel_mesh(self) -> DeviceMesh:
        """Return the 1-D mesh along TP that holds this rank."""
        return self[self._require(TP)]

    def get_global_pipeline_parallel_meshes(self, device_type: str = "cuda") -> list[DeviceMesh]:
        """Return one mesh per pipeline stage, over the axes that are not PP.

        No collective. This rank's own stage has the groups of the current mesh (and is a slice
        of it when ``device_type`` is the same); the others tell ranks and shape only, and raise
        ``RuntimeError`` when asked for a group. Needs a PP axis and one more.
        """
        mesh = self._current()
        axis = self._index(self._require(PP))
        if mesh.ndim < 2:
            raise LegacyValueError(
                f"{mesh} has no axis beside PP, so a stage is one rank; add a DP or TP axis."
            )
        inner = tuple(name for name in self._names() if name != PP)
        device_type, mine = _device_type(device_type), self.lookup_rank(PP)
        meshes = [
            mesh_without_groups(device_type, ranks, inner) for ranks in mesh.mesh.unbind(axis)
        ]
        meshes[mine] = _retyped(mesh[inner], device_type)
        return meshes

    def get_global_tensor_parallel_meshes(self) -> list[DeviceMesh]:
        """Return the TP meshes, one per stage, at this rank's place on DP. 3-D meshes only.

        No collective; all but this rank's own are without groups, as above.
        """
        mesh = self._current()
        if mesh.ndim != 3:
            raise LegacyValueError(
                f"{mesh} has {mesh.ndim} axes, expected PP, DP and TP; "
                "use get_tensor_parallel_mesh() on a smaller mesh."
            )
        order = [self._index(self._require(name)) for name in STRATEGIES]
        column = mesh.mesh.permute(order)[:, self.get_data_parallel_rank()]
        meshes = [mesh_without_groups(mesh.device_type, ranks, (TP,)) for ranks in column]
        meshes[self.get_pipeline_parallel_rank()] = self.get_tensor_parallel_mesh()
        return meshes

    # Groups.

    def get_data_parallel_dim_groups(self) -> dist.ProcessGroup:
        """Return the group of axis 0, or of axis 1 on a 3-D mesh, whatever the axis is named."""
        mesh = self._current()
        return mesh.get_group(1 if mesh.ndim == 3 else 0)

    def get_tensor_parallel_dim_groups(self) -> dist.ProcessGroup:
        """Return the group of axis 0, as the old API did; see ``get_tensor_parallel_group``."""
        return self._current().get_group(0)

    def get_tensor_parallel_group(self) -> dist.ProcessGroup:
        """Return the group along TP that holds this rank. Not in the old API."""
        return self._current().get_group(self._require(TP))

    # How the answers are found.

    def _current(self) -> DeviceMesh:
        if self._mesh is None:
            raise LegacyStateError(
                "there is no mesh yet; initialize global DeviceMesh first, with "
                "VESCALE_DEVICE_MESH.init_device_mesh(device_type, mesh_shape)."
            )
        return self._mesh

    def _names(self) -> tuple[str, ...]:
        return self._current().mesh_dim_names

    def _index(self, dim: int | str) -> int:
        """Return the index of an axis, in [0, ndim)."""
        names = self._names()
        if isinstance(dim, str) and dim in names:
            return names.index(dim)
        if isinstance(dim, int) and -len(names) <= dim < len(names):
            return dim % len(names)
        raise LegacyValueError(
            f"{dim!r} is no axis of {self._current()}; give one of {list(names)} "
            f"or an index below {len(names)}."
        )

    def _check_strategies(self) -> None:
        if not set(self._names()) <= set(STRATEGIES):
            raise LegacyValueError(
                f"{self._current()} has the axes {list(self._names())}, expected some of "
                f"{list(STRATEGIES)}; name them so, or use get()['{self._names()[0]}']."
            )

    def _require(self, name: str) -> str:
        self._check_strategies()
        if name not in self._names():
            raise LegacyValueError(
                f"{self._current()} has no axis {name}; initialize the mesh with that axis, "
                "even if its size is 1."
            )
        return name

    def _place(self, name: str) -> int:
        self._check_strategies()
        return self.lookup_rank(name) if name in self._names() else 0


def _checked_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(mesh_shape)
    if not 1 <= len(shape) <= len(STRATEGIES):
        raise LegacyValueError(
            f"mesh_shape={shape} has {len(shape)} axes, expected 1 to {len(STRATEGIES)}; for "
            "more, use torch's init_device_mesh."
        )
    if not all(isinstance(size, int) and size > 0 for size in shape):
        raise LegacyValueError(f"mesh_shape={shape}: expected a positive int for each axis.")
    return shape


def _device_type(device_type: str) -> str:
    kind, _, index = str(device_type).partition(":")
    if kind not in DEVICE_TYPES:
        raise LegacyValueError(
            f"device_type={device_type!r}, expected one of {list(DEVICE_TYPES)}."
        )
    if index:
        warnings.warn(
            f"device_type={device_type!r} names one device, but a mesh spans many; using "
            f"{kind!r}. Choose this rank's own device before making the mesh.",
            stacklevel=3,
        )
    return kind


def _retyped(mesh: DeviceMesh, device_type: str) -> DeviceMesh:
    """Return ``mesh`` for another device type, on the same groups."""
    if mesh.device_type == device_type:
        return mesh
    groups = mesh.get_all_groups()
    names = mesh.mesh_dim_names
    if len(groups) == 1:  # from_group takes the mesh of a single group from the group itself
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=mesh.mesh, mesh_dim_names=names)


VESCALE_DEVICE_MESH = VeDeviceMesh()
