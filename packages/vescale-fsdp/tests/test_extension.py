# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.utils._pytree import tree_map

from testing.ranks import DEVICE
from vescale.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from vescale.fsdp.units import param_groups


class Wrapper(torch.Tensor):
    """A tensor of ``names`` of inner tensors, on all of which an operator runs alike."""

    names = ()

    @staticmethod
    def __new__(cls, first, *others):
        return torch.Tensor._make_wrapper_subclass(
            cls, first.size(), strides=first.stride(), dtype=torch.float32, device=first.device
        )

    def __init__(self, *inner):
        for name, tensor in zip(self.names, inner, strict=True):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(self.names), None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(*(inner[name] for name in cls.names))

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        results = []
        for name in cls.names:

            def pick(x, name=name):
                return getattr(x, name) if isinstance(x, cls) else x

            results.append(func(*tree_map(pick, args), **tree_map(pick, kwargs or {})))
        if func._schema.is_mutable:
            return args[0]
        return cls(*results) if isinstance(results[0], torch.Tensor) else results[0]


class Float8Like(Wrapper):
    """Trained in float32, gathered as int8 codes, a scale a row and a number without dims."""

    names = ("_data",)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1
        assert tuple(outer_size) == module.shape
        codes, scale = quantise(self._data)
        return (codes, scale, torch.tensor(2.0, device=codes.device)), {"from": type(self)}

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        assert metadata == {"from": Float8Like}
        codes, scale, numbers = all_gather_outputs
        assert bool((numbers == 2).all())
        whole = (codes * scale).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # for FSDP2
            out.copy_(whole)
        return None


def quantise(data):
    scale = data.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127
    return (data / scale).round().to(torch.int8), scale


class Codes(Wrapper):
    """Frozen codes with a scale a row, which stay so in forward."""

    names = ("codes", "scale")

    def dequantised(self):
        return self.codes * self.scale

    def fsdp_pre_all_gather(self, mesh):
        return (self.codes, self.scale), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        if out is None:
            return Codes(*all_gather_outputs), ()
        assert out.codes.data_ptr() == all_gather_outputs[0].data_ptr()
        return None


class Trained(nn.Module):
    """A linear layer that computes with quantised weights; ``twin`` on one process."""

    def __init__(self, rows, *, twin):
        super().__init__()
        data = torch.randn(rows, 6)
        self.shape = (rows, 6)
        self.weight = nn.Parameter(data if twin else Float8Like(data))
        self.bias = nn.Parameter(torch.zeros(rows))
        self.back = nn.Parameter(torch.randn(6, rows))
        self.twin = twin

    def forward(self, x):
        weight = self.weight
        if self.twin:
            codes, scale = quantise(weight.detach())
            weight = weight + (codes * scale - weight).detach()
        return x + F.linear(torch.tanh(F.linear(x, weight, self.bias)), self.back)


class Adapted(nn.Module):
    """A frozen quantised base and a trainable adapter."""

    def __init__(self, rows, *, twin):
        super().__init__()
        codes, scale = quantise(torch.randn(rows, 6))
        base = codes * scale if twin else Codes(codes, scale)
        self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(torch.randn(rows, 6) / 3)

    def forward(self, x):
        base = self.base
        if not isinstance(base, torch.Tensor) or type(base) is Codes:
            base = base.dequantised()
        return x + torch.tanh(F.linear(x, base)) @ self.down


def pair(kind, rows, shard, **options):
    """Return the wrapped model and its twin."""
    models = []
    for twin in (False, True):
        torch.manual_seed(0)
        models.append(nn.Sequential(kind(rows, twin=twin), kind(rows, twin=twin)))
    mesh = init_device_mesh(DEVICE, (torch.distributed.get_world_size(),))
    for part in (*models[0], models[0]):
        shard(part, mesh=mesh, **options)
    return models[0], models[1].to(DEVICE)


def train(model, clip):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(4, 6, generator=generator).to(DEVICE)
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        if clip:
            clip(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_training(rank, world_size):
    """Gathered by their own methods, parameters train as on one process, and with FSDP2."""
    for kind in (Trained, Adapted):
        for rows, options in (
            (8, {}),
            (7, {"reshard_after_forward": False}),
            (2, {"offload_policy": CPUOffloadPolicy()}),
        ):
            model, twin = pair(kind, rows, fully_shard, **options)
            losses = train(model, clip_grad_norm_)
            expected = train(twin, nn.utils.clip_grad_norm_)
            torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
            for name, param in model.named_parameters():
                if param.requires_grad and name.endswith(("bias", "back", "down")):
                    whole = twin.get_parameter(name).detach()
                    got = param.full_tensor().to(DEVICE)
                    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)
        if kind is Trained and 8 % world_size == 0:  # FSDP2 restrides, which Codes cannot
            stock, _ = pair(kind, 8, fsdp2_fully_shard)
            ours, _ = pair(kind, 8, fully_shard)
            losses, expected = train(ours, None), train(stock, None)
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)


def check_forms(rank, world_size):
    """The sharded form is rows of the subclass, the gathered one what its method makes."""
    model, twin = pair(Trained, 7, fully_shard)
    weight = model[0].weight
    local = weight.to_local()
    assert type(local) is Float8Like
    assert local.shape[1:] == (6,)
    per = -(-7 // world_size)
    start = min(7, rank * per)
    assert torch.equal(local._data, twin[0].weight.detach()[start : start + per].to("cpu"))
    assert list(model.state_dict()) == list(twin.state_dict())
    # Memory goes after forward.
    groups = [g for g in param_groups(model) if g.managed[0].fqn == "weight"]
    with torch.no_grad():
        model(torch.ones(2, 6, device=DEVICE))
    for group in groups:
        inner = (group._packing.memory, *group._inner)
        assert all(not t.numel() or not t.untyped_storage().nbytes() for t in inner)
    # A copy is independent.
    expected = train(twin, None)
    other = copy.deepcopy(model)
    for each in (model, other):
        torch.testing.assert_close(train(each, None), expected, rtol=1e-5, atol=1e-6)
    # Computed in bfloat16.
    half, _ = pair(Trained, 8, fully_shard, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert half(torch.ones(2, 6, device=DEVICE)).dtype == torch.bfloat16


class Uncuttable(Float8Like):
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            raise RuntimeError("no slices")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Failing(Float8Like):
    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if torch.distributed.get_rank() == 0:
            raise ValueError("planted")
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


class NoMethods(Wrapper):
    names = ("_data",)


def check_refusals(rank, world_size):
    for kind, error, match in (
        (Uncuttable, NotImplementedError, r"weight is a Uncuttable.*no slices"),
        (NoMethods, NotImplementedError, r"weight is a NoMethods.*fsdp_pre_all_gather"),
    ):
        model = Trained(8, twin=False)
        model.weight = nn.Parameter(kind(torch.randn(8, 6)))
        with pytest.raises(error, match=match):
            fully_shard(model)
    model = Trained(8, twin=False)
    model.weight = nn.Parameter(Failing(torch.randn(8, 6)))
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"weight: fsdp_pre_all_gather failed on rank 0.*plant"):
        model(torch.ones(2, 6, device=DEVICE))


def check_all(rank, world_size):
    check_forms(rank, world_size)
    check_training(rank, world_size)
    check_refusals(rank, world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_tensor_subclasses_say_what_is_gathered(run_ranks, world_size):
    run_ranks(check_all, world_size)
