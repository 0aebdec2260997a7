"""The OpenAPI document as one page for people: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from html import escape
from typing import Any, Final

from serve_app.openapi import document

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line) }
details { border: 1px solid var(--line); border-radius: .4rem; margin: .6rem 0; padding: .4rem .8rem }
summary { cursor: pointer } summary code { font-weight: 600 }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-size: .9rem }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line) }
pre { background: var(--soft); padding: .6rem; overflow-x: auto; border-radius: .4rem } .method { min-width: 3.5rem;
display: inline-block; font: 600 .8rem ui-monospace, monospace } .about { color: #888 }
"""
_EXAMPLES: Final = {
    "/v1/chat/completions": '{"model": "local", "messages": [{"role": "user", "content": "Hello"}], "stream": true}',
    "/v1/completions": '{"model": "local", "prompt": "Once upon a time", "max_tokens": 64}',
    "/v1/responses": '{"model": "local", "input": "Hello"}',
    "/v1/messages": '{"model": "local", "max_tokens": 256, "messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/messages/count_tokens": '{"model": "local", "messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/systemone": '{"model": "local", "state": "Charged twice", "questions": {"refund": {"type": "noul", '
    '"instructions": "Is a refund requested?"}}}',
    "/v1/decisions": '{"model": "local", "input": "Charged twice", "questions": [{"type": "predicate", '
    '"instructions": "Refund requested?"}]}',
    "/api/show": '{"model": "NAME"}',
}


_BASE: Final = b"http://127.0.0.1:8000"
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_KEY: Final = (
    "A server with a key wants <code>Authorization: Bearer KEY</code>; Messages also takes <code>x-api-key</code>. "
    "Health, metrics and these documents need none."
)


def page(scheme: str = "", host: str = "") -> bytes:
    """The page, UTF-8. Its examples call the server at `host`, as the reader's browser does, where that is a name."""
    return _page().replace(_BASE, f"{scheme}://{host}".encode()) if scheme and _HOST.fullmatch(host) else _page()


@cache
def _page() -> bytes:
    described = document()
    by_tag: dict[str, list[str]] = {}
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append(_operation(method.upper(), path, operation, described))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    title = escape(described["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} API</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{escape(described['info']['description'])} The same as a machine reads it: "
        f'<a href="openapi.json">openapi.json</a>.</p><p>{_KEY}</p>{sections}</body></html>\n'
    ).encode()


def _operation(method: str, path: str, operation: dict[str, Any], described: dict[str, Any]) -> str:
    parts = [
        f'<details><summary><span class="method">{method}</span> <code>{escape(path)}</code> '
        f'<span class="about">{escape(operation["summary"])}</span></summary>'
    ]
    if operation["parameters"]:
        parts.append(
            _table(("Parameter", "In", "Type", "Required", "Meaning"), map(_parameter, operation["parameters"]))
        )
    body = operation.get("requestBody")
    if body is not None:
        schema = _resolve(next(iter(body["content"].values()))["schema"], described)
        parts.append(_table(("Field", "Type", "Required", "Meaning"), _fields(schema)))
    if path in _EXAMPLES:
        version = "  -H 'anthropic-version: 2023-06-01' \\\n" if path.startswith("/v1/messages") else ""
        command = f"curl {_BASE.decode()}{path} -H 'Content-Type: application/json' \\\n{version}  -d '"
        parts.append(f"<pre>{escape(command + _EXAMPLES[path])}'</pre>")
    rows = [(status, answer["description"], ", ".join(answer["content"])) for status, answer in _answers(operation)]
    parts.append(_table(("Status", "When", "Content"), rows))
    return "".join([*parts, "</details>"])


def _parameter(item: dict[str, Any]) -> tuple[str, ...]:
    required = "yes" if item["required"] else ""
    return item["name"], item["in"], type_text(item["schema"]), required, item.get("description", "")


def _answers(operation: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(operation["responses"].items())


def _fields(schema: dict[str, Any]) -> list[tuple[str, ...]]:
    required = set(schema.get("required", ()))
    return [
        (name, type_text(part), "yes" if name in required else "", part.get("description", ""))
        for name, part in schema["properties"].items()
    ]


def type_text(schema: dict[str, Any]) -> str:
    """A schema in a few words; null is left out, since it means the same as leaving the field out."""
    if "anyOf" in schema or "oneOf" in schema:
        found = [type_text(part) for part in schema.get("anyOf", schema.get("oneOf", ()))]
        return " or ".join(dict.fromkeys(text for text in found if text != "null")) or "null"
    if "$ref" in schema:
        return "object"
    if "const" in schema or "enum" in schema:
        return ", ".join(f'"{value}"' for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"array of {type_text(schema.get('items', {}))}"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    ]
    return " ".join([str(schema.get("type", "any")), *bounds])


def _resolve(schema: dict[str, Any], described: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{lines}</table>"
