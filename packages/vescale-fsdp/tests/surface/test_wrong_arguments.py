# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of public functions are refused at the call, by messages that name them."""

import copy

import pytest
import torch
from torch import nn

from vescale.fsdp import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    init_empty,
    inspect,
    load_full_state_dict,
    register_fsdp_forward_method,
)
from vescale.fsdp.lanes import plan_lanes
from vescale.fsdp.padding_cause import padding_causes
from vescale.fsdp.planner import plan
from vescale.fsdp.state_dict import get_state_dict


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())

    def forward(self, x):
        return self.weight @ x


def wrap(**policy):
    return fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(**policy))


CALLS = [
    (lambda m: m.set_all_reduce_hook(print, stream=3), TypeError, "stream is a int, expected"),
    (lambda m: register_fsdp_forward_method(m, 3), TypeError, "method_name=3 is a int"),
    (lambda m: clip_grad_norm_(m, 1.0, error_if_nonfinite="x"), TypeError, "nonfinite='x' is a"),
    (lambda m: clip_grad_norm_(m, 1.0, submesh_copies=1), TypeError, "submesh_copies=1 is a"),
    (lambda m: init_empty(m, "cuda"), ValueError, "device is cuda, but .* a mesh on cpu"),
    (lambda m: init_empty(m, "nope"), ValueError, "device='nope' names no device"),
    (lambda m: init_empty(m, strict=2), TypeError, "strict=2 is a int"),
    (lambda m: load_full_state_dict(m, {}, strict=1), TypeError, "strict=1 is a int"),
    (lambda m: load_full_state_dict(m, {}, from_rank0=1), TypeError, "from_rank0=1 is a int"),
    (lambda m: get_state_dict(m, None), TypeError, "optimizers is a NoneType, expected an opt"),
    (lambda m: get_state_dict(m, [3]), TypeError, "optimizers has a int, expected an optimizer"),
    (lambda m: inspect.layout(3), TypeError, "model is a int, expected an nn.Module"),
    (lambda m: plan([3], 4), TypeError, r"requests\[0\] is a int, expected a Request"),
    (lambda m: plan_lanes(None, 4), TypeError, "requests is a NoneType, expected a list"),
    (lambda m: padding_causes(3), TypeError, "plan is a int, expected what plan"),
    (lambda m: wrap(cast_forward_inputs=3), TypeError, "cast_forward_inputs=3 is a int"),
    (lambda m: wrap(reduce_dtype=torch.float8_e4m3fn), ValueError, "reduce gradients in .*float8"),
    (lambda m: wrap(param_dtype=torch.float8_e5m2), ValueError, "pass a reduce_dtype such as"),
    (lambda m: fully_shard(Sparse()), NotImplementedError, "weight is no dense tensor .*sparse"),
    (copy.copy, TypeError, r"copy.copy: .* Use copy.deepcopy"),
]


@pytest.mark.parametrize(("call", "kind", "match"), CALLS)
def test_wrong_arguments_are_named(fake_group, call, kind, match):
    fake_group(4)
    model = fully_shard(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(kind, match=match):
        call(model)
