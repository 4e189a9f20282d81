# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written by torch's distributed checkpoint, published whole or never."""

from vescale.fsdp.checkpoint.folder import Skipped
from vescale.fsdp.checkpoint.huggingface import load_safetensors, save_safetensors
from vescale.fsdp.checkpoint.manager import Checkpoint, CheckpointManager, Restored

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Restored",
    "Skipped",
    "load_safetensors",
    "save_safetensors",
]
