# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import pytest
import torch

from vescale.fsdp.saved_tensors import others_watch, saved_tensor_watch, unwatch, watch


class Owner:
    def __init__(self):
        self.uses = 0

    def on_use(self):
        self.uses += 1


def test_a_use_in_backward_of_a_view_of_a_watched_buffer_is_told():
    owner, buffer = Owner(), torch.arange(6.0)
    weight = buffer.narrow(0, 2, 4).view(2, 2).requires_grad_()
    x = torch.ones(3, 2, requires_grad=True)
    watch(buffer, owner.on_use)
    with saved_tensor_watch():
        y = (x @ weight.t()).exp()
    unwatch(buffer)
    assert owner.uses == 0
    y.sum().backward()
    assert owner.uses > 0


def test_the_owner_is_not_kept_alive():
    owner, buffer = Owner(), torch.ones(2)
    weight = buffer.view(2).requires_grad_()
    watch(buffer, owner.on_use)
    with saved_tensor_watch():
        y = weight * weight
    del owner
    y.sum().backward()
    unwatch(buffer)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.exp().mul_(2),
        lambda x: (lambda y: (y.sin(), y.mul_(2))[0])(x * 1),
        lambda x: (x * 1).relu_().mul_(2),
    ],
    ids=["output", "input", "in-place"],
)
def test_modified_saved_tensors_are_still_an_error(forward):
    with saved_tensor_watch():
        y = forward(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_others_stay_in_force():
    packed = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t)
    x = torch.ones(3, requires_grad=True)
    with hooks:
        assert others_watch()
        with saved_tensor_watch():
            x.exp()
    assert len(packed) == 1
    with saved_tensor_watch():
        assert not others_watch()


def test_nothing_is_watched_without_gradients():
    with torch.no_grad(), saved_tensor_watch():
        assert not others_watch()


def test_a_dropped_graph_is_freed_with_the_collector_off():
    gc.disable()
    try:
        with saved_tensor_watch():
            y = torch.ones(3, requires_grad=True).exp()
            z = y.relu()
        gone = weakref.ref(y)
        del y, z
        assert gone() is None
    finally:
        gc.enable()
