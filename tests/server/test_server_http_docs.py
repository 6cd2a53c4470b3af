"""Tests of the descriptions of the HTTP routes: /openapi.json and the page /docs."""

import re
from typing import Any

import jsonschema
from fake_server import FakeServer
from http_calls import connect, get, post
from tiny_heads import every_kind_and_scores

from encserve_server.endpoints.routes import Route
from encserve_server.protocols.openapi import descriptions_of

REF = "#/components/schemas/"
SHARED_SETTINGS = {"http_port": 0}
SHARED_BUNDLE = every_kind_and_scores()


def routes_of(server: FakeServer) -> list[Route]:
    """Return all HTTP routes of the server."""
    assert server.app._http is not None
    return [route for route, _ in server.app._http.app._all]


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    """Return a validator for a schema, which may refer to components of the document."""
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


async def test_every_route_is_described(shared: FakeServer) -> None:
    document = (await get(shared, "/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    ids = set()
    for route in routes_of(shared):
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        assert re.match(r"(Return|List|Describe|Compute|Answer|Show) .*\.$", operation["summary"]), route.path
        ids.add(operation["operationId"])
        names = [it["name"] for it in operation["parameters"]]
        assert names == re.findall(r"{(\w+)", route.path)
        assert "500" in operation["responses"]
        if route.body is not None:
            content = operation["requestBody"]["content"]["application/json"]
            validator(document, content["schema"]).validate(content["example"])
            assert {"400", "404", "408", "413", "429", "503"} <= operation["responses"].keys()
        answer = operation["responses"]["200"].get("content", {})
        assert answer or route.check, route.path
    assert len(ids) == len(routes_of(shared))
    assert sum(map(len, document["paths"].values())) == len(routes_of(shared))


async def test_every_field_has_a_meaning(shared: FakeServer) -> None:
    """Every field of a body has a description, from the section Attributes in the docstring of the struct."""
    for route in routes_of(shared):
        if route.body is not None:
            assert set(route.body.__struct_fields__) == set(descriptions_of(route.body)), route.body
    body = (await get(shared, "/openapi.json")).json()["components"]["schemas"]["EmbeddingsBody"]
    assert body["properties"]["dimensions"]["description"] == "Truncates vectors to this number of dimensions."


async def test_schemas_are_valid_and_match_the_replies(shared: FakeServer) -> None:
    document = (await get(shared, "/openapi.json")).json()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for found in re.findall(r"'\$ref': '([^']*)'", str(document)):
        assert found.removeprefix(REF) in document["components"]["schemas"]
    for route in routes_of(shared):
        operation = document["paths"][route.path.replace(":path", "")][route.method.lower()]
        path = re.sub(r"{(id|name):path}", "tiny", route.path).replace("{version}", "1")
        response = await (get(shared, path) if route.method == "GET" else post(shared, path, route.example or {}))
        assert response.status_code == 200, route.path
        ((kind, content),) = operation["responses"]["200"].get("content", {"": {}}).items()
        if kind == "application/json":
            validator(document, content["schema"]).validate(response.json())
            if (name := content["schema"].get("$ref", "").removeprefix(REF)) and isinstance(response.json(), dict):
                assert response.json().keys() <= document["components"]["schemas"][name]["properties"].keys()
        if route.body is not None:
            refused = await post(shared, path, {})
            content = operation["responses"][f"{refused.status_code}"]["content"]["application/json"]
            validator(document, content["schema"]).validate(refused.json())


async def test_the_page_loads_no_other_resource(shared: FakeServer) -> None:
    response = await get(shared, "/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    page = response.text
    assert set(re.findall(r"https?://[^/\s]+", page)) == {"http://127.0.0.1:8080"}
    assert not re.search(r"<(script|link|img|iframe)|@import|url\(", page)
    for route in routes_of(shared):
        assert f"<code>{route.method} {route.path.replace(':path', '')}</code></h2>" in page
    assert "input" in page
    assert "Truncates vectors to this number of dimensions." in page
    assert """curl http://127.0.0.1:8080/v1/embeddings -H &#x27;content-type""" in page


async def test_docs_and_openapi_answer_head_and_are_counted(shared: FakeServer) -> None:
    async with connect(shared) as client:
        for path in ("/docs", "/openapi.json"):
            labels = {"route": f"GET {path}", "status": "200"}
            before = shared.sample("encserve_http_requests_total", **labels)
            assert (await client.head(path)).status_code == 200
            assert shared.sample("encserve_http_requests_total", **labels) == before + 1
