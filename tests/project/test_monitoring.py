"""examples/monitoring: files that Prometheus reads, of figures that agents have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemini_ft.agent.figures import DISTRIBUTIONS, OF_HOST, OF_STREAM
from gemini_ft.config import load_config

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
# Figure -> its labels, those beside that Prometheus gives all.
FIGURES = {figure.name: {figure.label} - {""} for figure in OF_HOST}
FIGURES |= {figure.name: {"stream", figure.label} - {""} for figure in OF_STREAM}
FIGURES |= {f"{name}_{part}": {"stream"} for name, _, _ in DISTRIBUTIONS for part in ("bucket", "count", "sum")}
OF_PROMETHEUS = {"instance", "job"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return list(group["rules"])


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_an_alert_is_about_figures_and_labels_that_there_are(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    named = set(re.findall(r"\bgemini_\w+", rule["expr"]))
    assert named <= FIGURES.keys()
    assert named or rule["expr"].startswith('up{job="gemini"}')
    labels = set().union(OF_PROMETHEUS, *(FIGURES[name] for name in named))
    used = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", rule["expr"])
    used += re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert {label.strip() for each in used for label in each.split(",") if label.strip()} <= labels
    assert rule["expr"].count("(") == rule["expr"].count(")")
    for name in re.findall(r"(?:increase|rate)\((\w+)\[", rule["expr"]):  # of counters alone
        assert name.endswith(("_total", "_sum", "_count"))
    assert rule["labels"]["severity"] in ("critical", "warning")


def test_stalled_progress_comes_first_and_no_name_twice() -> None:
    names = [rule["alert"] for rule in rules()]
    assert names[0] == "GeminiProgressStalled"
    assert len(names) == len(set(names))


def test_the_configuration_scrapes_the_port_that_it_names() -> None:
    text = (MONITORING / "prometheus.yml").read_text()
    found = yaml.safe_load(text)
    (address,) = re.findall(r"GEMINI_METRICS=(\S+)", text)
    port = str(load_config({"metrics": address}).metrics).rpartition(":")[2]
    (scraped,) = found["scrape_configs"]
    assert scraped["job_name"] == "gemini"
    assert {target.rpartition(":")[2] for each in scraped["static_configs"] for target in each["targets"]} == {port}
    assert [(MONITORING / name).exists() for name in found["rule_files"]] == [True]
