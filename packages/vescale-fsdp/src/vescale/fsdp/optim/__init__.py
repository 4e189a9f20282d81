# SPDX-License-Identifier: Apache-2.0
"""Optimizers that respect the structure of a matrix however it is sharded."""

from vescale.fsdp.optim.adamw8bit import AdamW8bit
from vescale.fsdp.optim.muon import Muon
from vescale.fsdp.optim.soap import SOAP
from vescale.fsdp.optim.split import split_params

__all__ = ["SOAP", "AdamW8bit", "Muon", "split_params"]
