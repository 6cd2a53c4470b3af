"""Builds an encoder from a state dict.

The layout (the scheme of the weight names) and the sizes are found in the state dict. An error lists the settings that
the user must add.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from encserve_export.core.errors import (
    ConfigError,
    EmbeddingTableError,
    UnknownLayoutError,
    UnsupportedModelError,
    WeightNamesError,
    WeightShapeError,
)
from encserve_export.core.precision import SINUSOID_TOLERANCE
from encserve_export.models.own.config import CHOICES, EncoderConfig, Input, Position
from encserve_export.models.own.encoder import Encoder, sinusoids
from encserve_export.models.own.layouts import StackLayout, known_layouts
from encserve_export.models.own.layouts.stack import ATTENTION_NORM, QKV, Stack
from encserve_export.models.tensors import check_values, listed

# Patterns for the names of token embedding tables and of position tables. Any path, such as "model.", may come before a
# name.
_TABLES = r"(?:.+\.)?(?:W_embed|(?:(?:tok|token|word|src|input)_)?(?:emb|embed|embedding|embeddings)\.weight)"
_POSITIONS = r"(?:.+\.)?(?:pe|PE|(?:pos|position|positional)_(?:emb|embed|embedding|embeddings)(?:\.weight)?)"
_TABLE_NAMES = (
    "W_embed or embedding.weight. Instead of embedding: emb, embed, embeddings. "
    "Allowed prefixes: tok_, token_, word_, src_, input_"
)
_POSITION_NAMES = (
    "pe, PE or pos_embedding. Instead of embedding: emb, embed, embeddings. "
    "Instead of pos: position, positional. Allowed suffix: .weight"
)
_FLAG = ("true", "false")

# The default of `max_sequence_tokens`.
DEFAULT_LONGEST = 512


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table or a position table.

    Attributes:
        name: The table's name in its file, for error messages.
        values: One row per token or position, (rows, d_model).
    """

    name: str
    values: Tensor


@dataclasses.dataclass(frozen=True)
class CheckpointEncoder:
    """An encoder built from a checkpoint.

    Attributes:
        encoder: The encoder with the weights of the checkpoint.
        layout: The name of the checkpoint's layout.
        remarks: Messages that tell the user which decisions `find_encoder` made.
    """

    encoder: Encoder
    layout: str
    remarks: tuple[str, ...]


