"""Makes the tables of routes and fields in docs/reference/http.md from the server's OpenAPI document.

The tables replace the text between two comments in the page. The rest of the page is written by hand.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from encserve_server.calls import Calls
from encserve_server.endpoints.host import Host
from encserve_server.models.catalog import Catalog
from encserve_server.protocols.openapi import document_of
from encserve_server.protocols.over_http import routes
from encserve_server.settings import Settings
from encserve_server.system.clock import MonotonicClock

PAGE = Path(__file__).parent.parent.parent / "docs/reference/http.md"
BEGIN, END = "<!-- begin: written by `make docs` -->\n", "<!-- end: written by `make docs` -->\n"
ROUTES = """
| route | result | fields of the request |
|---|---|---|
"""
REQUESTS = """
## Fields of requests

If a field has several meanings, the table names the routes of each meaning.

| field | type | meaning |
|---|---|---|
"""
REPLIES = """
## Fields of replies

`[]` means each element of a list. If a reply is a list, its fields begin with `[]`.

| field | type | meaning |
|---|---|---|
"""

Schema = Mapping[str, Any]
# The type and the description of a field.
Meaning = tuple[str, str]


def page() -> str:
    """Return the text of docs/reference/http.md with new tables.

    Raises:
        ValueError: The page lacks one of the two comments.
    """
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} must have the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + tables(document()) + "\n" + end + after


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with the default settings."""
    with ThreadPoolExecutor(1) as pool:
        calls = Calls(Catalog(), MonotonicClock(), pool)
        return document_of(routes(Host(calls, Settings(model_repository=Path("models")), lambda: False, pool)))


def tables(document: Mapping[str, Any]) -> str:
    """Return the tables of routes, of fields in requests, and of fields in replies."""
    schemas = document["components"]["schemas"]
    operations = [(path, method, it) for path, methods in document["paths"].items() for method, it in methods.items()]
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    sent: dict[str, dict[Meaning, list[str]]] = defaultdict(lambda: defaultdict(list))
    returned: dict[str, dict[Meaning, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path, method, it in operations:
        body = _content(it.get("requestBody", {}))
        reply = _content(it["responses"]["200"])
        for fields, schema in ((sent, body), (returned, reply)):
            for name, meaning in dict(_fields(schema, schemas)).items():
                fields[name][meaning].append(path)
        names = dict.fromkeys(name.partition("[")[0].partition(".")[0] for name, _ in _fields(body, schemas))
        cells = f"{it['summary']} {it['description']}".strip(), ", ".join(f"`{name}`" for name in names)
        rows[cells].append(f"`{method.upper()} {path}`")
    listed = "".join(_row("<br>".join(paths), *cells) for cells, paths in rows.items())
    return ROUTES + listed + REQUESTS + _table(sent) + REPLIES + _table(returned, with_routes=True)


def _content(part: Mapping[str, Any]) -> Schema:
    """Return the schema of a request body or of a reply. Bodies without JSON have an empty schema."""
    return part.get("content", {}).get("application/json", {}).get("schema", {})  # type: ignore[no-any-return]


def _fields(schema: Schema, schemas: Mapping[str, Schema], path: str = "") -> Iterator[tuple[str, Meaning]]:
    """Yield the paths and meanings of the fields that have a description. The fields of an object follow the object."""
    for inner in schema.get("anyOf", ()):
        yield from _fields(inner, schemas, path)
    if "items" in schema:
        yield from _fields(schema["items"], schemas, f"{path}[]")
    if "$ref" in schema:
        for name, field in _referred(schema, schemas).get("properties", {}).items():
            place = f"{path}.{name}".removeprefix(".")
            if "description" in field:
                yield place, (_type(field), field["description"])
            yield from _fields(field, schemas, place)


def _referred(schema: Schema, schemas: Mapping[str, Schema]) -> Schema:
    return schemas[schema["$ref"].rpartition("/")[2]]


def _type(schema: Schema) -> str:
    """Return the name of a type. null is left out, because null means the same as a missing field."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(it) for it in schema["anyOf"] if it.get("type") != "null"))
    if "$ref" in schema:
        return "object"
    if schema.get("type") == "array":
        inner = _type(schema.get("items", {}))
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    return str(schema.get("type", "any"))


def _table(fields: Mapping[str, Mapping[Meaning, list[str]]], *, with_routes: bool = False) -> str:
    """Return the rows of a table. A row names routes if its field has several meanings, or if `with_routes` is true."""
    rows = (_rows(name, meanings, with_routes or len(meanings) > 1) for name, meanings in sorted(fields.items()))
    return "".join(itertools.chain.from_iterable(rows))


def _rows(name: str, meanings: Mapping[Meaning, list[str]], with_routes: bool) -> Iterator[str]:
    for meaning, paths in meanings.items():
        shown = dict.fromkeys(path for path in paths if "{version}" not in path)
        routes = "<br>" + ", ".join(f"`{path}`" for path in shown) if with_routes else ""
        yield _row(f"`{name}`{routes}", *meaning)


def _row(*cells: str) -> str:
    escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"
