# SPDX-License-Identifier: Apache-2.0
import torch

from vescale.fsdp.optim.adam import adamw_


def test_updates_are_those_of_torch_up_to_rounding():
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (33,), (1,)]
    fulls = [torch.randn(shape, generator=generator) for shape in shapes]
    references = [torch.nn.Parameter(full.clone()) for full in fulls]
    group = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}
    optimizer = torch.optim.AdamW(references, **group)
    params = [full.clone().view(-1) for full in fulls]
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    for step in range(1, 6):
        grads = [torch.randn(shape, generator=generator) for shape in shapes]
        for reference, grad in zip(references, grads, strict=True):
            reference.grad = grad
        optimizer.step()
        adamw_(params, [grad.view(-1) for grad in grads], *moments, group, step)
    for param, reference in zip(params, references, strict=True):
        torch.testing.assert_close(param, reference.detach().view(-1), rtol=1e-6, atol=1e-7)


def test_every_element_gets_the_bits_it_gets_alone():
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1037, generator=generator) for _ in range(3)]
    whole.append(torch.rand(1037, generator=generator))
    group = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    pieces = [[part.clone() for part in t.split([5, 100, 900, 32])] for t in whole]
    adamw_(*([t] for t in whole), group, 3)
    adamw_(*pieces, group, 3)
    for index in (0, 2, 3):
        assert torch.equal(whole[index], torch.cat(pieces[index]))
