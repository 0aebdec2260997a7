"""The official clients against the application over HTTP: what their parsers accept is the last word on shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import anthropic
import httpx
import ollama
import openai
import pytest
import typesafe_sdk

from protocols.errors import SlotsExhausted, Unavailable
from serve_app.ingress.service import IngressSettings
from tests.support.ingress import FACTS, World, asynchronous
from tests.support.served import served

Result = TypeVar("Result")
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def locked(**settings: Any) -> World:
    facts = replace(FACTS, aliases=("org/alias",), tools=True)
    return World(settings=IngressSettings(under_serve=False, api_key="secret", **settings), facts=facts)


async def using(world: World, ask: Callable[[str], Result]) -> Result:
    """Runs a blocking client on a thread while the application is served at the URL it is given."""
    async with served(world) as site:
        return await asyncio.to_thread(ask, f"http://127.0.0.1:{site.port}")


def openai_client(url: str, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10)


def claude(url: str, *, api_key: str | None = None, auth_token: str | None = None) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=api_key, auth_token=auth_token, max_retries=0, timeout=10)


@asynchronous
async def test_openai_lists_and_retrieves_slashed_names() -> None:
    def ask(url: str) -> list[str]:
        with openai_client(url) as client:
            listed = [model.id for model in client.models.list()]
            named = [client.models.retrieve(name).id for name in ("org/alias", "org/tiny-model")]
            with pytest.raises(openai.NotFoundError) as caught:
                client.models.retrieve("none/such")
            assert caught.value.code == "model_not_found"
            return listed + named

    assert await using(locked(), ask) == ["org/alias"] * 3


@asynchronous
async def test_openai_raises_what_it_should() -> None:
    world = locked()

    def ask(url: str) -> None:
        with openai_client(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai_client(url) as client:
            world.engine.refuse = SlotsExhausted("full")
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="m", messages=MESSAGES)
            assert caught.value.response.headers["retry-after"]
            world.engine.refuse = Unavailable("paused")
            with pytest.raises(openai.InternalServerError) as failed:
                client.chat.completions.create(model="m", messages=MESSAGES)
            assert failed.value.status_code == 503
            with pytest.raises(openai.BadRequestError):
                client.chat.completions.create(model="m", messages=[])

    await using(world, ask)


@asynchronous
async def test_openai_streams_and_hears_of_failures_in_the_middle() -> None:
    world = locked(keepalive_seconds=0.02)
    world.engine.reply = None

    async def play() -> None:
        first = await world.engine.arrival()
        await asyncio.sleep(0.1)
        first.text("hello")
        first.end()
        second = await world.engine.arrival()
        second.text("he")
        second.end("failed", message="broken")

    def ask(url: str) -> str:
        with openai_client(url) as client:
            stream = client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with pytest.raises(openai.APIError, match="broken"):
                list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
            return text

    playing = asyncio.create_task(play())
    assert await using(world, ask) == "hello"
    await playing


@asynchronous
async def test_anthropic_with_either_header_counts_and_errors() -> None:
    world = locked()

    def ask(url: str) -> None:
        for client in (claude(url, api_key="secret"), claude(url, auth_token="secret")):
            with client:
                message = client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
                assert message.content[0].text == "ok"  # type: ignore[union-attr]
                assert client.messages.count_tokens(model="m", messages=MESSAGES).input_tokens == 2
        with claude(url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
        with claude(url, api_key="secret") as client:
            world.engine.refuse = Unavailable("paused")
            with pytest.raises(anthropic.InternalServerError) as caught:
                client.messages.create(model="m", max_tokens=9, messages=MESSAGES)
            assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]

    await using(world, ask)


@asynchronous
async def test_ollama_lists_and_shows() -> None:
    def ask(url: str) -> None:
        client = ollama.Client(host=url, headers={"Authorization": "Bearer secret"})
        (model,) = client.list().models
        assert model.model == "org/alias"
        shown = client.show("org/alias")
        assert shown.modelinfo["flare.context_length"] == 4096
        assert shown.capabilities == ["completion", "tools"]
        with pytest.raises(ollama.ResponseError) as caught:
            client.show("unknown")
        assert caught.value.status_code == 404
        client._client.close()

    await using(locked(), ask)


@asynchronous
async def test_typesafe_asks_and_lists() -> None:
    def ask(url: str) -> None:
        with typesafe_sdk.TypeSafeClient(base_url=url, api_key="secret") as client:
            assert [model.name for model in client.models.list().models] == ["org/alias"]

    await using(locked(), ask)


@asynchronous
async def test_opencode_discovers_through_its_ollama_provider() -> None:
    """Its sequence: the base URL without /v1, tags, show by model with the digest as cache key, then Chat below /v1."""

    def ask(url: str) -> None:
        base = f"{url}/v1"
        root = base.removesuffix("/v1")
        with httpx.Client(headers={"Authorization": "Bearer secret"}, timeout=1) as client:
            (entry,) = client.get(f"{root}/api/tags").json()["models"]
            details = entry["details"]
            assert all(isinstance(entry[name], str) for name in ("name", "model", "modified_at", "digest"))
            assert isinstance(entry["size"], int)
            assert all(
                isinstance(details[name], str) for name in ("format", "family", "parameter_size", "quantization_level")
            )
            shown = client.post(f"{root}/api/show", json={"model": entry["model"]}).json()
            assert {"completion", "tools"} <= set(shown["capabilities"])
            lengths = [
                value
                for name, value in shown["model_info"].items()
                if name.endswith(".context_length") and isinstance(value, int)
            ]
            assert lengths[0] == 4096
            body = {"model": entry["model"], "messages": MESSAGES}
            answer = client.post(f"{base}/chat/completions", json=body).json()
            assert answer["model"] == entry["model"]
            assert client.get(f"{root}/api/tags").json()["models"][0]["digest"] == entry["digest"]

    await using(locked(), ask)
