"""Layout of a single multi-head attention, without norms and without a feed-forward network.

Q, K and V have one matrix per head. All matrices are stored for x @ W. Examples of weight names: `W_Q.0`, `W_O`.
"""

from encserve_export.models.own.layouts.stack import StackLayout, matrix

LAYOUT = StackLayout(
    name="attention-only",
    summary="one multi-head attention, one matrix per head",
    block="",
    parts={"attention.qkv": matrix("W_Q.{head}", "W_K.{head}", "W_V.{head}"), "attention.output": matrix("W_O")},
)
