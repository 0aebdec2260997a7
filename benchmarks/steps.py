"""One rank's steps without an engine around them: decode and prefill rates, and where a decode step's time goes.

    python -m benchmarks.steps [--numerics fast,invariant] [--threads 2] [--clock wall] [--prepared DIR]

`--clock cpu` counts the calling thread's processor time instead of wall time: with one thread it is what a step costs
whatever else the machine is doing. Rates come from the tenth percentile of step times, so that a neighbour's burst
doesn't count; the median is printed beside it. Parts are found by replacing one at a time by its remembered result.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.execution import runner as runner_module
from engine.execution.runner import Runner
from engine.kernels import team
from engine.models.compiled import CompiledLayers
from engine.models.llama import Llama
from engine.parallel.collectives import Alone
from engine.prepare import prepare
from engine.prepared import PreparedModel
from engine.scheduler.step import LateInputs, Row, SlotSetup, Step
from engine.types.request import SamplingParams

CONTEXT = 128
LONG_PAGES, PAGES = 40, 8
"""Pages of slot 0, which takes the long prompts, and of every other slot."""
SAMPLING = SamplingParams(1.0, 0.95, -1, 0.0, 1.0, 0.0, 0.0, 7)
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}


def _late() -> LateInputs:
    raise RuntimeError("no row of this benchmark is gated")


class Steps:
    """Steps of one runner, timed by `clock`."""

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self._runner, self._clock = runner, clock
        self._random = np.random.default_rng(0)

    def run(self, step: Step) -> float:
        """Seconds of one step, its results read."""
        start = self._clock()
        self._runner.launch(step, _late)()
        return self._clock() - start

    def prefill(self, slot: int, count: int, chunk: int = 512) -> float:
        """Seconds for a cold prompt of `count` tokens."""
        ids = self._random.integers(100, self._runner.report.vocab_size - 2000, count).astype("<i4")
        first = LONG_PAGES + (slot - 1) * PAGES if slot else 0
        pages = list(range(first, first + (PAGES if slot else LONG_PAGES)))
        seconds = 0.0
        for at in range(0, count, chunk):
            part = ids[at : at + chunk]
            step = Step(0, [Row(slot, len(part), at, part.tobytes(), sample=at + chunk >= count)])
            if at == 0:
                step.setups = [SlotSetup(slot, SAMPLING, 0, count)]
                step.tables = [(slot, 0, pages)]
            seconds += self.run(step)
        return seconds

    def decode(self, streams: int, steps: int) -> list[float]:
        """Sorted seconds of `steps` decode steps of slots already prefilled."""
        rows = [Row(slot, 1) for slot in range(streams)]
        return sorted(self.run(Step(0, list(rows))) for _ in range(steps))

    def rates(self, streams: list[int], prompts: list[int], steps: int) -> dict[str, float]:
        """Tokens a second: `decodeN` by the tenth percentile, `decodeN_median`, `prefillN` by the best of three."""
        found: dict[str, float] = {}
        for count in prompts:
            found[f"prefill{count}"] = count / min(self.prefill(0, count) for _ in range(3))
        for number in streams:
            for slot in range(number):
                self.prefill(slot, CONTEXT - steps // 2)
            self.decode(number, 2)
            times = self.decode(number, steps)
            found[f"decode{number}"] = number / times[len(times) // 10]
            found[f"decode{number}_median"] = number / times[len(times) // 2]
        return found

    def parts(self, streams: int, steps: int = 12) -> dict[str, float]:
        """Milliseconds of a decode step by part, each the difference that its absence makes to the best step."""
        for slot in range(streams):
            self.prefill(slot, CONTEXT - steps * 4)

        def best() -> float:
            self.decode(streams, 1)
            return self.decode(streams, steps)[0] * 1000

        model, whole = self._runner._model, best()
        layers = model._compiled if isinstance(model, Llama) else None
        found = {"step": whole}
        for part, without in _compiled(layers) if layers else _layered(model, self._runner):
            with without:
                found[part] = whole - best()
        for part, owner, name in (("head", model, "logits"), ("sampling", runner_module, "sample")):
            with _remembered([(owner, name)]):
                found[part] = whole - best()
        found["other"] = 2 * whole - sum(found.values())
        return found


def _compiled(layers: CompiledLayers) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """Each part of the program that all layers are, and a way to leave it out."""
    from engine.kernels import attention, int8, rows, tiles  # compile at import, so only where they run

    for part, functions in (
        ("linears", {int8._quantise.address, tiles.multiply.address}),
        ("attention", {attention.attend.address}),
        ("norms, gates, heads", {rows._norm.address, rows._swiglu.address, rows._heads.address}),
    ):
        yield part, _replaced(layers, "program", layers.program.without(functions))


def _layered(model: Any, runner: Runner) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """The same of layers that are called one by one."""
    linears = [(layer, name) for layer in getattr(model, "layers", []) for name in ("qkv", "output", "gate_up", "down")]
    yield "linears", _remembered(linears)
    yield "attention", _remembered([(runner._attention, "forward")])


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


class _Remembered:
    """A callable that computes once and then repeats itself."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._known = inner, None

    def __call__(self, *args: Any) -> Any:
        if self._known is None:
            self._known = self._inner(*args)
        return self._known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _remembered(places: list[tuple[Any, str]]) -> ExitStack:
    """Each place computes once and then repeats itself."""
    stack = ExitStack()
    for owner, name in places:
        stack.enter_context(_replaced(owner, name, _Remembered(getattr(owner, name))))
    return stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--numerics", default="invariant,fast")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--kernels", choices=("own", "torch"), default="own", help="own: where they run")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--prompts", default="128,2048")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.kernels == "torch":
        team.missing = lambda: "not asked for"  # type: ignore[assignment]
    streams, prompts = ([int(part) for part in text.split(",") if part] for text in (options.streams, options.prompts))
    with tempfile.TemporaryDirectory() as cache:
        prepared = options.prepared or prepare("builtin:smollm2", Path(cache))
        manifest = PreparedModel.load(prepared).manifest
        for numerics in options.numerics.split(","):
            config = EngineConfig(prepared, numerics=numerics, threads=options.threads, max_requests=max(streams))
            start = time.perf_counter()
            runner = Runner(config, manifest, Alone())
            steps = Steps(runner, CLOCKS[options.clock])
            load = time.perf_counter() - start
            result: dict[str, Any] = {"numerics": numerics, "threads": options.threads, "clock": options.clock}
            result |= {"load_seconds": load, "kernels": repr(getattr(runner._model, "precision", ""))}
            result["rates"] = {
                name: round(value, 1) for name, value in steps.rates(streams, prompts, options.steps).items()
            }
            result["milliseconds"] = {
                str(number): {name: round(value, 2) for name, value in steps.parts(number).items()}
                for number in streams
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
