# SPDX-License-Identifier: Apache-2.0
import gc
import weakref

import pytest
import torch

from vescale.fsdp.saved_tensors import Watch, others_watch, saved_tensor_watch, watched_by


class Owner:
    def __init__(self):
        self.uses = 0

    def on_use(self):
        self.uses += 1


def test_a_use_in_backward_of_a_view_of_a_watched_buffer_is_told():
    owner, buffer = Owner(), torch.arange(6.0)
    weight = buffer.narrow(0, 2, 4).view(2, 2).requires_grad_()
    x = torch.ones(3, 2, requires_grad=True)
    watch = Watch(buffer, owner.on_use)
    watch.start()
    assert watched_by(weight.t()) is owner
    assert watched_by(x) is None
    assert watched_by(torch.empty(0)) is None
    with saved_tensor_watch():
        y = (x @ weight.t()).exp()
    watch.stop()
    assert watched_by(weight) is None
    assert owner.uses == 0
    y.sum().backward()
    assert owner.uses > 0


def test_the_owner_is_not_kept_alive():
    owner, buffer = Owner(), torch.ones(2)
    weight = buffer.view(2).requires_grad_()
    watch = Watch(buffer, owner.on_use)
    watch.start()
    with saved_tensor_watch():
        y = weight * weight
    del owner
    y.sum().backward()
    watch.stop()


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


class Doubled(torch.autograd.Function):
    """Saves its output, after nodes of other graphs were made."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp()
        y = x * 2
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("function", [torch.exp, Doubled.apply, lambda x: x.mul_(1).sin()])
def test_a_dropped_graph_is_freed_with_the_collector_off(function):
    gc.disable()
    try:
        with saved_tensor_watch():
            y = function(torch.ones(3, requires_grad=True) * 1)
            z = y.relu()
        gone = weakref.ref(y)
        del y, z
        assert gone() is None
    finally:
        gc.enable()


def test_places_in_a_buffer_are_viewed_once():
    owner, buffer = Owner(), torch.arange(6.0)
    watch = Watch(buffer, owner.on_use)
    weight = buffer.view(2, 3).requires_grad_()
    for _ in range(3):
        watch.start()
        with saved_tensor_watch():
            y = (torch.ones(4, 2, requires_grad=True) @ weight) * weight[0]
        watch.stop()
        y.sum().backward()
    assert watch.views == 2
    del owner
    buffer.untyped_storage().resize_(0)  # and nobody is left to bring it back
    with pytest.raises(RuntimeError, match="deleted, moved or cast"):
        watch.view((torch.Size([2]), (1,), 0))
