"""Finds the encoder in a bare checkpoint: its layout, what its shapes tell, and what has to be said beside them."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from encserve_export.ground.errors import (
    ConfigError,
    EmbeddingTableError,
    UnknownLayoutError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
)
from encserve_export.ground.precision import SINUSOID_TOLERANCE
from encserve_export.models.own.config import CHOICES, EncoderConfig, Input, Position
from encserve_export.models.own.encoder import Encoder, sinusoids
from encserve_export.models.own.layouts import StackLayout, known_layouts
from encserve_export.models.own.layouts.base import check_values, listed
from encserve_export.models.own.layouts.stack import ATTENTION_NORM, QKV, Stack

# The names under which tables are found, wherever in a larger model: of token embeddings, and of positions.
_TABLES = r"(?:.+\.)?(?:W_embed|(?:(?:tok|token|word|src|input)_)?(?:emb|embed|embedding|embeddings)\.weight)"
_POSITIONS = r"(?:.+\.)?(?:pe|PE|(?:pos|position|positional)_(?:emb|embed|embedding|embeddings)(?:\.weight)?)"

_TABLE_NAMES = (
    "W_embed or embedding.weight (also emb, embed, embeddings; with tok_, token_, word_, src_ or input_ before it)"
)
_POSITION_NAMES = (
    "pe, PE or pos_embedding (also emb, embed, embeddings; position_ or positional_ before it; .weight behind it)"
)

_FLAG = ("true", "false")

# The longest sequence where nobody asks for another.
DEFAULT_LONGEST = 512


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table or a position table.

    Attributes:
        name: Its name among the weights.
        values: (rows, d_model).
    """

    name: str
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Found:
    """The encoder in a checkpoint.

    Attributes:
        encoder: The encoder.
        layout: The name of its layout.
        remarks: What was decided on the way, for people.
    """

    encoder: Encoder
    layout: str
    remarks: tuple[str, ...]


def find_encoder(
    tensors: Mapping[str, Tensor],
    given: Mapping[str, Any],
    *,
    embeddings: Table | None = None,
    layout: str | None = None,
    model_input: Input = "token_ids",
    max_sequence_tokens: int | None = None,
) -> Found:
    """Recognises the layout of a state dict and builds the encoder.

    Args:
        tensors: The state dict.
        given: Fields of EncoderConfig. Those that the weights tell may be left out and must not contradict them.
        embeddings: The embedding table, where it is apart from the state dict.
        layout: The layout's name; without one it is recognised.
        model_input: What the encoder is to take. For "embeddings" no table of them is needed; one that is there is left
            out.
        max_sequence_tokens: The longest sequence, instead of `given`'s; by default 512, or as far as a table reaches.

    Raises:
        ExportError: One of its kinds, by cause.
    """
    EncoderConfig.check_names(given)
    stack = _find_stack(tensors, layout)
    positions = _position_table(tensors)
    table = _embedding_table(tensors, embeddings)
    tables = [found.name for found in (positions, table) if found and found.name in tensors]
    try:
        stack.check_names(tensors, tables)
    except WeightNamesError as error:
        is_whole = positions is not None and (table is not None or model_input == "embeddings")
        advice = "" if is_whole else _tables_by_other_names(tensors, stack, tables)
        raise WeightNamesError(f"{error}{advice}") from error
    sizes = stack.sizes(tensors)
    told: dict[str, Any] = {**sizes, "input": model_input, "attention_bias": stack.attention_bias}
    told |= {"final_norm": stack.final_norm, "embedding_norm": False, "n_token_types": 0}
    remarks: list[str] = []
    if model_input == "embeddings":
        if embeddings is not None:
            raise EmbeddingTableError(
                f"the input is embeddings, so {embeddings.name} would never be used; leave out --embeddings"
            )
        told |= {"vocab_size": 0, "pad_token_id": 0, "scale_embedding": False}
        if table is not None:
            remarks.append(f"{table.name} is left out: the input is embeddings")
    else:
        told["vocab_size"] = _vocab_size(table, sizes["d_model"])
    if positions is not None:
        _check_width(positions, sizes["d_model"])
        told["position"], remark = _judge_positions(positions, given)
        remarks.append(remark)
    fields = _settle(stack.layout, told, given)
    longest = fields.get("max_sequence_tokens") if max_sequence_tokens is None else max_sequence_tokens
    fields["max_sequence_tokens"] = _longest(longest, positions, fields)
    config = EncoderConfig.from_mapping(fields)
    if config.merge_heads == "reshape":
        remarks.append(
            "merge_heads is reshape: (heads, seq, d_k) becomes (seq, d_model) without a transpose, as the code of "
            'fused-qkv does it. If your code transposes, give "merge_heads": "transpose" in --config'
        )
    return Found(_build(tensors, stack, config, table, positions), stack.layout.name, tuple(remarks))


