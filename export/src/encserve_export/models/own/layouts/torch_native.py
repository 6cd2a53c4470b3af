"""PyTorch's own `torch.nn.TransformerEncoder`: `layers.0.self_attn.in_proj_weight`."""

from encserve_export.models.own.layouts.stack import (
    ATTENTION_NORM,
    FEED_FORWARD_NORM,
    INNER,
    OUTER,
    OUTPUT,
    QKV,
    Part,
    StackLayout,
    linear,
)

LAYOUT = StackLayout(
    name="torch-native",
    summary="torch.nn.TransformerEncoder, norm_first or not",
    block="layers.{layer}.",
    parts={
        QKV: Part(("self_attn.in_proj_weight",), ("self_attn.in_proj_bias",)),
        OUTPUT: linear("self_attn.out_proj"),
        ATTENTION_NORM: linear("norm1"),
        INNER: linear("linear1"),
        OUTER: linear("linear2"),
        FEED_FORWARD_NORM: linear("norm2"),
    },
)
