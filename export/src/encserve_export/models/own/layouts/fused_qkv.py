"""Layout with one `nn.Linear` for Q, K and V, such as `layers.0.attention.qkv_layer.weight`.

The rows of this weight are ordered by head. The model code of these checkpoints merges the heads without the usual
transpose. The code reshapes (batch, heads, seq, d_k) directly to (batch, seq, d_model). So `merge_heads` is "reshape"
by default. A model that was trained with the transpose needs `"merge_heads": "transpose"` in --config.
"""

from encserve_export.models.own.layouts.stack import Part, StackLayout, linear

LAYOUT = StackLayout(
    name="fused-qkv",
    summary="one qkv_layer with rows ordered by head",
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
