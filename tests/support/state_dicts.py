"""Returns an encoder's weights in each layout that the exporter reads.

A layout determines the names and the shapes of the tensors in a state dict.
This file has its own list of tensor names. So the tests notice wrong names in the exporter's tables.
"""

from typing import Any

import torch
from torch import Tensor

from encserve_export import Encoder, EncoderConfig
from encserve_export.models.own.init import random_encoder

LAYOUTS = ("per-head-linears", "raw-matrices", "fused-qkv", "attention-only", "split-qkv", "torch-native")
# For each layout, the fields of EncoderConfig that do not have the default value.
VARIANTS: dict[str, dict[str, Any]] = {
    "raw-matrices": {"attention_bias": False},
    "fused-qkv": {"merge_heads": "reshape"},
    "attention-only": {"attention_bias": False, "norm": "none", "residual": False, "d_ff": 0, "n_layers": 1},
}

State = dict[str, Tensor]


def state_dict(layout: str, encoder: Encoder) -> State:
    """Return the encoder's state dict in this layout, without the embedding table. The tensors are copies."""
    ours = encoder.state_dict()
    state: State = {}
    for index in range(encoder.config.n_layers):
        begin = f"blocks.{index}."
        block = {name.removeprefix(begin): tensor for name, tensor in ours.items() if name.startswith(begin)}
        prefix = "" if layout == "attention-only" else f"layers.{index}."
        named = _BLOCKS[layout](block, encoder.config.n_heads)
        state |= {prefix + name: tensor for name, tensor in named.items()}
    if encoder.config.final_norm:
        weight, bias = {"raw-matrices": ("gamma", "beta"), "fused-qkv": ("norm.gamma", "norm.beta")}.get(
            layout, ("norm.weight", "norm.bias")
        )
        state |= {weight: ours["final_norm.weight"], bias: ours["final_norm.bias"]}
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


def saved(layout: str = "split-qkv") -> State:
    """Return the state dict of a small encoder, with the embedding table.

    The encoder has 2 heads, d_model 8 and d_ff 12.
    """
    sizes = {"vocab_size": 11, "d_model": 8, "n_heads": 2, "d_ff": 12, "n_layers": 2, "max_sequence_tokens": 24}
    encoder = random_encoder(EncoderConfig.from_mapping(sizes | VARIANTS.get(layout, {})), 0)
    return state_dict(layout, encoder) | {"embedding.weight": encoder.embeddings.tokens.weight.clone()}


def _rename(block: State, names: dict[str, str]) -> State:
    """Replace the first part of each tensor's name. If the first part is not in `names`, leave the tensor out."""
    return {
        new + name.removeprefix(old): tensor
        for old, new in names.items()
        for name, tensor in block.items()
        if name.startswith(f"{old}.")
    }


def _kinds(block: State) -> list[str]:
    return [kind for kind in ("weight", "bias") if f"attention.qkv.{kind}" in block]


def _per_head_linears(block: State, n_heads: int) -> State:
    state = {
        f"W_{letter}.{head}.{kind}": rows
        for kind in _kinds(block)
        for letter, part in zip("QKV", block[f"attention.qkv.{kind}"].chunk(3), strict=True)
        for head, rows in enumerate(part.chunk(n_heads))
    }
    return state | _rename(
        block,
        {
            "attention.output": "W_O",
            "attention_norm": "norm1",
            "feed_forward.inner": "ffn.0",
            "feed_forward.outer": "ffn.2",
            "feed_forward_norm": "norm2",
        },
    )


def _raw_matrices(block: State, _: int) -> State:
    q, k, v = block["attention.qkv.weight"].chunk(3)
    return {
        "W_Q": q.T,
        "W_K": k.T,
        "W_V": v.T,
        "W_O": block["attention.output.weight"].T,
        "gamma1": block["attention_norm.weight"],
        "beta1": block["attention_norm.bias"],
        "W1": block["feed_forward.inner.weight"].T,
        "b1": block["feed_forward.inner.bias"],
        "W2": block["feed_forward.outer.weight"].T,
        "b2": block["feed_forward.outer.bias"],
        "gamma2": block["feed_forward_norm.weight"],
        "beta2": block["feed_forward_norm.bias"],
    }


def _fused_qkv(block: State, n_heads: int) -> State:
    state: State = {}
    for kind in _kinds(block):
        q, k, v = (part.chunk(n_heads) for part in block[f"attention.qkv.{kind}"].chunk(3))
        rows = [row for head in range(n_heads) for part in (q, k, v) for row in part[head]]
        state[f"attention.qkv_layer.{kind}"] = torch.stack(rows)
    for number, norm in (("1", "attention_norm"), ("2", "feed_forward_norm")):
        state[f"norm{number}.gamma"], state[f"norm{number}.beta"] = block[f"{norm}.weight"], block[f"{norm}.bias"]
    names = {"inner": "ffn.linear1", "outer": "ffn.linear2"}
    return (
        state
        | _rename(block, {"attention.output": "attention.linear_layer"})
        | _rename(block, {f"feed_forward.{ours}": theirs for ours, theirs in names.items()})
    )


def _attention_only(block: State, n_heads: int) -> State:
    state = {
        f"W_{letter}.{head}": rows.T
        for letter, part in zip("QKV", block["attention.qkv.weight"].chunk(3), strict=True)
        for head, rows in enumerate(part.chunk(n_heads))
    }
    return state | {"W_O": block["attention.output.weight"].T}


def _split_qkv(block: State, _: int) -> State:
    state = {
        f"attention.W_{letter}.{kind}": rows
        for kind in _kinds(block)
        for letter, rows in zip("QKV", block[f"attention.qkv.{kind}"].chunk(3), strict=True)
    }
    return state | _rename(
        block,
        {
            "attention.output": "attention.W_O",
            "attention_norm": "norm1",
            "feed_forward.inner": "feed_forward.linear1",
            "feed_forward.outer": "feed_forward.linear2",
            "feed_forward_norm": "norm2",
        },
    )


def _torch_native(block: State, _: int) -> State:
    state = {f"self_attn.in_proj_{kind}": block[f"attention.qkv.{kind}"] for kind in _kinds(block)}
    return state | _rename(
        block,
        {
            "attention.output": "self_attn.out_proj",
            "attention_norm": "norm1",
            "feed_forward.inner": "linear1",
            "feed_forward.outer": "linear2",
            "feed_forward_norm": "norm2",
        },
    )


_BLOCKS = {
    "per-head-linears": _per_head_linears,
    "raw-matrices": _raw_matrices,
    "fused-qkv": _fused_qkv,
    "attention-only": _attention_only,
    "split-qkv": _split_qkv,
    "torch-native": _torch_native,
}
