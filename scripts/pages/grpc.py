"""Makes the page of the gRPC service, from the descriptors and comments of encoder.proto."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PROTO = Path(__file__).parent.parent.parent / "proto"
FILE = "encserve/v1/encoder.proto"
HEAD = f"""\
# gRPC

Every method, message and field of the service `encserve.v1.EncoderService`, written from
`proto/{FILE}` by `make docs`. [Other languages](../how-to/other-languages.md) shows how to make a client.
[Errors](errors.md) lists the reasons of errors, and [Limits](limits.md) the limits. If a field has no default here, the
default is zero, empty or false.
"""
METHODS = """
| method | request | reply |
|---|---|---|
"""
FIELDS = """
| field | type | meaning |
|---|---|---|
"""
VALUES = """
| value | number | meaning |
|---|---|---|
"""

# A `Place` says where a declaration is in a file, with the field numbers and indexes of `SourceCodeInfo.Location.path`.
Place = tuple[int, ...]
SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER


def page() -> str:
    """Return the page.

    Raises:
        ValueError: The file declares a nested message or enum, which this script does not describe.
    """
    file = _read_file()
    comments = {tuple(it.path): it.leading_comments for it in file.source_code_info.location}
    parts = [HEAD]
    for index, service in enumerate(file.service):
        parts += _service(service, (SERVICES, index), comments)
    parts.append("\n## Messages\n")
    for index, message in enumerate(file.message_type):
        parts += _message(message, (MESSAGES, index), comments)
    parts.append("\n## Enums\n")
    for index, enum in enumerate(file.enum_type):
        parts += _enum(enum, (ENUMS, index), comments)
    return "".join(parts)


def _read_file() -> FileDescriptorProto:
    """Return the descriptor of encoder.proto with its comments, as buf compiles it."""
    buf = Path(sys.executable).with_name("buf")
    image = subprocess.run([buf, "build", "--output", "-"], cwd=PROTO, capture_output=True, check=True).stdout
    return next(file for file in FileDescriptorSet.FromString(image).file if file.name == FILE)


def _service(service: ServiceDescriptorProto, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    yield f"\n## {service.name}\n\n{_paragraphs(comments[place])}\n{METHODS}"
    places = [(*place, ServiceDescriptorProto.METHOD_FIELD_NUMBER, index) for index in range(len(service.method))]
    for method in service.method:
        yield _row(f"[{method.name}](#{method.name.lower()})", *_types_of(method))
    for method, its_place in zip(service.method, places, strict=True):
        yield f"\n### {method.name}\n\n{_paragraphs(comments[its_place])}\n"


def _types_of(method: MethodDescriptorProto) -> tuple[str, str]:
    sent, replied = _link(method.input_type), _link(method.output_type)
    return (
        f"stream of {sent}" if method.client_streaming else sent,
        f"stream of {replied}" if method.server_streaming else replied,
    )


def _message(message: DescriptorProto, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    entries = {f".encserve.v1.{message.name}.{it.name}": it for it in message.nested_type if it.options.map_entry}
    if message.enum_type or len(entries) < len(message.nested_type):
        raise ValueError(f"{message.name} declares a message or an enum; declare it outside {message.name}")
    yield f"\n### {message.name}\n\n{_paragraphs(comments[place])}\n"
    if message.field:
        yield FIELDS
    for index, field in enumerate(message.field):
        comment = comments[*place, DescriptorProto.FIELD_FIELD_NUMBER, index]
        yield _row(f"`{field.name}`", _type(field, message, entries), _meaning(field.name, comment))
    for index, oneof in enumerate(message.oneof_decl):
        rule = comments.get((*place, DescriptorProto.ONEOF_DECL_FIELD_NUMBER, index))
        if rule is not None:  # protobuf adds a oneof without a comment for an `optional` field
            yield f"\n`{oneof.name}`: {_meaning(oneof.name, rule)}\n"


def _type(field: FieldDescriptorProto, message: DescriptorProto, entries: Mapping[str, DescriptorProto]) -> str:
    if entry := entries.get(field.type_name):
        key, value = (_type(it, entry, {}) for it in entry.field)
        return f"map from {key} to {value}"
    name = _link(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _enum(enum: EnumDescriptorProto, place: Place, comments: Mapping[Place, str]) -> Iterator[str]:
    yield f"\n### {enum.name}\n\n{_paragraphs(comments[place])}\n{VALUES}"
    for index, value in enumerate(enum.value):
        comment = comments[*place, EnumDescriptorProto.VALUE_FIELD_NUMBER, index]
        yield _row(f"`{value.name}`", str(value.number), _meaning(value.name, comment))


def _link(type_name: str) -> str:
    """Return a link to a type of encserve.v1, or the name of another package's type. Return "" for a scalar."""
    own = type_name.removeprefix(".encserve.v1.")
    return type_name.removeprefix(".") if own == type_name else f"[{own}](#{own.lower()})"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _meaning(name: str, comment: str) -> str:
    """Return a comment as a cell of a table, without "NAME is" at the start."""
    text = re.sub(rf"^{name} (?:is|are|means) ", "", " ".join(comment.split()))
    return _escaped(text[:1].upper() + text[1:] if not text.startswith(name) else text).replace("|", "\\|")


def _paragraphs(comment: str) -> str:
    """Return a comment as Markdown. Lines that begin with a status, such as `NOT_FOUND: …`, become a list."""
    listed = re.sub(r"(\n*)^ ?([A-Z]+_?[A-Z]+): ", lambda it: f"{it[1]}- `{it[2]}`: ", comment.strip("\n"), flags=re.M)
    lines = [line.removeprefix(" ") for line in listed.splitlines()]
    return _escaped("\n".join(_with_blank_lines(lines)))


def _with_blank_lines(lines: list[str]) -> Iterator[str]:
    """Yield the lines. Yield a blank line before a list, and indent the lines of a list item after the first."""
    in_list = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("- "):
            if before and not in_list:
                yield ""
            in_list = True
            yield line
        else:
            in_list = in_list and bool(line)
            yield f"  {line}" if in_list else line


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")
