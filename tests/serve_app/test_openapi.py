"""The document is true to the routes and valid; the page stands alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import jsonschema
import pytest

from serve_app import docs_page, openapi, openapi_fields
from tests.support.ingress import CHAT, Call, World, asynchronous, call

DOCUMENT = openapi.document()
VERSION = ("anthropic-version", "2023-06-01")
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "ab", "max_tokens": 4},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": CHAT,
    "/v1/systemone": {"model": "m", "state": "s", "questions": {"q": {"type": "noul"}}},
    "/v1/decisions": {"model": "m", "input": "s", "questions": [{"type": "predicate", "instructions": "?"}]},
    "/api/show": {"model": "org/tiny-model"},
}


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
    ]


def check(value: Any, schema: dict[str, Any]) -> None:
    jsonschema.validate(value, {**schema, "components": DOCUMENT["components"]})


@asynchronous
async def test_every_route_is_documented_and_nothing_else() -> None:
    routes = World().app.routes
    served = {(route.method, route.path + ("/{model}" if route.prefix else ""), route.open) for route in routes}
    assert served == {(method, path, operation["security"] == []) for method, path, operation in operations()}


def test_references_resolve_and_operation_ids_are_unique() -> None:
    text = json.dumps(DOCUMENT)
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names <= set(DOCUMENT["components"]["schemas"])
    ids = [operation["operationId"] for _, _, operation in operations()]
    assert len(set(ids)) == len(ids)
    assert '"title": "Max Tokens"' not in text


def test_every_field_has_a_meaning_and_a_type() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        if name.endswith("Request"):
            for field, part in schema["properties"].items():
                assert part.get("description"), (name, field)
                assert docs_page.type_text(part) != "any", (name, field)
    shown = {field for schema in DOCUMENT["components"]["schemas"].values() for field in schema.get("properties", ())}
    assert set(openapi_fields.MEANINGS) <= shown, "a meaning without a field"


@pytest.mark.parametrize("form", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
@asynchronous
async def test_every_form_of_a_prompt_is_documented_and_answered(form: Any) -> None:
    body = {"prompt": form, "max_tokens": 1, "stop": "x" if isinstance(form, str) else ["x"]}
    operation = DOCUMENT["paths"]["/v1/completions"]["post"]
    check(body, operation["requestBody"]["content"]["application/json"]["schema"])
    assert (await call(World().app, "POST", "/v1/completions", body)).status == 200


DECISIONS: list[tuple[dict[str, Any], bool]] = [
    ({"type": "predicate", "instructions": "?"}, True),
    ({"type": "predicate", "instructions": "?", "name": "a"}, True),
    ({"type": "predicate", "instructions": "?", "name": None}, False),
    ({"type": "predicate"}, False),
    ({"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": True, "description": "b"}]}, True),
    ({"type": "choice", "instructions": "?", "choices": [{"value": "a"}]}, False),
    ({"type": "choice", "instructions": "?", "choices": [{"value": "a"}, {"value": 1}]}, False),
    ({"type": "score", "instructions": "?", "levels": [{"label": "a"}, {"label": "b", "description": None}]}, True),
    ({"type": "score", "instructions": "?", "levels": [{"label": "a"}] * 11}, False),
    ({"type": "score", "instructions": "?", "levels": [{"label": "a", "more": 1}, {"label": "b"}]}, False),
    ({"type": "box", "instructions": "?"}, False),
]


@pytest.mark.parametrize(("question", "valid"), DECISIONS)
@asynchronous
async def test_questions_are_documented_as_they_are_read(question: dict[str, Any], valid: bool) -> None:
    await agree("/v1/decisions", {**REQUESTS["/v1/decisions"], "questions": [question]}, valid)


@pytest.mark.parametrize(
    ("path", "change", "valid"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "a"}]}, True),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}, False),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/chat/completions", {"stop": 1}, False),
        ("/v1/decisions", {"input": [{"role": "user", "content": "a"}]}, True),
        ("/v1/decisions", {"input": [{"role": "system", "content": "a"}]}, False),
        ("/v1/decisions", {"input": 1}, False),
        ("/v1/completions", {"prompt": {"a": 1}}, False),
        ("/v1/responses", {"input": 1}, False),
    ],
)
@asynchronous
async def test_open_forms_are_documented_as_they_are_read(path: str, change: dict[str, Any], valid: bool) -> None:
    await agree(path, {**REQUESTS[path], **change}, valid)


async def agree(path: str, body: dict[str, Any], valid: bool) -> None:
    """The document and the server both take `body`, or neither does."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    found = jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).is_valid(body)
    reply = await call(World().app, "POST", path, body, [VERSION])
    assert (found, reply.status) == (valid, 200 if valid else 400), reply.body


