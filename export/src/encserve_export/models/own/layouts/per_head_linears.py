"""Layout with one `nn.Linear` per head for each of Q, K and V, such as `layers.0.W_Q.0.weight`.

The feed-forward network `ffn` is an `nn.Sequential`.
"""

from encserve_export.models.own.layouts.stack import StackLayout, linear

LAYOUT = StackLayout(
    name="per-head-linears",
    summary="one nn.Linear per head for Q, K and V",
    block="layers.{layer}.",
    parts={
        "attention.qkv": linear("W_Q.{head}", "W_K.{head}", "W_V.{head}"),
        "attention.output": linear("W_O"),
        "attention_norm": linear("norm1"),
        # `ffn.1` is the activation, which has no weights.
        "feed_forward.inner": linear("ffn.0"),
        "feed_forward.outer": linear("ffn.2"),
        "feed_forward_norm": linear("norm2"),
    },
)
