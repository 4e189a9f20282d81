# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers, from small configurations, against one process."""

import pytest
import torch
import torch.distributed as dist

from testing.ranks import DEVICE
from vescale.fsdp import clip_grad_norm_, fully_shard, register_fsdp_forward_method
from vescale.fsdp.checkpoint import load_safetensors, save_safetensors
from vescale.fsdp.state_dict import StateDictOptions, get_model_state_dict

transformers = pytest.importorskip("transformers", reason="needs transformers, of the tests group")

VOCAB, LAYERS, STEPS = 61, 2, 3
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config(kind):
    if kind == "llama":
        return transformers.LlamaConfig(intermediate_size=48, **COMMON)
    if kind == "llama-tied":
        return transformers.LlamaConfig(intermediate_size=48, tie_word_embeddings=True, **COMMON)
    if kind == "qwen3-moe":
        return transformers.Qwen3MoeConfig(
            intermediate_size=48,
            moe_intermediate_size=24,
            num_experts=5,
            num_experts_per_tok=2,
            **COMMON,
        )
    return transformers.GptOssConfig(
        intermediate_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        **COMMON,
    )


def build(kind, seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    return model.to(DEVICE).train()


def wrap(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tokens(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(3, VOCAB, (2, 12), generator=generator).to(DEVICE)


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def check_training(rank, world_size, kind):
    model, twin = wrap(build(kind)), build(kind)
    if kind == "llama":  # recomputation, of its layers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "qwen3-moe":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(STEPS):
        loss = loss_of(model, tokens(step, rank))
        loss.backward()
        expected = [loss_of(twin, tokens(step, r)) for r in range(world_size)]
        (sum(expected) / world_size).backward()
        torch.testing.assert_close(loss, expected[rank], rtol=1e-4, atol=1e-5)
        norm = clip_grad_norm_(model, 1.0)
        twin_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        torch.testing.assert_close(norm, twin_norm, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    saved = twin.state_dict()
    ours = model.state_dict()
    assert ours.keys() == saved.keys()
    for name, value in ours.items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(full, saved[name], rtol=1e-3, atol=1e-4, msg=name)
    assert (kind == "llama-tied") == (model.lm_head.weight is model.model.embed_tokens.weight)


def check_generation(rank, world_size, kind):
    """Ranks write texts of their own, of one length, without a gradient."""
    model, twin = wrap(build(kind)).eval(), build(kind).eval()
    prompt = tokens(0, rank)[:, :4]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = twin.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert torch.equal(found, expected)
    assert model.lm_head.weight.shape == (VOCAB, 32)
    loss_of(model.train(), tokens(1, rank)).backward()  # training goes on
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts" not in n)


def check_meta(rank, world_size, kind):
    """Built without memory, and filled from whole tensors that only rank 0 has."""
    from vescale.fsdp import load_full_state_dict

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(kind), dtype=torch.float32)
    wrap(model)
    twin = build(kind)
    model.to_empty(device=DEVICE)
    buffers = dict(twin.named_buffers())
    for name, buffer in model.named_buffers():  # rope tables: not in a state dict
        buffer.copy_(buffers[name])
    load_full_state_dict(model, twin.state_dict() if rank == 0 else None)
    ids = tokens(0, rank)
    torch.testing.assert_close(loss_of(model, ids), loss_of(twin, ids), rtol=1e-4, atol=1e-5)


def check_export(rank, world_size, folder):
    """What the guide shows: generate as a forward, export from rank 0, load without and with us."""
    model, twin = wrap(build("llama-tied")).eval(), build("llama-tied").eval()
    register_fsdp_forward_method(model, "generate")
    prompt = tokens(0, rank)[:, :4]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    options["attention_mask"] = torch.ones_like(prompt)
    assert torch.equal(model.generate(prompt, **options), twin.generate(prompt, **options))
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    assert bool(whole) == (rank == 0)
    if rank == 0:
        model.save_pretrained(folder, state_dict=dict(whole))
    dist.barrier()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
    for name, value in twin.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert again.lm_head.weight is again.model.embed_tokens.weight
    # In pieces, without a whole state anywhere; and back from what transformers wrote.
    save_safetensors(model, f"{folder}/streamed", max_file_bytes=8192)
    if rank == 0:
        model.config.save_pretrained(f"{folder}/streamed")
    dist.barrier()
    streamed = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/streamed").to(DEVICE)
    fresh = wrap(build("llama-tied", seed=1))
    assert load_safetensors(fresh, folder) == ([], [])
    for name, value in twin.state_dict().items():
        assert torch.equal(streamed.state_dict()[name], value), name
        assert torch.equal(fresh.state_dict()[name].full_tensor(), value), name
    wrap(again).eval()
    assert torch.equal(again.generate(prompt, **options), twin.generate(prompt, **options))


KINDS = ["llama", "llama-tied", "qwen3-moe", "gpt-oss"]


def check_all(rank, world_size, folder):
    for kind in KINDS:
        check_training(rank, world_size, kind)
        dist.barrier()
    for kind in ("llama-tied", "gpt-oss"):
        check_generation(rank, world_size, kind)
    check_meta(rank, world_size, "llama")
    check_export(rank, world_size, folder)


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_train_and_generate_as_in_one_process(run_ranks, world_size, tmp_path):
    run_ranks(check_all, world_size, str(tmp_path), limit=400)
