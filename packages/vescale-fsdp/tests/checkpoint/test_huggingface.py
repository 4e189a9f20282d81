# SPDX-License-Identifier: Apache-2.0
import json
import sys

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from testing.models import build
from testing.ranks import DEVICE
from vescale.fsdp import Elements, fully_shard
from vescale.fsdp.checkpoint import load_safetensors, save_safetensors
from vescale.fsdp.checkpoint.huggingface import INDEX, ONE_FILE


def with_buffers(seed=0):
    model = build(seed, tied=True)
    model.register_buffer("seen", torch.arange(3))
    model.register_buffer("table", torch.ones(2), persistent=False)
    return model


def wrap(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def same(found, source, dtype=None):
    expected = source.state_dict()
    del expected["head.weight"]  # tied: once, under its first name
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        cast = dtype if dtype and value.is_floating_point() else value.dtype
        assert found[name].dtype == cast
        assert torch.equal(found[name], value.to(cast)), name


def check_files(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    source = with_buffers()
    model = wrap(with_buffers().to(DEVICE), mesh=mesh)
    save_safetensors(model, path / "one")
    save_safetensors(model, path / "many", max_file_bytes=3000)
    save_safetensors(model, path / "half", dtype=torch.bfloat16)
    save_safetensors(model, path / "again", max_file_bytes=3000)
    save_safetensors(model, path / "again")
    dist.barrier()
    same(load_file(path / "one" / ONE_FILE), source)
    same(load_file(path / "half" / ONE_FILE), source, torch.bfloat16)
    assert [p.name for p in (path / "again").iterdir()] == [ONE_FILE]
    index = json.loads((path / "many" / INDEX).read_text())
    names = sorted(p.name for p in (path / "many").iterdir())
    count = len(names) - 1
    assert names == [
        *(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)),
        INDEX,
    ]
    whole = {}
    for name in names[:-1]:
        part = load_file(path / "many" / name)
        assert all(index["weight_map"][key] == name for key in part)
        assert len(part) == 1 or sum(x.nbytes for x in part.values()) <= 3000
        whole |= part
    same(whole, source)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in whole.values())
    for name in ("one", "many", "half"):
        for from_rank0 in (False, True):
            with torch.device("meta"):
                empty = build(tied=True)
            empty.register_buffer("seen", torch.zeros(3, dtype=torch.long, device=DEVICE))
            for other in (
                wrap(empty, mesh=mesh, granularity=Elements()),
                wrap(with_buffers(3).to(DEVICE), mesh=mesh),
                with_buffers(4).to(DEVICE),
            ):
                result = load_safetensors(other, path / name, from_rank0=from_rank0)
                assert result == ([], [])
                assert other.seen.tolist() == [0, 1, 2]
                found = other.embed.weight
                found = getattr(found, "full_tensor", lambda found=found: found)().cpu()
                expected = source.embed.weight
                if name == "half":
                    expected = expected.bfloat16().float()
                assert torch.equal(found, expected)


def check_mistakes(rank, world_size, path):
    mesh = init_device_mesh(DEVICE, (world_size,))
    model = wrap(build(tied=True).to(DEVICE), mesh=mesh)
    wrong = (ValueError, RuntimeError, OSError)
    with pytest.raises(ValueError, match="has no model"):
        load_safetensors(model, path / "nothing")
    if rank == 0:
        (path / "other").mkdir()
        save_file({"more": torch.ones(1)}, path / "other" / ONE_FILE)
        (path / "file").touch()
    dist.barrier()
    with pytest.raises(ValueError, match=r"missing are \['embed.weight'.*wants \['more'\]"):
        load_safetensors(model, path / "other")
    with pytest.raises(wrong, match="Not a directory"):
        save_safetensors(model, path / "file" / "inside")
    with pytest.raises(ValueError, match="max_file_bytes=0"):
        save_safetensors(model, path, max_file_bytes=0)


def check_all(rank, world_size, path):
    check_files(rank, world_size, path)
    check_mistakes(rank, world_size, path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_go_through_safetensors(run_ranks, tmp_path, world_size):
    run_ranks(check_all, world_size, tmp_path, exact=True)


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'vescale-fsdp\[safetensors\]'"):
        save_safetensors(nn.Linear(2, 2), tmp_path)
