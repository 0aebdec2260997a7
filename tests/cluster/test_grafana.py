"""The Grafana dashboard asks for series that Ray's metrics agent has."""

from __future__ import annotations

import json
import re
from importlib.resources import files

from serve_app.metrics_table import TABLE

BOARD = json.loads((files("cluster") / "grafana" / "flare.json").read_text())


def test_every_series_is_one_of_ours() -> None:
    names = {metric.name for metric in TABLE} | {"first_response_seconds_bucket"}
    asked = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    asked += [variable["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    for text in asked:
        found = re.findall(r"ray_flare_(\w+)", text)
        assert found and set(found) <= names, text
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")


def test_counters_are_asked_for_their_rates() -> None:
    kinds = {metric.name: metric.kind for metric in TABLE}
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            for name in re.findall(r"rate\(ray_flare_(\w+)\{", target["expr"]):
                assert kinds.get(name, "counter") == "counter", name


def test_panels_have_a_place_and_an_id_of_their_own() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in BOARD["panels"]}) == len(places)
