# SPDX-License-Identifier: Apache-2.0
"""A Llama of Hugging Face by a plan: TP, SP and FSDP against one process, and in how many lines."""

import ast
import inspect
import itertools
import textwrap

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from testing.ranks import DEVICE
from vescale.dtensor.plan import Plan, llama_tp_sp, parallelize
from vescale.fsdp import clip_grad_norm_, fully_shard

transformers = pytest.importorskip("transformers", reason="needs transformers, of the tests group")

VOCAB, STEPS, FIGURE = 62, 3, 29  # lines that the paper (arXiv:2509.07003) reports for LLaMA-3
# Weights are float64, but transformers takes norms, softmax and rotations in float32.
LOSS, GRADIENT = 1e-7, 1e-6


def written_out():
    """The plan of ``llama_tp_sp``, as a user without it writes it."""
    column, row, whole, sequence = Shard(0), Shard(1), Replicate(), Shard(1)
    return (
        Plan()
        .param(r"model\.embed_tokens\.weight|lm_head\.weight", column, mesh="tp")
        .param(r".*\.([qkv]|gate|up)_proj\.weight", column, mesh="tp")
        .param(r".*\.(o|down)_proj\.weight", row, mesh="tp")
        .input(r"model\.embed_tokens", {0: whole}, mesh="tp")
        .output(r"model\.embed_tokens", sequence, mesh="tp")
        .input(r".*\.self_attn", {"hidden_states": whole}, mesh="tp")
        .output(r".*\.[qkv]_proj", Shard(-1), mesh="tp", local=True)
        .input(r".*\.o_proj", {0: Shard(-1)}, mesh="tp")
        .input(r".*\.mlp", {0: whole}, mesh="tp")
        .output(r".*\.(o|down)_proj", sequence, mesh="tp")
        .input(r"lm_head", {0: whole}, mesh="tp")
        .output(r"lm_head", whole, mesh="tp", local=True)
    )


def shard(model, mesh):
    parallelize(model, mesh["tp"], written_out())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def build(**options):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=50,  # as the vocabulary and the sequence, not divisible by every axis
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=6,
        max_position_embeddings=64,
        attn_implementation="eager",
        **options,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model.to(DEVICE).train()


def tokens(step, group):
    generator = torch.Generator().manual_seed(100 * step + group)
    return torch.randint(VOCAB, (2, 13), generator=generator).to(DEVICE)


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def check_training(rank, world_size, dp, tp, options):
    mesh = init_device_mesh(DEVICE, (dp, tp), mesh_dim_names=("dp", "tp"))
    group = mesh.get_local_rank("dp")
    model, twin = build(**options), build(**options)
    shard(model, mesh)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, twin)]
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, group))
        loss.backward()
        expected = [loss_of(twin, tokens(step, g)) for g in range(dp)]
        (sum(expected) / dp).backward()
        torch.testing.assert_close(loss, expected[group], rtol=LOSS, atol=0)
        for (name, theirs), ours in zip(twin.named_parameters(), model.parameters(), strict=True):
            difference = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
            assert difference <= GRADIENT, (step, name, difference)
        norm = clip_grad_norm_(model, 1.0)
        twin_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        torch.testing.assert_close(norm, twin_norm, rtol=GRADIENT, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(options)


def check_all(rank, world_size):
    grids = {2: [(1, 2), (2, 1)], 3: [(1, 3), (3, 1)], 4: [(2, 2)]}[world_size]
    for (dp, tp), tied in itertools.product(grids, (False, True)):
        check_training(rank, world_size, dp, tp, {"tie_word_embeddings": True} if tied else {})
        dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_llama_by_a_plan_trains_as_in_one_process(run_ranks, world_size):
    run_ranks(check_all, world_size, exact=True, limit=300)


def lines_of(function):
    """Count the lines of code in the body of ``function``, without its docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    body = ast.parse(source).body[0].body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    return sum(statement.end_lineno - statement.lineno + 1 for statement in body)


def test_the_lines_that_a_user_writes():
    """Plan and calls; no line of the model. With the plan that ships, five."""
    assert written_out().rules == llama_tp_sp().rules
    total = lines_of(written_out) + lines_of(shard)
    print(f"\nplan {lines_of(written_out)} lines, calls {lines_of(shard)}, of {FIGURE}")
    assert total <= FIGURE
    assert lines_of(shard) <= 5
