"""One `nn.Linear` to Q, K and V whose rows run head by head: `layers.0.attention.qkv_layer.weight`.

The notebook's code reshapes (batch, heads, seq, d_k) to (batch, seq, d_model) without a transpose, so weights trained
with the code need "merge_heads": "reshape", the default. Models with a transpose need "merge_heads": "transpose".
"""

from encserve_export.models.own.layouts.stack import Part, StackLayout, linear

LAYOUT = StackLayout(
    name="fused-qkv",
    summary="one qkv_layer whose rows run head by head",
    block="layers.{layer}.",
    parts={
        "attention.qkv": linear("attention.qkv_layer"),
        "attention.output": linear("attention.linear_layer"),
        "attention_norm": Part(("norm1.gamma",), ("norm1.beta",)),
        "feed_forward.inner": linear("ffn.linear1"),
        "feed_forward.outer": linear("ffn.linear2"),
        "feed_forward_norm": Part(("norm2.gamma",), ("norm2.beta",)),
    },
    final_norm=Part(("norm.gamma",), ("norm.beta",)),
    interleaved=True,
    merge_heads="reshape",
)
