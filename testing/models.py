# SPDX-License-Identifier: Apache-2.0
"""Small models with awkward shapes, and the one-process run that sharded runs are held against."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 29


class Block(nn.Module):
    """A residual MLP whose sizes no world size divides."""

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width + 1)
        self.down = nn.Linear(4 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm and head; ``forward`` maps tokens [..., T] to logits."""

    def __init__(self, *, width: int = 13, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))  # 0-dim
        self.nothing = nn.Parameter(torch.empty(0, 4))  # no elements
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) * self.scale + self.nothing.sum()


def build(seed: int = 0, **options) -> LanguageModel:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return LanguageModel(**options)


def batch(step: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """Return the tokens [4, 8] that ``rank`` trains on in ``step``."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (4, 8), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of each token against itself: easy, but every weight matters."""
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def reference_step(
    model: nn.Module, step: int, world_size: int, device: str = "cpu"
) -> list[float]:
    """Accumulate the mean gradient of all ranks' batches in one process; return their losses."""
    losses = []
    for rank in range(world_size):
        loss = loss_of(model, batch(step, rank, device))
        (loss / world_size).backward()
        losses.append(loss.item())
    return losses