def rename_tensors(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Rename the tensors of a checkpoint.

    Args:
        tensors: The state dict.
        names: Old parts of names and their replacements: {"blocks": "layers", "pos.weight": "pos_embedding.weight"}. An
            old part consists of one or more whole words between dots. It may be anywhere in a name.

    Raises:
        WeightNamesError: No name contains an old part, or two tensors would get the same name.
    """
    new_names = {name: name for name in tensors}
    for old, new in names.items():
        renamed = {name: f".{current}.".replace(f".{old}.", f".{new}.")[1:-1] for name, current in new_names.items()}
        if renamed == new_names:
            raise WeightNamesError(f"--rename {old}={new}: no name contains {old}; the names are {_patterns(tensors)}")
        new_names = renamed
    result: dict[str, Tensor] = {}
    for name, new in new_names.items():
        if new in result:
            raise WeightNamesError(f"--rename would give two weights the name {new}; the second is {name}")
        result[new] = tensors[name]
    return result


def find_encoder(
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    *,
    embeddings: Table | None = None,
    layout: str | None = None,
    model_input: Input = "token_ids",
    max_sequence_tokens: int | None = None,
) -> CheckpointEncoder:
    """Recognise the layout of a state dict and build the encoder.

    Args:
        tensors: The state dict.
        settings: Fields of EncoderConfig. They must not contradict the weights.
        embeddings: The embedding table, if the state dict has none.
        layout: The layout's name; None to detect the layout.
        model_input: The encoder's input. "embeddings" needs no embedding table, and ignores a table in the state dict.
        max_sequence_tokens: The longest sequence in tokens. This argument overrides the field in `settings`. The
            default is 512, or the length of the position table if the table is shorter.

    Raises:
        ExportError: The state dict cannot be used. The subclass shows the cause.
    """
    stack = _find_stack(tensors, layout)
    positions = _position_table(tensors)
    table = _embedding_table(tensors, embeddings)
    _check_names(tensors, stack, positions, table, model_input)
    known: dict[str, Any] = {
        **stack.sizes(tensors),
        "input": model_input,
        "attention_bias": stack.attention_bias,
        "final_norm": stack.final_norm,
    }
    remarks: list[str] = []
    if model_input == "embeddings":
        known |= {"vocab_size": 0, "pad_token_id": 0, "scale_embedding": False}
        if embeddings is not None:
            raise EmbeddingTableError(
                f"the model takes vectors, so it needs no embedding table: remove --embeddings {embeddings.name}"
            )
        if table is not None:
            remarks.append(f"{table.name} is left out: the input is embeddings")
            table = None
    else:
        known["vocab_size"] = _vocab_size(table, known["d_model"])
    if positions is not None:
        _check_width(positions, known["d_model"])
        known["position"], remark = _judge_positions(positions, settings)
        remarks.append(remark)
    config = _config(_join_fields(stack.layout, known, settings), positions, max_sequence_tokens)
    if config.merge_heads == "reshape":
        remarks.append(
            "merge_heads is reshape: (heads, seq, d_k) becomes (seq, d_model) without a transpose, as in the code of "
            'fused-qkv. If your code transposes, give "merge_heads": "transpose" in --config'
        )
    tables: dict[str, tuple[str, Tensor]] = {}
    if table is not None:
        tables["embeddings.tokens.weight"] = (table.name, table.values)
    if positions is not None and config.position == "learned":
        tables["embeddings.positions"] = (positions.name, positions.values[: config.n_positions])
    return CheckpointEncoder(stack.load(config, tensors, tables), stack.layout.name, tuple(remarks))


def _find_stack(tensors: Mapping[str, Tensor], name: str | None) -> Stack:
    known = known_layouts()
    if name is not None and name not in known:
        raise UnknownLayoutError(f"layout must be one of {', '.join(known)}; was {name!r}")
    layouts = list(known.values()) if name is None else [known[name]]
    stacks = [stack for layout in layouts for stack in layout.find_stacks(tensors)]
    if not stacks:
        markers = ", ".join(f"{re.sub('{[a-z]+}', 'N', layout.marker)} ({layout.name})" for layout in layouts)
        raise UnknownLayoutError(
            f"no known layout has these names: {_patterns(tensors)}. The exporter recognises these names: {markers}. "
            "If only names differ, give --rename OLD=NEW. For any other module, use `encserve-export module "
            "FILE.py:FACTORY` or export_module. For a Hugging Face directory, use `encserve-export hf`"
        )
    if len(stacks) > 1:
        places = ", ".join(f"{stack.layout.name} at {stack.root + stack.layout.marker}" for stack in stacks)
        raise UnsupportedModelError(
            f"the checkpoint holds {len(stacks)} stacks of encoder blocks ({places}). Save the encoder alone, or "
            "choose a layout with --layout"
        )
    return stacks[0]


def _patterns(names: Iterable[str]) -> str:
    """List the names. Each number is replaced by N, so that all blocks share one entry."""
    return ", ".join(sorted({re.sub(r"(?<=\.)[0-9]+(?=\.|$)", "N", name) for name in names}))


def _check_names(
    tensors: Mapping[str, Tensor], stack: Stack, positions: Table | None, table: Table | None, model_input: Input
) -> None:
    """Refuse missing and surplus weight names.

    The error also lists surplus weights that may be embedding tables or position tables.
    """
    needed = {name for sources in stack.names().values() for name in sources}
    needed |= {it.name for it in (positions, table) if it is not None} & tensors.keys()
    missing, surplus = sorted(needed - tensors.keys()), sorted(tensors.keys() - needed)
    if not missing and not surplus:
        return
    kinds = {"missing": missing, "surplus": surplus}
    problems = "; ".join(f"{kind}: {listed(names)}" for kind, names in kinds.items() if names)
    advice = "Save the encoder with all of its weights, and without a head, a decoder or an optimizer"
    first = tensors.get(stack.sources(0, QKV)[0][0])
    widths = set() if first is None else set(first.shape)
    tables = [
        f"{name} {tuple(tensors[name].shape)}"
        for name in surplus
        if tensors[name].dim() in (2, 3) and tensors[name].shape[-1] in widths
    ]
    if tables and (positions is None or (table is None and model_input != "embeddings")):
        advice += (
            f". Is one of these a table: {listed(tables)}? Then rename it with --rename OLD=NEW. "
            f"Names for token embeddings: {_TABLE_NAMES}. Names for positions: {_POSITION_NAMES}"
        )
    raise WeightNamesError(f"the weights do not fit the layout {stack.layout.name}; {problems}. {advice}")


def _embedding_table(tensors: Mapping[str, Tensor], separate: Table | None) -> Table | None:
    tables = sorted(name for name in tensors if re.fullmatch(_TABLES, name))
    if separate is not None:
        if tables:
            raise EmbeddingTableError(
                f"the checkpoint holds an embedding table, {', '.join(tables)}; remove --embeddings"
            )
        return Table(f"--embeddings {separate.name}", separate.values)
    if len(tables) > 1:
        raise EmbeddingTableError(
            f"the checkpoint holds several embedding tables: {', '.join(tables)}; save only the encoder's table"
        )
    return Table(tables[0], tensors[tables[0]]) if tables else None


def _vocab_size(table: Table | None, d_model: int) -> int:
    if table is None:
        raise EmbeddingTableError(
            "the checkpoint holds no embedding table. Give its file with --embeddings: one matrix of (vocab_size, "
            f"d_model). Allowed table names in a checkpoint: {_TABLE_NAMES}. Rename your table with --rename OLD=NEW. "
            "Or give --input embeddings. Then callers must send vectors instead of token ids"
        )
    _check_width(table, d_model)
    return len(table.values)


def _position_table(tensors: Mapping[str, Tensor]) -> Table | None:
    """Return the position table as (rows, d_model), without a batch axis. Return None if there is no such table."""
    # If several names match, this function takes the first name. `_check_names` refuses the other names as surplus.
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


def _judge_positions(positions: Table, settings: Mapping[str, Any]) -> tuple[Position, str]:
    """Decide whether a position table is sinusoidal, and describe the decision.

    A sinusoidal table is computed again in float64, and can then have any length. If the settings ask for a learned
    table, or the table is not sinusoidal, the rows of the table are used unchanged.
    """
    rows, d_model = positions.values.shape
    difference = math.inf
    if d_model % 2 == 0:
        difference = float((positions.values.double() - sinusoids(rows, d_model)).abs().max())
    is_sinusoid = difference <= SINUSOID_TOLERANCE
    figures = f"largest difference {difference:.1e}, tolerance {SINUSOID_TOLERANCE:.1e}"
    if is_sinusoid and settings.get("position") != "learned":
        return "sinusoidal", f"{positions.name} is the sinusoid ({figures}) and is computed again in float64"
    if settings.get("position") == "sinusoidal":
        raise ConfigError(
            f"position is sinusoidal in --config, but {positions.name} is not the sinusoid ({figures}). To use the "
            f"rows of {positions.name}, remove position from --config"
        )
    kind = "the sinusoid" if is_sinusoid else "not the sinusoid"
    return "learned", f"{positions.name} is {kind} ({figures}); its rows are used"


def _join_fields(layout: StackLayout, known: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the user's settings with the fields that follow from the weights.

    Raises:
        ConfigError: A field has contradictory values in the weights and in the settings, or has no value. The message
            lists all such fields.
    """
    known = dict(known)
    needed: dict[str, tuple[str, ...]] = {} if "scale_embedding" in known else {"scale_embedding": _FLAG}
    if ATTENTION_NORM in layout.parts:
        needed["norm"] = ("post", "pre")
    else:
        known["norm"] = "none"
        needed["residual"] = _FLAG
    if known["d_ff"]:
        needed["activation"] = CHOICES["activation"]
    if "n_heads" not in known:
        needed["n_heads"] = (f"a divisor of {known['d_model']}",)
    if "position" not in known:
        needed["position"] = ("sinusoidal", "none")
    conflicts = [
        f"{name} is {json.dumps(value)} in the weights, {json.dumps(settings[name])} in --config"
        for name, value in known.items()
        if settings.get(name, value) != value
    ] + [
        f"{name} must be {' or '.join(choices)} for these weights, is {json.dumps(settings[name])} in --config"
        for name, choices in needed.items()
        if name in CHOICES and name in settings and settings[name] not in choices
    ]
    if conflicts:
        raise ConfigError(f"the checkpoint and the configuration contradict each other: {'; '.join(conflicts)}")
    missing = [f"{name} ({', '.join(choices)})" for name, choices in needed.items() if name not in settings]
    if missing:
        raise ConfigError(
            f"weights in the layout {layout.name} do not show {'; '.join(missing)}: give each of these fields in the "
            "JSON file of --config"
        )
    return {"merge_heads": layout.merge_heads, **settings, **known}


def _config(fields: Mapping[str, Any], positions: Table | None, max_sequence_tokens: int | None) -> EncoderConfig:
    """Return the configuration. The default of `max_sequence_tokens` is as in `find_encoder`."""
    asked = fields.get("max_sequence_tokens") if max_sequence_tokens is None else max_sequence_tokens
    longest = DEFAULT_LONGEST if asked is None else asked
    config = EncoderConfig.from_mapping({**fields, "max_sequence_tokens": longest})
    if positions is None:
        return config
    rows = len(positions.values) - config.position_offset
    if asked is None:
        return dataclasses.replace(config, max_sequence_tokens=min(DEFAULT_LONGEST, rows))
    if config.position == "learned" and longest > rows:
        raise ConfigError(f"max_sequence_tokens must be at most {rows}, the rows of {positions.name}; was {longest}")
    return config
