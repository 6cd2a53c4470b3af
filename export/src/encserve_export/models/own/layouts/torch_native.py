"""Layout of PyTorch's own `torch.nn.TransformerEncoder`, with names such as `layers.0.self_attn.in_proj_weight`."""

from encserve_export.models.own.layouts.stack import Part, StackLayout, linear

LAYOUT = StackLayout(
    name="torch-native",
    summary="torch.nn.TransformerEncoder, with or without norm_first",
    block="layers.{layer}.",
    parts={
        "attention.qkv": Part(("self_attn.in_proj_weight",), ("self_attn.in_proj_bias",)),
        "attention.output": linear("self_attn.out_proj"),
        "attention_norm": linear("norm1"),
        "feed_forward.inner": linear("linear1"),
        "feed_forward.outer": linear("linear2"),
        "feed_forward_norm": linear("norm2"),
    },
)