def _build(
    tensors: Mapping[str, Tensor], stack: Stack, config: EncoderConfig, table: Table | None, positions: Table | None
) -> Encoder:
    names: dict[str, tuple[str, ...]] = {}
    used = dict(tensors)
    if table is not None and config.input == "embeddings":
        del used[table.name]
    elif table is not None:
        names["embeddings.tokens.weight"] = (table.name,)
        used[table.name] = table.values
    if positions is not None:
        # A sinusoid has no weights in the Encoder.
        del used[positions.name]
        if config.position == "learned":
            names["embeddings.positions"] = (positions.name,)
            used[positions.name] = positions.values[: config.n_positions]
    return stack.read(config, names).load(used)


def _find_stack(tensors: Mapping[str, Tensor], wanted: str | None) -> Stack:
    known = known_layouts()
    if wanted is not None and wanted not in known:
        raise UnknownLayoutError(f"layout must be one of {', '.join(known)}; was {wanted!r}")
    tried = list(known.values()) if wanted is None else [known[wanted]]
    stacks = [stack for layout in tried for stack in layout.find_stacks(tensors)]
    if not stacks:
        raise UnknownLayoutError(_unknown(tensors, tried))
    if len(stacks) > 1:
        found = ", ".join(f"{stack.layout.name} at {stack.root + stack.layout.marker}" for stack in stacks)
        raise UnsupportedModelError(
            f"the checkpoint holds {len(stacks)} stacks ({found}); this exports one encoder: save it alone, or choose "
            "among layouts with --layout"
        )
    return stacks[0]


def _unknown(tensors: Mapping[str, Tensor], tried: list[StackLayout]) -> str:
    # Numbers are folded: the blocks of a stack have the same names.
    names = sorted({re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "N", name) for name in tensors})
    layouts = "; ".join(f"{layout.name} by {re.sub('{[a-z]+}', 'N', layout.marker)}" for layout in tried)
    return (
        f"no layout is recognised in these names: {', '.join(names)}. Looked for {layouts}. "
        "A Hugging Face directory is exported with encserve-export hf; another layout is one more file in layouts/"
    )


def _embedding_table(tensors: Mapping[str, Tensor], apart: Table | None) -> Table | None:
    tables = sorted(name for name in tensors if re.fullmatch(_TABLES, name))
    if apart is None and len(tables) > 1:
        raise EmbeddingTableError(
            f"the checkpoint holds several embedding tables: {', '.join(tables)}; save the encoder's alone"
        )
    if apart is not None and tables:
        raise EmbeddingTableError(
            f"the checkpoint holds an embedding table of its own, {', '.join(tables)}; leave out --embeddings"
        )
    if apart is not None:
        # Named for its file, so that it has no other weight's name.
        return Table(f"--embeddings {apart.name}", apart.values)
    return Table(tables[0], tensors[tables[0]]) if tables else None


def _vocab_size(table: Table | None, d_model: int) -> int:
    if table is None:
        raise EmbeddingTableError(
            "the checkpoint holds no embedding table; give the file that does with --embeddings: one matrix of "
            "(vocab_size, d_model). Or give --input embeddings, and callers send vectors instead of token ids. In the "
            f"checkpoint itself a table is found by its name: {_TABLE_NAMES}"
        )
    _check_width(table, d_model)
    return len(table.values)


def _tables_by_other_names(tensors: Mapping[str, Tensor], stack: Stack, tables: Sequence[str]) -> str:
    """What else may be a table, and how tables are called; empty where nothing has their shape."""
    known = {*tables, *(name for sources in stack.names().values() for name in sources)}
    first = tensors.get(stack.sources(0, QKV)[0][0])
    widths = set() if first is None else set(first.shape)
    likely = [
        f"{name} {tuple(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name not in known and tensor.dim() in (2, 3) and tensor.shape[-1] in widths
    ]
    if not likely:
        return ""
    return (
        f". If one of {listed(likely)} is a table, save it under another name: of token embeddings {_TABLE_NAMES}; of "
        f"positions {_POSITION_NAMES}"
    )