def test_required_fields_come_first_and_what_a_request_is_about() -> None:
    fields = list(DOCUMENT["components"]["schemas"]["MessageRequest"]["properties"])
    assert fields[:5] == ["model", "messages", "max_tokens", "system", "stream"]


def test_schemas_are_schemas() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("path", REQUESTS)
@asynchronous
async def test_requests_and_answers_match_their_schemas(path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    check(REQUESTS[path], operation["requestBody"]["content"]["application/json"]["schema"])
    reply = await call(World().app, "POST", path, REQUESTS[path], [VERSION])
    assert reply.status == 200, reply.body
    check(reply.json, operation["responses"]["200"]["content"]["application/json"]["schema"])


@pytest.mark.parametrize("path", REQUESTS)
@asynchronous
async def test_errors_match_their_schemas(path: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    for body, headers in [(b"{", []), (b"{}", []), (b"{}", [("content-encoding", "lzma")])]:
        reply = await call(World().app, "POST", path, body, [VERSION, *headers])
        described = operation["responses"][str(reply.status)]
        check(reply.json, described["content"]["application/json"]["schema"])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{model}", "/api/tags", "/health"])
@asynchronous
async def test_discovery_matches_its_schemas(path: str) -> None:
    reply = await call(World().app, "GET", path.replace("{model}", "org/tiny-model"))
    described = DOCUMENT["paths"][path]["get"]["responses"]["200"]
    check(reply.json, described["content"]["application/json"]["schema"])


@asynchronous
async def test_served() -> None:
    world = World()
    document = await call(world.app, "GET", "/openapi.json")
    assert document.json == json.loads(json.dumps(DOCUMENT))
    page = await call(world.app, "GET", "/docs")
    assert page.header("content-type") == "text/html; charset=utf-8"
    assert page.body == docs_page.page()
    assert b"curl http://127.0.0.1:8000/v1/messages " in page.body
    here = Call(world.app, "GET", "/docs", headers=[("host", "flare.example:81")], scope={"scheme": "https"})
    assert b"curl https://flare.example:81/v1/messages " in (await here.done()).body
    for hostile in ("<script>", "a b", "x" * 300, ""):
        there = Call(world.app, "GET", "/docs", headers=[("host", hostile)], scope={"scheme": "https"})
        assert (await there.done()).body == docs_page.page()


class Links(HTMLParser):
    """Collects what a page would load, and checks that its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]
        if tag == "script":
            self.loaded.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_loads_nothing_and_names_every_route() -> None:
    text = docs_page.page().decode()
    links = Links()
    links.feed(text)
    assert links.loaded == [] and links.open == []
    for method, path, _ in operations():
        assert f'<span class="method">{method}</span> <code>{path}</code>' in text
    assert "max_completion_tokens" in text and "thinking_token_budget" in text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 20}, "integer from 0 to 20"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"$ref": "x"}}, "array of object"),
        ({"enum": ["a", "b"]}, '"a", "b"'),
        ({}, "any"),
    ],
)
def test_types_in_words(schema: dict[str, Any], text: str) -> None:
    assert docs_page.type_text(schema) == text
