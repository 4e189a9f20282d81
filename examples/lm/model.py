# SPDX-License-Identifier: Apache-2.0
"""A byte-level decoder in the style of Llama: RMSNorm, rotary positions, SwiGLU, no biases.

Plain torch: nothing here knows that the model will be sharded.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256  # one token is one byte


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder; ``dim`` is a multiple of ``2 * heads``."""

    dim: int
    layers: int
    heads: int
    hidden: int


SIZES = {
    "tiny": Shape(dim=64, layers=2, heads=4, hidden=176),
    "small": Shape(dim=128, layers=4, heads=4, hidden=352),
    "base": Shape(dim=384, layers=8, heads=6, hidden=1024),
    "large": Shape(dim=1024, layers=16, heads=16, hidden=2816),
}


class Attention(nn.Module):
    """Causal self-attention over ``[batch, length, dim]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, rotary), rotate(key, rotary)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer, the unit that is gathered and freed as a whole."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """Return logits ``[batch, length, 256]`` of the next byte for bytes ``[batch, length]``."""

    def __init__(self, shape: Shape, max_length: int, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        # Not persistent: it is computed, so it belongs in no checkpoint.
        angles = rotary_angles(max_length, shape.dim // shape.heads)
        self.register_buffer("rotary", angles, persistent=False)
        self._initialise(shape)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return self.head(self.norm(x))

    def _initialise(self, shape: Shape) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # The two matrices that write to the residual stream start smaller in deep models.
            writes = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
            scale = (2 * shape.layers) ** -0.5 if writes else 1.0
            fan_in = 0.02 if parameter.shape[0] == VOCABULARY else parameter.shape[1] ** -0.5
            nn.init.normal_(parameter, std=fan_in * scale)


def rotary_angles(length: int, head_dim: int, base: float = 10_000.0) -> torch.Tensor:
    """Return cosines and sines ``[2, length, head_dim / 2]`` (arXiv:2104.09864)."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    return torch.stack([angles.cos(), angles.sin()]).float()


def rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Turn ``x`` [batch, heads, length, head_dim] by its positions; keeps the dtype."""
    cos, sin = rotary[:, : x.shape[-2]].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats of predicting ``windows`` [batch, length + 1]."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
