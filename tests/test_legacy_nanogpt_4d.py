# SPDX-License-Identifier: Apache-2.0
"""The example of the old API trains as one process does, to the same dropout masks."""

import legacy_nanogpt_4d as example
import torch

from testing.ranks import DEVICE
from vescale.legacy.devicemesh_api import VESCALE_DEVICE_MESH


def check_losses(rank, world_size):
    example.ITERATIONS = 4  # the script itself runs 20
    VESCALE_DEVICE_MESH.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("DP", "TP"))
    losses, masks = example.train_4d(DEVICE)
    place = VESCALE_DEVICE_MESH.get_data_parallel_rank()
    expected, expected_masks = example.train_plain(DEVICE, 2, place)
    torch.testing.assert_close(losses, expected, rtol=0, atol=example.TOLERANCE)
    assert losses[-1] < losses[0]
    assert len(masks) == len(expected_masks) == 1 + 3 * example.LAYERS
    assert all(map(torch.equal, masks, expected_masks))
    assert any(mask.any() for mask in masks)


def test_losses_and_masks_are_those_of_one_process(run_ranks):
    run_ranks(check_losses, 4, exact=True)
