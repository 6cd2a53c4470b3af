"""One `nn.Linear` for each head of Q, K and V: `layers.0.W_Q.0.weight`, and `ffn` as a Sequential."""

from encserve_export.models.own.layouts.stack import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    INNER,
    OUTER,
    OUTPUT,
    QKV,
    StackLayout,
    linear,
)

LAYOUT = StackLayout(
    name="per-head-linears",
    summary="one nn.Linear per head for Q, K and V",
    block="layers.{layer}.",
    parts={
        QKV: linear("W_Q.{head}", "W_K.{head}", "W_V.{head}"),
        OUTPUT: linear("W_O"),
        ATTENTION_NORM: linear("norm1"),
        # Between the two stands the activation, which has no weights.
        INNER: linear("ffn.0"),
        OUTER: linear("ffn.2"),
        FEED_FORWARD_NORM: linear("norm2"),
    },
)
