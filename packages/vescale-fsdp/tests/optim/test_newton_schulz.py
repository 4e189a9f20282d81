# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vescale.fsdp.optim.newton_schulz import DEFAULT_COEFFICIENTS, newton_schulz, step_triples

CUBIC = (1.5, -0.5, 0.0)


def step_of_torch(grad, **options):
    """Return the update that torch.optim.Muon makes of ``grad``: one step from zero weights."""
    param = torch.nn.Parameter(torch.zeros_like(grad))
    param.grad = grad.clone()
    torch.optim.Muon([param], lr=1.0, momentum=0.0, weight_decay=0.0, **options).step()
    return -param.detach() / max(1, grad.size(0) / grad.size(1)) ** 0.5


@pytest.mark.parametrize("shape", [(8, 8), (33, 7), (7, 33), (1, 9), (9, 1), (64, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_equal_to_torch_bit_for_bit(shape, transposed):
    torch.manual_seed(0)
    grad = torch.randn(shape[::-1]).T if transposed else torch.randn(shape)
    ours = newton_schulz(grad, DEFAULT_COEFFICIENTS, 5, 1e-7)
    assert ours.dtype == torch.bfloat16
    if shape[0] <= shape[1]:  # else the factor of the learning rate rounds once more
        assert torch.equal(ours.float(), step_of_torch(grad))
    torch.testing.assert_close(ours.float(), step_of_torch(grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_argument_is_left_alone(dtype):
    grad = torch.randn(6, 4).to(dtype)
    before = grad.clone()
    newton_schulz(grad, DEFAULT_COEFFICIENTS, 5, 1e-7)
    assert torch.equal(grad, before)


def test_one_triple_is_the_same_as_a_list_of_it():
    grad = torch.randn(5, 12)
    once = newton_schulz(grad, DEFAULT_COEFFICIENTS, 4, 1e-7)
    assert torch.equal(once, newton_schulz(grad, [DEFAULT_COEFFICIENTS] * 4, 4, 1e-7))


def test_per_step_triples_are_used_in_order():
    # Large singular values shrink only once they are near 1: fast first, then cubic, converges.
    grad = torch.randn(16, 48)
    triples = [DEFAULT_COEFFICIENTS] * 4 + [CUBIC] * 4
    x = newton_schulz(grad, triples, 8, 1e-7).float()
    torch.testing.assert_close(x @ x.T, torch.eye(16), atol=0.05, rtol=0)
    backwards = newton_schulz(grad, triples[::-1], 8, 1e-7).float()
    assert (backwards @ backwards.T - torch.eye(16)).abs().max() > 0.1


def test_zero_and_nan_pass_through():
    zero = newton_schulz(torch.zeros(3, 5), DEFAULT_COEFFICIENTS, 5, 1e-7)
    assert torch.equal(zero, torch.zeros(3, 5, dtype=torch.bfloat16))
    poisoned = torch.ones(3, 5).index_fill_(1, torch.tensor(2), float("nan"))
    assert newton_schulz(poisoned, DEFAULT_COEFFICIENTS, 5, 1e-7).isnan().all()


@pytest.mark.parametrize(
    ("coefficients", "steps"),
    [
        ((1.0, 2.0), 5),
        ([CUBIC] * 4, 5),
        ("abc", 3),
        (CUBIC, 100),
        (CUBIC, -1),
        ([CUBIC, (1, 2)], 2),
    ],
)
def test_wrong_coefficients_are_refused(coefficients, steps):
    with pytest.raises(ValueError, match="ns_"):
        step_triples(coefficients, steps)
