"""Layout with a separate `nn.Linear` for each of Q, K, V and the output, such as `layers.0.attention.W_Q.weight`."""

from encserve_export.models.own.layouts.stack import StackLayout, linear

LAYOUT = StackLayout(
    name="split-qkv",
    summary="full-width W_Q, W_K, W_V and W_O",
    block="layers.{layer}.",
    parts={
        "attention.qkv": linear("attention.W_Q", "attention.W_K", "attention.W_V"),
        "attention.output": linear("attention.W_O"),
        "attention_norm": linear("norm1"),
        "feed_forward.inner": linear("feed_forward.linear1"),
        "feed_forward.outer": linear("feed_forward.linear2"),
        "feed_forward_norm": linear("norm2"),
    },
)
