"""Four `nn.Linear` of full width in each attention: `layers.0.attention.W_Q.weight`."""

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
    name="split-qkv",
    summary="full-width W_Q, W_K, W_V and W_O",
    block="layers.{layer}.",
    parts={
        QKV: linear("attention.W_Q", "attention.W_K", "attention.W_V"),
        OUTPUT: linear("attention.W_O"),
        ATTENTION_NORM: linear("norm1"),
        INNER: linear("feed_forward.linear1"),
        OUTER: linear("feed_forward.linear2"),
        FEED_FORWARD_NORM: linear("norm2"),
    },
)
