"""Calls over handles: what travels by reference, patience, and health answers that are shared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import RayError

from engine.types.constraint import Constraint
from engine.types.events import TokenRecord
from engine.types.request import GenerationRequest, PreparedPrompt, RequestError, SamplingParams, TextPrompt
from protocols.errors import Unavailable
from serve_app.groups import GroupCall
from serve_app.handles import MESSAGE_BYTES, NOT_RUNNING, Cluster, EngineCaller, _size
from serve_app.preprocessor import LocalPreprocessor, RemotePreprocessor
from serve_app.token_channel import Sink

SAMPLING = SamplingParams(1.0, 1.0, -1, 0.0, 1.0, 0.0, 0.0, 7)
SINK = Sink("p", "n", "u", "h", 1, b"k", "d")
REQUEST = GenerationRequest("completions", (TextPrompt("x"),))


def prompt(tokens: int, **fields: Any) -> PreparedPrompt:
    return PreparedPrompt(np.zeros(tokens, dtype=np.int32), SAMPLING, 8, (0,), **fields)


class Answered:
    """A response that is `value`, raises it, or never comes (None)."""

    def __init__(self, value: Any) -> None:
        self.value, self.cancelled = value, False

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        if self.value is None:
            await asyncio.sleep(60)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def cancel(self) -> None:
        self.cancelled = True


class PlayedHandle:
    """A deployment handle whose every method gives the next answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.calls, self.given = list(answers), [], []

    calls: list[tuple[Any, ...]]
    given: list[Answered]

    def __getattr__(self, name: str) -> PlayedHandle:
        return self

    def options(self, **options: Any) -> PlayedHandle:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> Answered:
        self.calls.append((args, kwargs))
        self.given.append(Answered(self.answers.pop(0)))
        return self.given[-1]


def test_the_size_of_a_call_counts_shared_arrays_once() -> None:
    child = prompt(1000)
    assert _size(GroupCall(1, "q", (child,) * 50, SINK)) == 4000
    constrained = prompt(0, constraint=Constraint("regex", "a" * 100), committed=(TokenRecord(1),) * 10)
    assert _size(GroupCall(1, "q", (constrained,), SINK)) == 740


def test_large_calls_travel_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "put", lambda value: ("reference", value))
    handle = PlayedHandle({}, {})
    caller = EngineCaller(lambda: handle)
    small, large = GroupCall(1, "q", (prompt(8),), SINK), GroupCall(2, "q", (prompt(MESSAGE_BYTES),), SINK)
    caller.call(small, ())
    caller.call(large, ("r1",))
    assert handle.calls[0] == ((small,), {"avoid": ()})
    assert handle.calls[1] == (([("reference", large)],), {"avoid": ("r1",)})


def test_without_an_engine_application_calls_are_unavailable() -> None:
    with pytest.raises(Unavailable, match="not running"):
        EngineCaller(lambda: None).call(GroupCall(1, "q", (prompt(8),), SINK), ())


def asked(handle: Any, times: int = 1, replicas: int = 1) -> list[str | None]:
    async def main() -> list[str | None]:
        cluster = Cluster(lambda: handle, None, replicas)  # type: ignore[arg-type]
        return list(await asyncio.gather(*(cluster.health() for _ in range(times))))

    return asyncio.run(main())


def test_many_probes_are_one_question() -> None:
    handle = PlayedHandle(("r1", "rebuilding"))
    assert asked(handle, 20) == ["rebuilding"] * 20
    assert len(handle.calls) == 1
    assert asked(PlayedHandle(("r1", None))) == [None]


def test_one_healthy_engine_is_enough() -> None:
    handle = PlayedHandle(("r1", "rebuilding"), ("r2", None))
    assert asked(handle, replicas=2) == [None]
    assert [kwargs for _, kwargs in handle.calls] == [{"avoid": ()}, {"avoid": ("r1",)}]
    assert asked(PlayedHandle(("r1", "rebuilding"), ("r2", "down")), replicas=2) == ["down"]


def test_health_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.handles.HEALTH_SECONDS", 0.05)
    handle = PlayedHandle(None)
    assert asked(handle) == ["no engine answers"]
    assert handle.given[0].cancelled
    assert asked(PlayedHandle(RayError("gone"))) == ["the engine is unavailable (RayError)"]
    assert asked(None) == [NOT_RUNNING]


class PlayedLowering:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def prepare(self, request: GenerationRequest) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    count = prepare


def test_the_local_port_lowers_on_its_own_threads() -> None:
    async def main() -> None:
        local: Any = LocalPreprocessor(PlayedLowering(7), 1)  # type: ignore[arg-type]
        assert await local.prepare(REQUEST) == 7
        assert await local.count(REQUEST) == 7
        local.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("handle", "outcome"),
    [
        (lambda: PlayedHandle(("ok", 3)), 3),
        (lambda: PlayedHandle(("refused", ("too long", "prompt", "c"))), RequestError),
        (lambda: PlayedHandle(RayError("gone")), Unavailable),
        (lambda: PlayedHandle(None), Unavailable),
        (lambda: None, Unavailable),
    ],
)
def test_the_remote_port(handle: Callable[[], Any], outcome: Any) -> None:
    played = handle()

    async def main() -> Any:
        return await RemotePreprocessor(lambda: played, seconds=0.05).count(REQUEST)

    if isinstance(outcome, int):
        assert asyncio.run(main()) == outcome
        return
    with pytest.raises(outcome) as caught:
        asyncio.run(main())
    if outcome is RequestError:
        assert (caught.value.field, caught.value.code) == ("prompt", "c")
