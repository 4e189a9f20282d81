# SPDX-License-Identifier: Apache-2.0
"""What is called under ``torch.inference_mode`` leaves a model that trains."""

import copy

import torch

from testing.models import batch, build, loss_of, reference_step
from testing.ranks import DEVICE
from vescale.fsdp import fully_shard, init_empty, iter_full_parameters, load_full_state_dict
from vescale.fsdp.state_dict import StateDictOptions, get_state_dict, set_state_dict


def wrap(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trains(model, rank, world_size):
    model.zero_grad()
    loss_of(model, batch(0, rank, DEVICE)).backward()
    twin = build().to(DEVICE)
    reference_step(twin, 0, world_size, DEVICE)
    for name, param in twin.named_parameters():
        found = model.get_parameter(name).grad.full_tensor()
        torch.testing.assert_close(found, param.grad, rtol=1e-5, atol=1e-6, msg=name)
    model.reshard(recurse=True)


def check_made(rank, world_size):
    with torch.inference_mode():
        model = wrap(build().to(DEVICE))
        model(batch(0, rank, DEVICE))
    trains(model, rank, world_size)
    with torch.inference_mode():
        twin = copy.deepcopy(model)
        model.double().float()
        twin(batch(0, rank, DEVICE))
    trains(twin, rank, world_size)
    trains(model, rank, world_size)


def check_meta(rank, world_size):
    def ones(_, module):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(1.0)

    with torch.device("meta"):
        models = [wrap(build()), wrap(build())]
    whole = build().to(DEVICE).state_dict()
    with torch.inference_mode():
        init_empty(models[0], init=ones)
        for model in models:
            load_full_state_dict(model, whole if rank == 0 else None)
    for model in models:
        trains(model, rank, world_size)


def check_states(rank, world_size):
    model = wrap(build().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters())
    expected = build().to(DEVICE).state_dict()
    with torch.inference_mode():
        state = model.state_dict()
        model.load_state_dict(state)
        wholes = dict(iter_full_parameters(model))
        for name, value in expected.items():
            assert torch.equal(state[name].full_tensor(), value), name
            assert torch.equal(wholes[name], value), name
        for options in (None, StateDictOptions(full_state_dict=True)):
            both = get_state_dict(model, optimizer, options=options)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=both[0],
                optim_state_dict=both[1],
                options=options,
            )
    trains(model, rank, world_size)
    optimizer.step()


def check_all(rank, world_size):
    check_made(rank, world_size)
    check_meta(rank, world_size)
    check_states(rank, world_size)


def test_training_follows_what_inference_mode_made(run_ranks):
    run_ranks(check_all, 2)
