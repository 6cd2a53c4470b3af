"""One multi-head attention and nothing around it, a matrix for x @ W for each head: `W_Q.0`, `W_O`."""

from encserve_export.models.own.layouts.stack import StackLayout, matrix

LAYOUT = StackLayout(
    name="attention-only",
    summary="one multi-head attention, a bare matrix per head",
    block="",
    parts={"attention.qkv": matrix("W_Q.{head}", "W_K.{head}", "W_V.{head}"), "attention.output": matrix("W_O")},
)
