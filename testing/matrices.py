# SPDX-License-Identifier: Apache-2.0
"""Matrices of real models for Muon, layer by layer, and an element-level cut of them."""

from vescale.fsdp.optim.roots import Matrix, Piece

LLAMA_8B = [[(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]] * 32
LLAMA_70B = [[(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *[(28672, 8192)] * 3]] * 80
DSV3_ATTENTION = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
DSV3 = [
    *[[*DSV3_ATTENTION, *[(18432, 7168)] * 3]] * 3,
    *[[*DSV3_ATTENTION, (256, 7168), *[(2048, 7168)] * 3 * 257]] * 58,
]


def cut_evenly(layers, world_size):
    """Cut each layer, end to end in memory, into ``world_size`` equal runs."""
    matrices = []
    for layer in layers:
        shard = -(-sum(rows * cols for rows, cols in layer) // world_size)
        begin = 0
        for rows, cols in layer:
            end, pieces, at = begin + rows * cols, [], begin
            while at < end:
                upto = min(end, (at // shard + 1) * shard)
                pieces.append(Piece(at // shard, at - begin, upto - at))
                at = upto
            matrices.append(Matrix(rows, cols, tuple(pieces)))
            begin = end
    return matrices
