"""One `nn.Linear` for each head of Q, K and V: `layers.0.W_Q.0.weight`, and `ffn` as a Sequential."""

from encserve_export.models.own.layouts.stack import StackLayout, linear

LAYOUT = StackLayout(
    name="per-head-linears",
    summary="one nn.Linear per head for Q, K and V",
    block="layers.{layer}.",
    parts={
        "attention.qkv": linear("W_Q.{head}", "W_K.{head}", "W_V.{head}"),
        "attention.output": linear("W_O"),
        "attention_norm": linear("norm1"),
        # Between the two stands the activation, which has no weights.
        "feed_forward.inner": linear("ffn.0"),
        "feed_forward.outer": linear("ffn.2"),
        "feed_forward_norm": linear("norm2"),
    },
)
