"""The description of all routes: `/openapi.json` (OpenAPI 3.1) for programs, and the page `/docs` for people.

The first call of either generates both from four sources: the structs of the bodies, the types of the replies, the
docstrings of these classes, and the table of errors.
"""

import inspect
import json
import re
import typing
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Any

import msgspec
import orjson

from encserve import __version__
from encserve_server.calls import Call
from encserve_server.endpoints.routes import PLACEHOLDER, Dialect, Reply, Request, Route
from encserve_server.errors import CALLER_ERRORS

_REF = "#/components/schemas/"
_JSON = "application/json"
# A field in the section Attributes of a docstring: the name, and the text, which may continue on indented lines.
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_HTML_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid light-dark(#ccc, #444); padding-top: 1rem; font-size: 1.15rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { background: light-dark(#f4f4f4, #222); padding: .75rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .75rem .25rem 0; }
tr + tr { border-top: 1px solid light-dark(#e4e4e4, #333); }
"""


class DocsRoutes:
    """The handlers of the description."""

    def __init__(self, others: Sequence[Route], dialect: Dialect) -> None:
        """Describe `others` and two more routes. `dialect` writes the errors of the two."""
        own = [
            Route("GET", "/openapi.json", self.openapi, dialect, is_listing=True, reply=dict[str, Any]),
            Route("GET", "/docs", self.docs, dialect, is_listing=True, reply=str),
        ]
        self._routes = [*others, *own]

    def routes(self) -> list[Route]:
        """Return all routes: the others and the two routes of the description."""
        return self._routes

    async def openapi(self, request: Request, call: Call) -> Reply:
        """Return the description of all routes as an OpenAPI 3.1 document."""
        del request, call
        return Reply(self._written[0])

    async def docs(self, request: Request, call: Call) -> Reply:
        """Show the description of all routes as a page for people."""
        del request, call
        return Reply(self._written[1], _HTML_HEADERS)

    @cached_property
    def _written(self) -> tuple[bytes, bytes]:
        """The document for programs, and the page for people."""
        document = document_of(self._routes)
        return orjson.dumps(document), page_of(document).encode()


def document_of(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document of routes."""
    kinds = [route.body for route in routes if route.body is not None]
    replies = [route.reply for route in routes if route.reply is not None]
    errors = [route.dialect.error for route in routes if route.dialect.error is not None]
    shapes = [*kinds, *replies, *errors]
    schemas, components = msgspec.json.schema_components(shapes, ref_template=_REF + "{name}")
    of = dict(zip(map(id, shapes), schemas, strict=True))
    for kind in _named(shapes):
        _describe(components[kind.__name__], kind)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(PLACEHOLDER.sub(r"{\1}", route.path), {})[route.method.lower()] = _operation(route, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "encserve",
            "version": __version__,
            "description": "Computes vectors of texts, with the protocols of several servers. More is in "
            "docs/reference/http.md.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, of: Mapping[int, Any]) -> dict[str, Any]:
    summary, _, rest = inspect.cleandoc(route.handle.__doc__ or "").partition("\n")
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "summary": summary,
        "description": re.split(r"^(?:Args|Raises|Returns):", rest, maxsplit=1, flags=re.MULTILINE)[0].strip(),
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name, _ in PLACEHOLDER.findall(route.path)
        ],
        "responses": {"200": _response("The answer.", of.get(id(route.reply), {}), route.reply)},
    }
    if route.body is not None:
        content = {"schema": of[id(route.body)]}
        if route.example is not None:
            content["example"] = route.example
        operation["requestBody"] = {"required": True, "content": {_JSON: content}}
    for code, reasons in sorted(_refusals(route).items()):
        error = of.get(id(route.dialect.error), {})
        operation["responses"][f"{code}"] = _response(f"An error: {', '.join(reasons)}.", error, dict)
    return operation


def _response(description: str, schema: Any, kind: Any) -> dict[str, Any]:
    if kind is None:
        return {"description": description}
    return {"description": description, "content": {"text/html" if kind is str else _JSON: {"schema": schema}}}


def _refusals(route: Route) -> dict[int, list[str]]:
    """Return the HTTP statuses of the errors of a route, and for each status the reasons.

    docs/reference/errors.md lists the reasons.
    """
    found: dict[int, list[str]] = {500: ["INTERNAL"]}
    for error, status in CALLER_ERRORS.items():
        # A route without a body can refuse only the name in its path. FAILED_PRECONDITION means that the bundle does
        # not have the expected fingerprint, and no route has a field for a fingerprint.
        with_body = route.body is not None and status.grpc != "FAILED_PRECONDITION"
        if with_body or status.grpc == "UNAVAILABLE" or (status.grpc == "NOT_FOUND" and "{" in route.path):
            reasons = found.setdefault(route.dialect.status_of(status), [])
            if error.reason not in reasons:
                reasons.append(error.reason)
    return found


def _named(shapes: Sequence[Any]) -> list[type[Any]]:
    """Return the classes in types and in their fields. They become the components of the OpenAPI document."""
    found: dict[type[Any], None] = {}

    def add(shape: Any) -> None:
        if isinstance(shape, type) and "__annotations__" in vars(shape) and shape not in found:
            found[shape] = None
            for inner in typing.get_type_hints(shape).values():
                add(inner)
        for inner in typing.get_args(shape):
            add(inner)

    for shape in shapes:
        add(shape)
    return list(found)


def descriptions_of(kind: type[Any]) -> dict[str, str]:
    """Return the description of each field of a class, from the docstrings of the class and its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("\nAttributes:\n")[2]
        texts |= {name: re.sub(r"\s+", " ", text) for name, text in _ATTRIBUTE.findall(section)}
    return texts


def _describe(schema: dict[str, Any], kind: type[Any]) -> None:
    """Add the descriptions of a class and of its fields to the schema of the class."""
    schema["description"] = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    schema.pop("additionalProperties", None)  # unknown fields are ignored, unless the setting strict_http is on
    texts = descriptions_of(kind)
    for name, its in schema["properties"].items():
        if name in texts:
            schema["properties"][name] = {**its, "description": texts[name]}


def page_of(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as an HTML page. The page loads no other resource."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>encserve</title><style>{_STYLE}</style><h1>encserve {escape(document['info']['version'])}</h1>"
        f"<p>{escape(document['info']['description'])} For programs: <a href=/openapi.json>/openapi.json</a>."
    ]
    schemas = document["components"]["schemas"]
    operations = [(path, method, it) for path, methods in document["paths"].items() for method, it in methods.items()]
    parts.append("<ul>")
    for path, method, it in operations:
        name = f"{method.upper()} {path}"
        parts.append(f"<li><a href='#{it['operationId']}'><code>{escape(name)}</code></a> {escape(it['summary'])}")
    parts.append("</ul>")
    for path, method, it in operations:
        parts.append(f"<h2 id='{it['operationId']}'><code>{method.upper()} {escape(path)}</code></h2>")
        parts.append(f"<p>{escape(it['summary'])} {escape(it['description'])}")
        parts.append(_fields(it, schemas))
        parts.append(f"<pre>{escape(_curl(path, method, it))}</pre>")
        answer = it["responses"]["200"].get("content", {})
        if answer:
            ((_, content),) = answer.items()
            parts.append(f"<p>Answers <code>{escape(_type_name(content['schema'], schemas))}</code>")
        parts.append("<details><summary>Errors</summary><table>")
        for code, response in it["responses"].items():
            if code != "200":
                parts.append(f"<tr><td>{code}<td>{escape(response['description'].removeprefix('An error: '))}")
        parts.append("</table></details>")
    return "\n".join(parts)


def _fields(operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "requestBody" not in operation:
        return ""
    schema = schemas[operation["requestBody"]["content"][_JSON]["schema"]["$ref"].removeprefix(_REF)]
    rows = [
        f"<tr><td><code>{escape(name)}</code><td><code>{escape(_type_name(it, schemas))}</code>"
        f"<td>{escape(it.get('description', ''))}"
        for name, it in schema["properties"].items()
    ]
    return f"<table><tr><th>field<th>type<th>meaning{''.join(rows)}</table>"


def _type_name(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return a readable name of a type. null is left out, because null means the same as a missing field."""
    if "anyOf" in schema:
        names = [_type_name(it, schemas) for it in schema["anyOf"] if it.get("type") != "null"]
        return " or ".join(names)
    if "$ref" in schema:
        properties = schemas[schema["$ref"].removeprefix(_REF)].get("properties", {})
        return "{" + ", ".join(f"{name}: {_type_name(it, schemas)}" for name, it in properties.items()) + "}"
    if schema.get("type") == "array":
        return f"[{_type_name(schema.get('items', {}), schemas)}, …]"
    return str(schema.get("type", "any"))


def _curl(path: str, method: str, operation: Mapping[str, Any]) -> str:
    url = "http://127.0.0.1:8080" + path.replace("{", "").replace("}", "").replace("//", "/")
    if method == "get":
        return f"curl {url}"
    example = operation["requestBody"]["content"][_JSON].get("example") if "requestBody" in operation else None
    data = "" if example is None else f" -d '{json.dumps(example)}'"
    return f"curl {url} -H 'content-type: application/json'{data}"
