# SPDX-License-Identifier: Apache-2.0
"""Parallelise a model that was written for one device, by patterns of names."""

from vescale.dtensor.plan.apply import parallelize
from vescale.dtensor.plan.explain import Explanation, Row
from vescale.dtensor.plan.presets import llama_tp_sp
from vescale.dtensor.plan.rules import Plan

__all__ = ["Explanation", "Plan", "Row", "llama_tp_sp", "parallelize"]
