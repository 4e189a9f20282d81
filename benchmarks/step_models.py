# SPDX-License-Identifier: Apache-2.0
"""The models that ``fsdp_vs_fsdp2`` trains: a dense decoder, and one with fused experts."""

import torch
import torch.nn.functional as F
from examples.lm.model import Attention, Decoder, Shape
from torch import nn

LENGTH = 64
SHAPES = {
    "tiny": Shape(dim=32, layers=2, heads=2, hidden=88),
    "small": Shape(dim=128, layers=4, heads=4, hidden=352),
    "base": Shape(dim=256, layers=4, heads=4, hidden=704),
    "large": Shape(dim=2048, layers=8, heads=16, hidden=5632),
}
EXPERTS = 8


class Experts(nn.Module):
    """Fused experts: two 3-D parameters for all of them; every token weighs two experts.

    Every expert computes every token, so that the work does not depend on the routing.
    """

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, dim, 2 * hidden) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, hidden, dim) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        chosen, index = self.router(tokens).topk(2, dim=-1)
        weights = torch.zeros(len(tokens), EXPERTS, dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, index, chosen.softmax(-1))
        gate, up = (tokens @ self.up).chunk(2, dim=-1)
        each = (F.silu(gate) * up) @ self.down  # [expert, token, dim]
        return torch.einsum("etd,te->td", each, weights).view_as(x)


class ExpertBlock(nn.Module):
    """One layer, the unit that is gathered and freed as a whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.experts_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.experts = Experts(shape.dim, shape.hidden // EXPERTS)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.experts(self.experts_norm(x))


def build(kind: str, size: str) -> Decoder:
    """Return the same "llama" or "moe" of ``SHAPES[size]`` in every process."""
    torch.manual_seed(0)
    shape = SHAPES[size]
    model = Decoder(shape, max_length=LENGTH)
    if kind == "moe":
        model.layers = nn.ModuleList(ExpertBlock(shape) for _ in range(shape.layers))
    return model


def tokens(step: int, rank: int) -> torch.Tensor:
    """Return the bytes [4, LENGTH + 1] that ``rank`` trains on in ``step``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 256, (4, LENGTH + 1), generator=generator)
