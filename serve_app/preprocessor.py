"""Lowering as a deployment, and as the port through which an ingress reaches it.

Owns the bounded pool in which requests are lowered. In the compact layout the ingress lowers in its own process
(measured: the hop costs more than the work); the deployment serves the full one. What lowering means is
`engine.text.lowering`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.priority import prompt_process
from engine.text.lowering import Lowering
from engine.types.request import GenerationRequest, PreparedRequest, RequestError
from protocols.errors import Unavailable
from serve_app.startup import Startup

logger = logging.getLogger("ray.serve")

Result = TypeVar("Result")
Answer = tuple[str, Any]
"""("ok", result), or ("refused", (message, field, code)): an error travels as data, whatever carries the call."""


class LocalPreprocessor:
    """PreprocessorPort in this process, on its own few threads."""

    def __init__(self, lowering: Lowering, workers: int) -> None:
        self._lowering = lowering
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="lowering")

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        return await self._run(lambda: self._lowering.prepare(request))

    async def count(self, request: GenerationRequest) -> int:
        return await self._run(lambda: self._lowering.count(request))

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        return await self._run(lambda: self._lowering.label_ids(request, labels))

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class PreprocessorReplica:
    """The deployment. `engine` is only bound below it (see `serve_app.app`)."""

    def __init__(self, startup: Startup, engine: Any = None) -> None:
        prompt_process()
        self._local = LocalPreprocessor(startup.lowering(warm=True), startup.settings.graph.workers)

    async def prepare(self, request: GenerationRequest) -> Answer:
        return await _answer(self._local.prepare(request))

    async def count(self, request: GenerationRequest) -> Answer:
        return await _answer(self._local.count(request))

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> Answer:
        return await _answer(self._local.label_ids(request, labels))

    def __del__(self) -> None:
        if hasattr(self, "_local"):
            self._local.close()


async def _answer(work: Any) -> Answer:
    try:
        return "ok", await work
    except RequestError as error:
        return "refused", (error.message, error.field, error.code)


class RemotePreprocessor:
    """PreprocessorPort over a deployment handle. `handle()` gives None until the application exists."""

    def __init__(self, handle: Callable[[], Any], seconds: float = 30.0) -> None:
        self._handle, self._seconds = handle, seconds

    async def prepare(self, request: GenerationRequest) -> PreparedRequest:
        return cast(PreparedRequest, await self._ask("prepare", request))

    async def count(self, request: GenerationRequest) -> int:
        return cast(int, await self._ask("count", request))

    async def label_ids(self, request: GenerationRequest, labels: Sequence[str]) -> tuple[int | None, ...]:
        return cast("tuple[int | None, ...]", await self._ask("label_ids", request, labels))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        handle = self._handle()
        if handle is None:
            raise Unavailable("the preprocessor is not running yet")
        response = getattr(handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(self._seconds):
                kind, value = await response
        except TimeoutError:
            response.cancel()
            raise Unavailable(f"the preprocessor didn't answer within {self._seconds:.0f} s") from None
        except (RayError, RayServeException) as error:
            logger.warning("preprocessor: %s: %s", type(error).__name__, error)
            raise Unavailable("the preprocessor is not available") from None
        if kind == "refused":
            raise RequestError(value[0], field=value[1], code=value[2])
        return value
