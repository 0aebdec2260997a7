"""Names, routes and resources of the deployments, without starting any."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from engine.grammar import Grammars
from serve_app import app, room
from serve_app.ingress.families import FAMILIES
from serve_app.preparation import prepare
from serve_app.preprocessor import PreprocessorReplica
from serve_app.ray_flags import LONGEST_SOCKET_PATH, SOCKET_DEPTH, haproxy_directory, set_flags
from serve_app.settings import SettingsError, load
from serve_app.startup import Startup, start
from tests.support.scripted import script, turn


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Startup:
    """A checked start, prepared once."""
    directory = tmp_path_factory.mktemp("app")
    model = script(directory, [turn("hi")], name="app", context=512)
    return start(load({"model": model, "cache_dir": str(directory / "cache")}), hub="test")


def started(source: Startup, **given: str) -> Startup:
    """The same model with other settings."""
    model = {"model": source.settings.model.source, "cache_dir": str(source.settings.model.cache_dir)}
    return Startup(load({**model, **given}), source.prepared, "cpu", "test")


def deployments(target: Any) -> dict[str, Any]:
    """Every deployment of an application, by name."""
    found: dict[str, Any] = {}

    def visit(bound: Any) -> None:
        deployment = bound._bound_deployment
        found[deployment.name] = deployment
        for argument in (*deployment.init_args, *deployment.init_kwargs.values()):
            if hasattr(argument, "_bound_deployment"):
                visit(argument)

    visit(target)
    return found


def cpus(target: app.Target) -> float:
    """What an application's processes ask of Ray."""
    wanted = 0.0
    for deployment in deployments(target.application).values():
        config = deployment._replica_config
        bundles = config.placement_group_bundles or [{"CPU": config.ray_actor_options["num_cpus"]}]
        wanted += deployment.num_replicas * sum(bundle["CPU"] for bundle in bundles)
    return wanted


def test_the_compact_layout_is_one_application(source: Startup) -> None:
    (target,) = app.targets(started(source, layout="compact"))
    assert target.route_prefix == "/"
    assert set(deployments(target.application)) == {"Ingress", "Engine"}
    (target,) = app.targets(started(source, layout="compact", preprocessors="2"))
    assert deployments(target.application)["Preprocessor"].num_replicas == 2


def test_the_full_layout_is_one_application_a_family(source: Startup) -> None:
    targets = app.targets(started(source, layout="full"))
    routes = {target.name: target.route_prefix for target in targets}
    assert routes["engine"] is None
    assert set(routes) == {"engine", *FAMILIES}
    assert set(deployments(targets[0].application)) == {"Preprocessor", "Engine"}
    for target in targets[1:]:
        assert len(deployments(target.application)) == 1
        assert hasattr(app, f"build_{target.name}")


def test_ranks_have_bundles_and_the_replica_sits_in_the_first(source: Startup) -> None:
    startup = started(source, layout="full", tensor_parallel="3", engines="2", rank_cpus="0.25")
    engine = deployments(app.targets(startup)[0].application)["Engine"]
    bundles = engine._replica_config.placement_group_bundles
    assert [bundle["CPU"] for bundle in bundles] == pytest.approx([0.35, 0.25, 0.25])
    assert engine._replica_config.placement_group_strategy == "STRICT_PACK"
    assert engine._deployment_config.max_ongoing_requests >= 100_000
    assert "EngineRouter" in engine._deployment_config.request_router_config.request_router_class
    on_gpus = deployments(app.targets(startup.on("cuda"))[0].application)["Engine"]
    assert [bundle["GPU"] for bundle in on_gpus._replica_config.placement_group_bundles] == [1.0, 1.0, 1.0]


def test_everything_starts_on_two_cores(source: Startup) -> None:
    for layout in ("compact", "full"):
        startup = started(source, layout=layout, engines="2", tensor_parallel="2")
        assert sum(map(cpus, app.targets(startup))) <= 2.0


def test_more_than_a_cluster_of_our_own_has_is_refused(source: Startup, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, preprocessors in (("compact", "0"), ("compact", "2"), ("full", "0"), ("full", "3")):
        given = {"layout": layout, "preprocessors": preprocessors, "ingresses": "2", "engines": "2", "rank_cpus": "0.5"}
        startup = started(source, tensor_parallel="3", **given)
        asked = sum(map(cpus, app.targets(startup)))
        assert room.asked(startup.settings)["CPU"] == pytest.approx(asked)
        monkeypatch.setattr(ray, "cluster_resources", lambda has=asked: {"CPU": has})
        room.check_room(startup.settings)
        monkeypatch.setattr(ray, "cluster_resources", lambda has=asked: {"CPU": has - 0.1})
        with pytest.raises(SettingsError, match=r"graph\.rank_cpus: .*engine\.tensor_parallel"):
            room.check_room(startup.settings)


def test_a_startup_travels_and_means_the_same(source: Startup) -> None:
    startup = started(source)
    assert startup.facts.identifier == "app"
    again = pickle.loads(pickle.dumps(startup))
    assert (again.digest, again.cache_seed, again.facts) == (startup.digest, startup.cache_seed, startup.facts)
    assert started(source, page_tokens="32").digest != startup.digest
    assert started(source, temperature="0.5").digest != startup.digest
    assert started(source, port="9000", drain_seconds="3").digest == startup.digest


def test_cuda_is_refused_where_there_is_none(source: Startup) -> None:
    with pytest.raises(SettingsError, match=r"engine\.device"):
        started(source, device="cuda").on("cpu")
    assert started(source).on("cuda").numerics == "fast"
    assert started(source).on("cpu").numerics == "invariant"


def test_preparing_twice_gives_the_same_directory(source: Startup) -> None:
    assert prepare(source.settings.model) == source.prepared
    assert (source.prepared / "manifest.json").exists()


def test_an_address_that_is_not_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr(app, "_serve_http", lambda: SimpleNamespace(host="127.0.0.1", port=8000))
    app.check_address(load())
    app.check_address(load({"port": "8000"}))
    with pytest.raises(SettingsError, match=r"server\.port: 9000.*8000"):
        app.check_address(load({"port": "9000"}))


@pytest.fixture
def clean_environment() -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def test_fast_flags_are_set_and_an_operators_own_stay(clean_environment: None) -> None:
    os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] = "0.5"
    set_flags(load({"fast": "false"}))
    assert "RAY_SERVE_THROUGHPUT_OPTIMIZED" not in os.environ
    assert os.environ["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "0.5"
    set_flags(load())
    assert os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"


def test_haproxys_sockets_have_paths_that_it_can_bind(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * LONGEST_SOCKET_PATH)
    deep.mkdir()
    made = haproxy_directory(str(deep))
    made.rmdir()
    assert made.parent == Path("/tmp")
    assert len(str(made)) + SOCKET_DEPTH <= LONGEST_SOCKET_PATH


def test_a_temporary_directory_for_haproxy_that_cannot_be_had_is_told(tmp_path: Path) -> None:
    made = haproxy_directory("/nowhere")
    made.rmdir()
    assert made.parent == Path("/tmp")


def test_whoever_lowers_prepares_for_constraints_at_its_start(source: Startup, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Grammars] = []
    monkeypatch.setattr(Grammars, "warm", lambda self: warmed.append(self))
    startup = started(source)
    replica = PreprocessorReplica(startup)
    assert warmed == [startup.grammars]
    replica.__del__()
    startup.lowering()  # a check of the settings compiles nothing
    assert len(warmed) == 1
