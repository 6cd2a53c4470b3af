"""Layout of bare matrices and vectors instead of `nn.Linear` and `nn.LayerNorm`, such as `layers.0.W_Q`.

Matrices are stored for the product x @ W. Attention has no biases.
"""

from encserve_export.models.own.layouts.stack import Part, StackLayout, matrix

LAYOUT = StackLayout(
    name="raw-matrices",
    summary="bare matrices for x @ W, no attention biases",
    block="layers.{layer}.",
    parts={
        "attention.qkv": matrix("W_Q", "W_K", "W_V"),
        "attention.output": matrix("W_O"),
        "attention_norm": Part(("gamma1",), ("beta1",)),
        "feed_forward.inner": matrix("W1", bias=("b1",)),
        "feed_forward.outer": matrix("W2", bias=("b2",)),
        "feed_forward_norm": Part(("gamma2",), ("beta2",)),
    },
    final_norm=Part(("gamma",), ("beta",)),
)
