"""Matrices without modules around them, for x @ W: `layers.0.W_Q`, `layers.0.gamma1`. Attention adds no biases."""

from encserve_export.models.own.layouts.stack import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    INNER,
    OUTER,
    OUTPUT,
    QKV,
    Part,
    StackLayout,
    matrix,
)

LAYOUT = StackLayout(
    name="raw-matrices",
    summary="bare matrices for x @ W, no attention biases",
    block="layers.{layer}.",
    parts={
        QKV: matrix("W_Q", "W_K", "W_V"),
        OUTPUT: matrix("W_O"),
        ATTENTION_NORM: Part(("gamma1",), ("beta1",)),
        INNER: matrix("W1", bias=("b1",)),
        OUTER: matrix("W2", bias=("b2",)),
        FEED_FORWARD_NORM: Part(("gamma2",), ("beta2",)),
    },
    final_norm=Part(("gamma",), ("beta",)),
)
