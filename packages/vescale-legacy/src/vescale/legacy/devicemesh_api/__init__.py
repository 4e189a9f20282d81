# SPDX-License-Identifier: Apache-2.0
"""One device mesh for the whole process, asked for by the names of its parallel strategies."""

from vescale.legacy.devicemesh_api.api import VESCALE_DEVICE_MESH, VeDeviceMesh

__all__ = ["VESCALE_DEVICE_MESH", "VeDeviceMesh"]
