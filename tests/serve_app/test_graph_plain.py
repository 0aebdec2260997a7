"""The graph with no Ray flag at all, as `serve run` starts it from a config: Python proxy, actor calls, threads."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.disconnects import CHAT, MOMENTS, UNREAD, nothing_leaks, quiet, settled
from tests.support.graph import PATIENCE_SECONDS, START_SECONDS, Graph, free_port, launch, ready, wait_until
from tests.support.raw_http import RawRequest, answered, chat, streamed_text
from tests.support.scripted import script, turn

pytestmark = pytest.mark.graph

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
COUNTED = "".join(f"{number} " for number in range(1, 101))
SLOW = chat("count slowly", max_tokens=2000, stream=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    directory = tmp_path_factory.mktemp("plain")
    turns = [
        turn("Hello."),
        turn("word ", when="quick", then="repeat"),
        turn(COUNTED, when="count slowly", delay_ms=15),
    ]
    arguments = {
        "model": script(directory, turns, name="counting", chat_template=TEMPLATE, context=120_000),
        "cache_dir": str(directory / "cache"),
        "threads": 1,
        "kv_bytes": 20_000_000,
    }
    port = free_port()
    application = {"name": "flare", "route_prefix": "/", "import_path": "serve_app.app:build", "args": arguments}
    config = directory / "serve.yaml"
    http = {"host": "127.0.0.1", "port": port}
    config.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    serve = str(Path(sys.executable).with_name("serve"))
    # A shell that runs tests in the background leaves SIGINT ignored, which `serve run` would inherit.
    process = launch(["env", "--default-signal=INT", serve, "run", str(config)], directory / "log")
    running = Graph(process, port, directory / "log")
    try:
        wait_until(lambda: ready(running), START_SECONDS, 0.3)
        yield running
    finally:
        running.stop()


def test_it_answers(plain: Graph) -> None:
    assert answered(plain.post(CHAT, chat("hi"))) == "Hello."
    request = RawRequest(plain.port, CHAT, SLOW)
    assert streamed_text(request.read_all()) == COUNTED


def test_a_large_prompt_travels_by_reference(plain: Graph) -> None:
    """100,000 token ids are more than a call carries itself; the engine sees them, since it is what refuses them: the
    context that was asked for holds them, its KV pool doesn't."""
    (card,) = plain.get("/v1/models")["data"]
    context = card["max_model_len"]
    assert 1000 < context < 100_000
    answer = plain.post("/v1/completions", {"model": "m", "prompt": [5] * 100_000, "max_tokens": 3})
    assert answer["status"] == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert answer["error"]["message"] == f"prompt is too long: 100000 tokens > {context - 1} maximum"
    warned = f"the context is cut from 120000 tokens to the {context} that the KV pool holds"
    wait_until(lambda: warned in plain.log.read_text())


@pytest.mark.parametrize("moment", MOMENTS)
def test_no_disconnect_leaks(plain: Graph, moment: str) -> None:
    nothing_leaks(plain, SLOW, moment, 8)


def test_readers_that_leave_disturb_nobody(plain: Graph) -> None:
    """The link is shared: the request that opened it may die without taking it along."""
    first, reader = RawRequest(plain.port, CHAT, SLOW), RawRequest(plain.port, CHAT, SLOW)
    first.read_until(b'"content":"')
    first.close()
    assert streamed_text(reader.read_all()) == COUNTED
    quiet(plain)


def deploy(plain: Graph, **engine: Any) -> None:
    """What `serve deploy` sends: the graph's own config, with a `user_config` of the Engine."""
    config = yaml.safe_load((plain.log.parent / "serve.yaml").read_text())
    config["applications"][0]["deployments"] = [{"name": "Engine", "user_config": engine}]
    address = re.search(r"127\.0\.0\.1:8[23]\d\d", plain.log.read_text())
    assert address is not None, "Ray's dashboard told no address"
    url = f"http://{address[0]}/api/serve/applications/"
    request = urllib.request.Request(
        url, json.dumps(config).encode(), {"Content-Type": "application/json"}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
        assert answer.status == 200


def test_an_operator_pauses_and_resumes_admission(plain: Graph) -> None:
    engines = plain.pids("Engine")
    running = RawRequest(plain.port, CHAT, SLOW)
    running.read_until(b'"content":"')
    deploy(plain, paused=True)
    wait_until(lambda: plain.metrics()["http_admission_paused"] == 1)
    refused = plain.post(CHAT, chat("hi"))
    assert (refused["status"], refused["error"]["type"]) == (503, "server_error")
    assert "paused" in refused["error"]["message"]
    counted = plain.post("/v1/completions", {"prompt": "hi", "max_tokens": 0, "echo": True})
    assert counted["choices"][0]["text"] == "hi", "what needs no engine is answered"
    assert streamed_text(running.read_all()) == COUNTED, "what runs goes on"
    deploy(plain, paused=False)
    wait_until(lambda: plain.metrics()["http_admission_paused"] == 0)
    assert answered(plain.post(CHAT, chat("hi"))) == "Hello."
    assert plain.pids("Engine") == engines, "changed in place"


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_nobody_reads_holds_its_slot_until_it_is_read(plain: Graph, stream: bool) -> None:
    before = settled(plain)["generated_tokens_total"]
    body = chat("quick", max_tokens=UNREAD, logprobs=True, logprob_token_ids=list(range(100)), stream=stream)
    paused = RawRequest(plain.port, CHAT, body, receive_buffer=4096)
    wait_until(lambda: plain.metrics()["generated_tokens_total"] >= before + UNREAD)
    wait_until(lambda: plain.metrics()["active_requests"] == 0)
    assert answered(plain.post(CHAT, chat("hi"))) == "Hello."
    time.sleep(1.5)  # longer than the answer needs through the proxy, and than a report to the hub
    assert plain.metrics()["http_slots_in_use"] == 1, "the answer waits for its reader"
    assert paused.read_all().count(b'"token":"') >= UNREAD
    quiet(plain)
