"""Makes a traced graph attend block by block of queries, so that long sequences need no (heads, seq, seq) tensor.

A token's row of attention needs its own query, and all keys and values: so the queries of a long sequence go through in
a loop, some at a time, as many as keep the scores of the whole batch small. What is computed for each is the same.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

# Up to here a sequence's scores are small as they are; a model whose longest sequence is no longer needs no loop.
LONGEST_AT_ONCE = 1024
# Scores that are there at once, of all heads and all sequences of a batch: 64 MiB in float32.
_SCORES = 2**24
# A block has this many queries at least, or the matrix products are slow.
_LEAST_QUERIES = 64
_PREFIX = "query_blocks"


def block_queries(model: onnx.ModelProto, attention_mask: str, n_heads: int, element_type: int) -> None:
    """Changes a graph that was traced from an encoder, in place; it must not give attention weights.

    Args:
        model: The graph.
        attention_mask: Its input of (batch, seq).
        n_heads: The heads of each attention.
        element_type: The type that it computes attention in, an `onnx.TensorProto.DataType`.
    """
    graph = model.graph
    nodes = list(graph.node)
    made_by = {name: node for node in nodes for name in node.output}
    used_by = {name: node for node in nodes for name in node.input}
    choices: dict[str, NodeProto] = {}
    moved: set[str] = set()
    for softmax in (node for node in nodes if node.op_type == "Softmax"):
        attention = [*_scores(softmax, made_by), softmax, used_by[softmax.output[0]]]
        choices[attention[-1].name] = _choice(attention, element_type)
        moved.update(node.name for node in attention[:-1])
    del graph.node[:]
    graph.initializer.extend(_constants(n_heads))
    graph.node.extend(_sizes(attention_mask))
    graph.node.extend(choices.get(node.name, node) for node in nodes if node.name not in moved)


def _scores(softmax: NodeProto, made_by: dict[str, NodeProto]) -> list[NodeProto]:
    """The nodes from the product of queries and keys up to the softmax, in order, with their constants."""
    nodes: list[NodeProto] = []
    node = softmax
    while node.op_type != "MatMul":
        node = made_by[node.input[0]]
        constants = (made_by[name] for name in node.input if name in made_by)
        nodes += [node, *(constant for constant in constants if constant.op_type == "Constant")]
    return nodes[::-1]


def _constants(n_heads: int) -> Iterable[onnx.TensorProto]:
    values = {"zero": 0, "one": 1, "queries_axis": 2, "scores_of_a_head": _SCORES // n_heads, "least": _LEAST_QUERIES}
    return (numpy_helper.from_array(np.array([value], np.int64), _name(name)) for name, value in values.items())


def _sizes(attention_mask: str) -> Iterator[NodeProto]:
    """The queries of a block, and how many blocks there are."""
    yield _node("Size", [attention_mask], "padded_tokens")
    yield _node("Div", [_name("scores_of_a_head"), _name("padded_tokens")], "fitting")
    yield _node("Max", [_name("fitting"), _name("least")], "queries")
    yield _node("Shape", [attention_mask], "seq", start=1, end=2)  # (1)
    yield _node("Add", [_name("seq"), _name("queries")], "raised")
    yield _node("Sub", [_name("raised"), _name("one")], "before_last")
    yield _node("Div", [_name("before_last"), _name("queries")], "blocks")  # (1), rounded up
    yield _node("LessOrEqual", [_name("blocks"), _name("one")], "one_is_enough")  # (1)


def _choice(attention: list[NodeProto], element_type: int) -> NodeProto:
    """What stands in place of attention's nodes, from queries·keys to weights·values: (batch, heads, seq, d_k).

    Where all queries fit into one block it is the nodes themselves, which runtimes fuse, and else a loop.
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
    """Attention's nodes in a loop over blocks of queries."""
    first, last = attention[0], attention[-1]
    scope, inside = f"{first.name}/blocks/", f"{first.name}/block/"
    queries, rows = first.input[0], last.output[0]
    none, done = f"{inside}none", f"{inside}done"  # (batch, heads, 0, d_k), (batch, heads, queries so far, d_k)
    (bias,) = (
        name for node in attention if node.op_type == "Add" for name in node.input if name not in _made(attention)
    )
    own = {queries: f"{inside}queries", bias: f"{inside}bias"}
    own |= {name: inside + name for node in attention for name in node.output}
    nodes = [
        helper.make_node("Mul", [f"{inside}i", _name("queries")], [f"{inside}start"]),
        helper.make_node("Add", [f"{inside}start", _name("queries")], [f"{inside}end"]),
        helper.make_node("Slice", [queries, f"{inside}start", f"{inside}end", _name("queries_axis")], [own[queries]]),
        # The bias has a row for each query, or one for all.
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
    """The same node with other inputs and outputs."""
    renamed = NodeProto()
    renamed.CopyFrom(node)
    renamed.input[:] = [names.get(name, name) for name in node.input]
    renamed.output[:] = [names.get(name, name) for name in node.output]
    return renamed


def _node(operator: str, inputs: list[str], output: str, **attributes: Any) -> NodeProto:
    return helper.make_node(operator, inputs, [_name(output)], _name(operator, output), **attributes)


def _name(*parts: str) -> str:
    return "/".join(("", _PREFIX, *parts))
