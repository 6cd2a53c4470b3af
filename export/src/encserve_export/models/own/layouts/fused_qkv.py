"""One `nn.Linear` to Q, K and V whose rows run head by head: `layers.0.attention.qkv_layer.weight`.

Code of this family reshapes (batch, heads, seq, d_k) straight to (batch, seq, d_model), which mixes up heads and
positions. Its own text says that the heads are put side by side, and so it is done here.
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
    formula="the heads are concatenated, as the text of this layout's code says; the code reshapes (batch, heads, "
    "seq, d_k) to (batch, seq, d_model) without a transpose, which mixes heads and positions and gives other rows",
)
