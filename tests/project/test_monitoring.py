"""The alert rules, in examples/monitoring and in ``gemini watch``: what they say in drills, which Prometheus's own tool says, too."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, cast

import page_kit
import pytest
import yaml
from drills import DRILLS, EVERY, LENGTH, SINCE, Answer, Drill

from gemini_ft.agent.figures import DISTRIBUTIONS, OF_HOST, OF_STREAM, families
from gemini_ft.cli.watch import RULES, Alerts, read_rules
from gemini_ft.config import load_config
from gemini_ft.core.promql import History, evaluate, vector

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
# Figure -> its labels, those beside that Prometheus gives all.
FIGURES = {figure.name: {figure.label} - {""} for figure in OF_HOST}
FIGURES |= {figure.name: {"stream", figure.label} - {""} for figure in OF_STREAM}
FIGURES |= {f"gemini_{name}_{part}": {"stream"} for name, _ in DISTRIBUTIONS for part in ("bucket", "count", "sum")}
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


Alert = frozenset[tuple[str, str]]  # its labels


@cache
def course(name: str) -> list[tuple[float, frozenset[Alert], list[dict[str, Any]]]]:
    """At each look: the time, the alerts that fire, and what has changed."""
    drill = DRILLS[name]
    alerts, history, firing, found = Alerts(read_rules(RULES.read_text())), History(3600.0), set[Alert](), []
    for at in times():
        history.add(at, drill.answers(at))
        changed = alerts.judge(history, at)
        for change in changed:
            (firing.add if change["status"] == "firing" else firing.discard)(frozenset(change["labels"].items()))
        found.append((at, frozenset(firing), changed))
    return found


def times() -> list[float]:
    return [EVERY * number for number in range(int(LENGTH / EVERY) + 1)]


@pytest.mark.parametrize("name", DRILLS)
def test_a_drill_has_the_alerts_that_it_should_and_no_others(name: str) -> None:
    drill = DRILLS[name]
    begun: dict[str, float] = {}
    for at, _, changed in course(name):
        for change in changed:
            assert not re.search(r"[{}$]", change["annotations"]["summary"]), change
            if change["status"] == "firing":
                begun.setdefault(change["labels"]["alertname"], at - SINCE)
    assert begun.keys() == drill.fires.keys()
    for alert, least in drill.fires.items():
        assert least <= begun[alert] <= least + 2 * EVERY, alert


def test_every_rule_has_a_drill() -> None:
    assert {alert for drill in DRILLS.values() for alert in drill.fires} == {rule["alert"] for rule in rules()}


def test_a_summary_names_the_host_and_the_figure() -> None:
    changes = [change for name in DRILLS for *_, changed in course(name) for change in changed]
    said = {change["labels"]["alertname"]: change["annotations"]["summary"] for change in changes}
    assert said["GeminiStorageAway"] == "b: storage has failed for 15.2 min; `gemini status` says why"
    assert said["GeminiHostAbsent"] == "1 hosts of main are not heard by the leader of the commits"
    assert said["GeminiTrainingHeldUp"].startswith("b: snapshots hold up ")
    assert said["GeminiTrainingHeldUp"].endswith("% of the training")


# -- the dashboard


def queries() -> list[str]:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@cache
def drilled() -> tuple[History, float]:
    """All figures of a recorded drill, those of each moment when they were recorded; and the last moment."""
    pytest.importorskip("prometheus_client", reason="needs prometheus-client: pip install 'gemini-ft[metrics]'")
    history, at = History(3600.0), 0.0
    for document in page_kit.recorded():
        at = document["at"]
        read = {host: families(of["account"]) for host, of in document["hosts"].items() if of["heard"] < 2}
        answers = {host: [tuple(sample[:3]) for family in found for sample in family.samples] for host, found in read.items()}
        history.add(at, cast("dict[str, Answer]", answers))
    return history, at


@pytest.mark.parametrize("query", queries())
def test_a_query_of_the_dashboard_has_a_result_in_a_recorded_drill(query: str) -> None:
    named = set(re.findall(r"\bgemini_\w+", query))
    assert named
    assert named <= FIGURES.keys()
    found = vector(evaluate(query, *drilled()))
    assert found
    assert all(math.isfinite(value) for value in found.values())


def test_the_dashboard_leaves_out_the_figures_that_this_lists_and_asks_one_source() -> None:
    text = (MONITORING / "dashboard.json").read_text()
    asked = set(re.findall(r"\bgemini_\w+", " ".join(queries())))
    left = {name for name in FIGURES if not name.endswith(("_bucket", "_count"))} - asked
    stays = """agent_start_timestamp_seconds launches finished finishing left_out step commit_interval_seconds snapshot_interval_steps
        commits_total uploads_total failed_uploads_total stored_step failed_timestamp_seconds leader_changes_total leader_reached job_ranks
        gradient_density_ratio"""
    assert left == {f"gemini_{name}" for name in stays.split()}
    assert set(re.findall(r'"uid": "([^"]+)"', text)) == {"gemini-ft", "${datasource}"}
    assert "http" not in text


# -- Prometheus itself

promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")


def checked(folder: Path, kind: str, *arguments: object) -> None:
    done = subprocess.run(["promtool", kind, *map(str, arguments)], capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_reads_its_files() -> None:
    checked(MONITORING, "check", "config", "prometheus.yml")


@promtool
def test_prometheus_reads_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    read = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": read}]}))
    checked(tmp_path, "check", "rules", "queries.yml")


@promtool
def test_prometheus_says_the_same_in_every_drill(tmp_path: Path) -> None:
    """But for summaries, in which durations look different; it looks half as often, which takes it half as long."""
    bare = [{name: value for name, value in rule.items() if name != "annotations"} for rule in rules()]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "gemini", "rules": bare}]}))
    cases = []
    for name, drill in DRILLS.items():
        moments = {at: firing for at, firing, _ in course(name) if at % 900 == 0 and at >= SINCE}
        expected = [
            {
                "eval_time": f"{at:.0f}s",
                "alertname": rule["alert"],
                "exp_alerts": [{"exp_labels": labels} for labels in map(dict, firing) if labels.pop("alertname") == rule["alert"]],
            }
            for at, firing in moments.items()
            for rule in bare
        ]
        cases.append({"interval": f"{EVERY:.0f}s", "input_series": series(drill), "alert_rule_test": expected})
    document = {"rule_files": ["rules.yml"], "evaluation_interval": f"{2 * EVERY:.0f}s", "tests": cases}
    (tmp_path / "test.yml").write_text(json.dumps(document))
    checked(tmp_path, "test", "rules", "test.yml")


@promtool
def test_prometheus_computes_the_same(tmp_path: Path) -> None:
    """At a time between two samples, so that none lies on the border of a range, of which its versions differ."""
    drill, at = DRILLS["restarts"], 2803.0
    history = History(3600.0)
    for moment in times():
        if moment <= at:
            history.add(moment, drill.answers(moment))
    expected = []
    for text in ("increase(gemini_restarts_total[1h])", "rate(gemini_blocked_seconds_sum[10m])", "increase(gemini_restarts_total[7m])"):
        found = evaluate(text, history, at)
        assert isinstance(found, dict)
        labels = {of: "{" + ", ".join(f'{name}="{value}"' for name, value in of) + "}" for of in found}
        samples = [{"labels": labels[of], "value": value} for of, value in found.items()]
        expected.append({"expr": text, "eval_time": f"{at:.0f}s", "exp_samples": samples})
    cases = [{"interval": f"{EVERY:.0f}s", "input_series": series(drill), "promql_expr_test": expected}]
    (tmp_path / "test.yml").write_text(json.dumps({"evaluation_interval": f"{EVERY:.0f}s", "tests": cases}))
    checked(tmp_path, "test", "rules", "test.yml")


def series(drill: Drill) -> list[dict[str, str]]:
    """A drill in the form of promtool."""
    found: dict[str, dict[float, float]] = {}
    for at in times():
        for host, answer in drill.answers(at).items():
            for name, labels, value in of_target(answer):
                shown = ", ".join(f'{label}="{of}"' for label, of in {**labels, "instance": host, "job": "gemini"}.items())
                found.setdefault(f"{name}{{{shown}}}", {})[at] = value
    return [{"series": name, "values": " ".join(values(of))} for name, of in found.items()]


def of_target(answer: Answer) -> list[tuple[str, dict[str, str], float]]:
    return [("up", {}, float(answer is not None)), *((name, dict(labels), value) for name, labels, value in answer or ())]


def values(of: dict[float, float]) -> list[str]:
    """The values at all times; a series that the last answer lacks is stale from then on."""
    found, is_there = [], False
    for at in times():
        found.append(repr(of[at]) if at in of else "stale" if is_there else "_")
        is_there = at in of
    return found


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