def _position_table(tensors: Mapping[str, Tensor]) -> Table | None:
    """The table of positions without the axis of length 1 that stands for the batch."""
    # A second one is surplus, and is reported as such.
    name = min((name for name in tensors if re.fullmatch(_POSITIONS, name)), default=None)
    if name is None:
        return None
    check_values(name, tensors[name])
    values, shape = tensors[name], tuple(tensors[name].shape)
    if len(shape) == 3 and 1 in shape[:2]:
        values = values.flatten(0, 1)  # (rows, d_model)
    if values.dim() != 2 or 0 in shape:
        raise WeightShapeError(
            f"{name} must have the shape (rows, d_model), (1, rows, d_model) or (rows, 1, d_model); was {shape}"
        )
    return Table(name, values)


def _check_width(table: Table, d_model: int) -> None:
    shape = tuple(table.values.shape)
    if len(shape) != 2 or shape[0] == 0 or shape[1] != d_model:
        raise WeightShapeError(
            f"{table.name} must have the shape (rows, {d_model}), as wide as the checkpoint's d_model; was {shape}"
        )


def _judge_positions(positions: Table, given: Mapping[str, Any]) -> tuple[Position, str]:
    """Whether a table of positions is the sinusoid, and a remark on it.

    The sinusoid itself is computed anew, in float64 and for any length. A table that is something else is what the
    model was trained with, so its rows are used as they are.
    """
    rows, d_model = positions.values.shape
    difference = math.inf
    if d_model % 2 == 0:
        difference = float((positions.values.double() - sinusoids(rows, d_model)).abs().max())
    is_sinusoid = difference <= SINUSOID_TOLERANCE
    figures = f"largest difference {difference:.1e}, tolerance {SINUSOID_TOLERANCE:.1e}"
    if is_sinusoid and given.get("position") != "learned":
        return "sinusoidal", f"{positions.name} is the sinusoid ({figures}), which is computed anew"
    if given.get("position") == "sinusoidal":
        raise ConfigError(
            f"position is sinusoidal in the configuration, but {positions.name} is no sinusoid ({figures}); without "
            "the field its rows are used as they are"
        )
    kind = "the sinusoid" if is_sinusoid else "no sinusoid"
    return "learned", f"{positions.name} is {kind} ({figures}); its rows are used as they are"


def _settle(layout: StackLayout, told: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Joins what the weights tell and what is given.

    Raises:
        ConfigError: The two contradict each other, or something is told by neither; the text lists every such field.
    """
    own = dict(told)
    asked: dict[str, tuple[str, ...]] = {} if "scale_embedding" in told else {"scale_embedding": _FLAG}
    if ATTENTION_NORM in layout.parts:
        asked["norm"] = ("post", "pre")
    else:
        own["norm"] = "none"
        asked["residual"] = _FLAG
    if told["d_ff"]:
        asked["activation"] = CHOICES["activation"]
    if "n_heads" not in told:
        asked["n_heads"] = (f"a divisor of {told['d_model']}",)
    if "position" not in told:
        asked["position"] = ("sinusoidal", "none")
    against = [
        f"{name} is {json.dumps(own[name])} there, {json.dumps(given[name])} here"
        for name in own
        if name in given and given[name] != own[name]
    ] + [
        f"{name} is {' or '.join(choices)} there, {json.dumps(given[name])} here"
        for name, choices in asked.items()
        if name in CHOICES and name in given and given[name] not in choices
    ]
    if against:
        raise ConfigError(f"the checkpoint and the configuration contradict each other: {'; '.join(against)}")
    missing = [f"{name} ({', '.join(choices)})" for name, choices in asked.items() if name not in given]
    if missing:
        raise ConfigError(
            f"the weights, in the layout {layout.name}, do not tell {'; '.join(missing)}: give each in the JSON file "
            "that --config names"
        )
    return {"merge_heads": layout.merge_heads, **given, **own}


def _longest(wanted: Any, positions: Table | None, fields: Mapping[str, Any]) -> Any:
    """The longest sequence in tokens; a value of another type is left to EncoderConfig to refuse."""
    offset = fields.get("position_offset", 0)
    if positions is None or not isinstance(offset, int):
        return DEFAULT_LONGEST if wanted is None else wanted
    most = len(positions.values) - offset
    if wanted is None:
        return min(DEFAULT_LONGEST, most)
    if fields["position"] == "learned" and isinstance(wanted, int) and wanted > most:
        raise ConfigError(
            f"max_sequence_tokens must be at most {most}, as far as the rows of {positions.name} reach; was {wanted}"
        )
    return wanted
