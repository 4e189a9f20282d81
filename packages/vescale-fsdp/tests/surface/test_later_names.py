# SPDX-License-Identifier: Apache-2.0
"""Names that FSDP2 has from PyTorch 2.15 on, held against it where it has them."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from testing.models import build
from testing.ranks import DEVICE
from testing.side_by_side import compare
from vescale.fsdp import MixedPrecisionPolicy, fully_shard
from vescale.fsdp.units import param_groups

HERE = hasattr(torch.distributed.fsdp, "GradientReductionHandle")


def manual_finalization(side, async_op):
    """One step that the caller ends, one of two backwards without sync, one that ends itself."""
    model = side.model()
    model.finalize_backward()
    model.set_manual_backward_finalization(True)
    for backwards in (1, 2):
        model.set_requires_gradient_sync(backwards == 1)
        with side.counted():
            for step in range(backwards):
                side.step(model, step)
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, side.api.GradientReductionHandle)
                handle.wait()
                handle.wait()
        side.look(*model.layers)
        side.gradients(model)
        model.zero_grad()
    model.set_manual_backward_finalization(False)
    with side.counted():
        side.step(model, 2)
    side.gradients(model)


def refusals(side):
    model = side.model()
    model.set_manual_backward_finalization(True)
    side.step(model)
    for call in (
        lambda: model.set_manual_backward_finalization(False),
        lambda: model.layers[0].set_manual_backward_finalization(True),
        lambda: model.layers[0].finalize_backward(),
    ):
        with pytest.raises(RuntimeError):
            call()
    handle = model.finalize_backward(async_op=True)
    for call in (model.finalize_backward, lambda: side.step(model)):
        with pytest.raises(RuntimeError, match="waited"):
            call()
    handle.wait()
    side.gradients(model)
    side.step(model)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="handle"):
        handle.wait()
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()


def keep_unsharded_storage(side):
    model = side.model()
    model.layers[0].set_keep_unsharded_storage(True, recurse=False)
    places = []
    for step in range(2):
        model.layers[0].unshard()
        places.append(model.layers[0].up.weight.data_ptr())
        model.layers[0].reshard()
        side.look(*model.layers)
        with side.counted():
            side.step(model, step)
    assert places[0] == places[1]
    side.gradients(model)
    model.set_keep_unsharded_storage(False)
    side.step(model, 2)
    side.gradients(model)


def override(side):
    """Norms stay in their own dtype, and are gathered beside the rest."""
    model = build().to(DEVICE)
    model.scale = nn.Parameter(model.scale.detach().view(1))
    model.nothing = nn.Parameter(torch.zeros(1, 4, device=DEVICE))
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        param_dtype_override_fn=lambda param: param.dtype if param.ndim == 1 else None,
    )
    seen = []
    model.layers[0].norm.register_forward_hook(lambda m, *_: seen.append(m.weight.dtype))
    model.layers[0].norm.register_forward_pre_hook(lambda m, args: (args[0].float(),))
    model.layers[0].up.register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    model.layers[0].up.bias = model.layers[0].down.bias = None
    side.api.fully_shard(model.layers[0], mp_policy=policy)
    x = torch.ones(4, 13, device=DEVICE).bfloat16()
    model.layers[0](x).float().square().sum().backward()
    assert seen == [torch.float32]
    side.gradients(model.layers[0])


SCRIPTS = ((manual_finalization, False), (manual_finalization, True), (refusals,))


def check_against_fsdp2(rank, world_size):
    for script, *args in (*SCRIPTS, (keep_unsharded_storage,), (override,)):
        compare(script, *args)


@pytest.mark.skipif(not HERE, reason="FSDP2 has these names from PyTorch 2.15 on")
def test_later_names_do_as_fsdp2(run_ranks):
    run_ranks(check_against_fsdp2, 2)


@dataclasses.dataclass(frozen=True)
class LaterPolicy(MixedPrecisionPolicy):
    """As PyTorch 2.15 has it."""

    param_dtype_override_fn: Callable | None = None


def wrapped(returned):
    policy = LaterPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: returned(param))
    return fully_shard(nn.Linear(6, 5).to(DEVICE), mp_policy=policy)


def check_override(rank, world_size):
    layer = wrapped(lambda param: torch.float32 if param.ndim == 1 else None)
    assert [group.param_dtype for group in param_groups(layer)] == [torch.bfloat16, torch.float32]
    layer.unshard()
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(ValueError, match=r"weight: .*returned torch\.float16, expected None"):
        wrapped(lambda param: torch.float16)
    with pytest.raises(TypeError, match=r"weight: .*returned 'half', a str"):
        wrapped(lambda param: "half")
    with pytest.raises(TypeError, match="param_dtype_override_fn=3 is a int"):
        fully_shard(nn.Linear(2, 2), mp_policy=LaterPolicy(param_dtype_override_fn=3))
    # Ranks that override differently would send each other other sizes.
    with pytest.raises(RuntimeError, match="wrap"):
        wrapped(lambda param: torch.float32 if rank else None)


def test_a_policy_may_keep_parameters_in_their_dtype(run_ranks):
    run_ranks(check_override, 2)


def check_kept_storage(rank, world_size):
    model = fully_shard(nn.Linear(6, 5).to(DEVICE))
    (group,) = param_groups(model)
    model.set_keep_unsharded_storage(True)
    for _ in range(2):
        model(torch.ones(2, 6, device=DEVICE)).sum().backward()
    assert group.weights.has_full
    model.set_keep_unsharded_storage(False)
    assert not group.weights.has_full


def test_memory_of_full_parameters_is_kept_while_asked_for(run_ranks):
    run_ranks(check_kept_storage, 2)
