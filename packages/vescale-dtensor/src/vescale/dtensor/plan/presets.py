# SPDX-License-Identifier: Apache-2.0
"""Plans for models that many use."""

from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor.plan.rules import Plan


def llama_tp_sp(mesh: str = "tp") -> Plan:
    """Return tensor and sequence parallelism for the Llama of Hugging Face ``transformers``.

    Also for models whose modules have its names, such as Mistral and Qwen2. Heads are divided over
    the axis ``mesh``, whose size must divide the numbers of heads and of key-value heads; between
    attention and feed-forward layers the sequence is. The model takes plain tokens, the same on all
    ranks of the axis, and returns plain logits. Attention computes with plain tensors, so its
    dropout must be 0.
    """
    column, row, whole, sequence = Shard(0), Shard(1), Replicate(), Shard(1)
    return (
        Plan()
        .param(r"model\.embed_tokens\.weight|lm_head\.weight", column, mesh=mesh)
        .param(r".*\.([qkv]|gate|up)_proj\.weight", column, mesh=mesh)
        .param(r".*\.(o|down)_proj\.weight", row, mesh=mesh)
        .input(r"model\.embed_tokens", {0: whole}, mesh=mesh)
        .output(r"model\.embed_tokens", sequence, mesh=mesh)
        .input(r".*\.self_attn", {"hidden_states": whole}, mesh=mesh)
        .output(r".*\.[qkv]_proj", Shard(-1), mesh=mesh, local=True)
        .input(r".*\.o_proj", {0: Shard(-1)}, mesh=mesh)
        .input(r".*\.mlp", {0: whole}, mesh=mesh)
        .output(r".*\.(o|down)_proj", sequence, mesh=mesh)
        .input(r"lm_head", {0: whole}, mesh=mesh)
        .output(r"lm_head", whole, mesh=mesh, local=True)
    )
