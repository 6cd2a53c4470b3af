"""Splits attention into blocks of queries, so that long sequences need no (heads, seq, seq) tensor.

The attention of a token needs only the token's own query, and all keys and values. So a loop can process the queries of
a long sequence in blocks. The attention scores of one block take at most 64 MiB for the whole batch. But a block has at
least 64 queries, even if their scores take more memory. The blocks do not change the results.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

# The largest number of attention scores of one block, over all heads and sequences of a batch. This number of scores
# takes 64 MiB in float32.
_SCORES = 2**24
# A block has at least this many queries, because CPUs multiply smaller matrices less efficiently.
_LEAST_QUERIES = 64
_PREFIX = "query_blocks"
# These operators may occur between queries·keys and the softmax, and between the softmax and the product with the
# values. Each operator is elementwise, or computes with the scores of one query. So each operator can run on a block of
# queries.
_BETWEEN = ("Add", "Mul", "Div", "Cast", "Softmax")


def block_queries(model: onnx.ModelProto, attention_mask: str, n_heads: int, element_type: int) -> None:
    """Rewrites a graph in place. Each attention that matches a pattern then works in blocks of queries.

    The pattern is queries·keys, a scale, the sum with a bias, a softmax, and the product with the values. Attention
    that does not match the pattern is not changed.

    Args:
        model: The graph. It must not output attention weights.
        attention_mask: The name of the graph's input of shape (batch, seq).
        n_heads: The number of heads of each attention.
        element_type: The type of queries, keys and values, an `onnx.TensorProto.DataType`.
    """
    graph = model.graph
    nodes = list(graph.node)
    made_by = {name: node for node in nodes for name in node.output}
    used_by: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            used_by.setdefault(name, []).append(node)
    choices: dict[str, NodeProto] = {}
    moved: set[str] = set()
    for softmax in (node for node in nodes if node.op_type == "Softmax"):
        attention = _find_attention(softmax, made_by, used_by)
        if attention and _bias_of(attention):
            choices[attention[-1].name] = _choice(attention, element_type)
            moved.update(node.name for node in attention[:-1])
    if choices:
        del graph.node[:]
        graph.initializer.extend(_constants(n_heads))
        graph.node.extend(_sizes(attention_mask))
        graph.node.extend(choices.get(node.name, node) for node in nodes if node.name not in moved)


def _find_attention(
    softmax: NodeProto, made_by: Mapping[str, NodeProto], used_by: Mapping[str, list[NodeProto]]
) -> list[NodeProto]:
    """Returns the nodes of the attention around a softmax: from queries·keys to weights·values, and their constants.

    The nodes are in the order of the computation. The list is empty if the attention does not match the pattern.
    """
    before: list[NodeProto] = []
    node = softmax
    while node.op_type != "MatMul":
        source = made_by.get(node.input[0])
        if source is None or source.op_type not in (*_BETWEEN, "MatMul") or len(used_by[node.input[0]]) != 1:
            return []
        node = source
        constants = (made_by[name] for name in node.input if name in made_by)
        before += [node, *(constant for constant in constants if constant.op_type == "Constant")]
    after = [softmax]
    while after[-1].op_type != "MatMul":
        users = used_by.get(after[-1].output[0], [])
        if len(users) != 1 or users[0].op_type not in (*_BETWEEN, "MatMul") or users[0].input[0] != after[-1].output[0]:
            return []
        after.append(users[0])
    return [*before[::-1], *after]


def _bias_of(attention: list[NodeProto]) -> str:
    """Returns the name of the bias that is added to the scores; empty if there is no bias, or more than one bias."""
    made = _made(attention)
    biases = [name for node in attention if node.op_type == "Add" for name in node.input if name not in made]
    return biases[0] if len(biases) == 1 else ""


def _constants(n_heads: int) -> Iterable[onnx.TensorProto]:
    values = {"zero": 0, "one": 1, "queries_axis": 2, "scores_of_a_head": _SCORES // n_heads, "least": _LEAST_QUERIES}
    return (numpy_helper.from_array(np.array([value], np.int64), _name(name)) for name, value in values.items())


def _sizes(attention_mask: str) -> Iterator[NodeProto]:
    """Yields the nodes that compute the number of queries in a block, and the number of blocks."""
    yield _node("Size", [attention_mask], "padded_tokens")
    yield _node("Div", [_name("scores_of_a_head"), _name("padded_tokens")], "fitting")
    yield _node("Max", [_name("fitting"), _name("least")], "queries")
    yield _node("Shape", [attention_mask], "seq", start=1, end=2)  # (1)
    yield _node("Add", [_name("seq"), _name("queries")], "raised")
    yield _node("Sub", [_name("raised"), _name("one")], "before_last")
    yield _node("Div", [_name("before_last"), _name("queries")], "blocks")  # (1), rounded up
    yield _node("LessOrEqual", [_name("blocks"), _name("one")], "one_is_enough")  # (1)


def _choice(attention: list[NodeProto], element_type: int) -> NodeProto:
    """Returns the `If` node that replaces the nodes of an attention. Its output is (batch, heads, seq, d_k).

    If all queries fit into one block, the original nodes run, because runtimes can fuse these nodes. Otherwise a loop
    over blocks runs.
    """
    scope, rows = attention[0].name, attention[-1].output[0]
    once, looped = f"{scope}/once/", f"{scope}/blocks/"
    nodes = [_renamed(node, {name: once + name for node in attention for name in node.output}) for node in attention]
    return helper.make_node(
        "If",
        [_name("one_is_enough")],
        [rows],
        f"{scope}/If",
        then_branch=helper.make_graph(nodes, f"{once}body", [], [_value(once + rows, element_type)]),
        else_branch=helper.make_graph(
            _loop(attention, element_type), f"{looped}body", [], [_value(looped + rows, element_type)]
        ),
    )


def _loop(attention: list[NodeProto], element_type: int) -> list[NodeProto]:
    """Returns the nodes of an attention in a loop over blocks of queries."""
    first, last = attention[0], attention[-1]
    scope, inside = f"{first.name}/blocks/", f"{first.name}/block/"
    queries, rows, bias = first.input[0], last.output[0], _bias_of(attention)
    none, done = f"{inside}none", f"{inside}done"  # (batch, heads, 0, d_k), (batch, heads, finished queries, d_k)
    own = {queries: f"{inside}queries", bias: f"{inside}bias"}
    own |= {name: inside + name for node in attention for name in node.output}
    nodes = [
        helper.make_node("Mul", [f"{inside}i", _name("queries")], [f"{inside}start"]),
        helper.make_node("Add", [f"{inside}start", _name("queries")], [f"{inside}end"]),
        helper.make_node("Slice", [queries, f"{inside}start", f"{inside}end", _name("queries_axis")], [own[queries]]),
        # The bias has one row per query, or a single row for all queries.
        helper.make_node("Shape", [bias], [f"{inside}bias_rows"], start=2, end=3),
        helper.make_node("Sub", [f"{inside}bias_rows", _name("one")], [f"{inside}last_bias"]),
        helper.make_node("Min", [f"{inside}start", f"{inside}last_bias"], [f"{inside}bias_start"]),
        helper.make_node("Slice", [bias, f"{inside}bias_start", f"{inside}end", _name("queries_axis")], [own[bias]]),
        *(_renamed(node, own) for node in attention),
        helper.make_node("Concat", [done, own[rows]], [f"{inside}rows"], axis=2),
        helper.make_node("Identity", [f"{inside}go"], [f"{inside}on"]),
    ]
    number = helper.make_tensor_value_info(f"{inside}i", onnx.TensorProto.INT64, [])
    go, on = (helper.make_tensor_value_info(inside + name, onnx.TensorProto.BOOL, []) for name in ("go", "on"))
    inputs, outputs = [number, go, _value(done, element_type)], [on, _value(f"{inside}rows", element_type)]
    body = helper.make_graph(nodes, f"{inside}body", inputs, outputs)
    return [
        helper.make_node("Slice", [queries, _name("zero"), _name("zero"), _name("queries_axis")], [none]),
        helper.make_node("Loop", [_name("blocks"), "", none], [scope + rows], f"{scope}Loop", body=body),
    ]


def _made(nodes: list[NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.output}


def _value(name: str, element_type: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, [None] * 4)


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """Returns a copy of a node with renamed inputs and outputs."""
    renamed = NodeProto()
    renamed.CopyFrom(node)
    renamed.input[:] = [names.get(name, name) for name in node.input]
    renamed.output[:] = [names.get(name, name) for name in node.output]
    return renamed


def _node(operator: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, inputs, [_name(output)], _name(operator, output), **attributes)


def _name(*parts: str) -> str:
    return "/".join(("", _PREFIX, *parts))
