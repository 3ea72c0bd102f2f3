"""``gemini watch``: the alert rules of Prometheus without Prometheus, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gemini_ft.cli.accounts import asking, has_left, parser_of
from gemini_ft.core.promql import History, Labels, evaluate, seconds_of, vector, without_name
from gemini_ft.core.words import in_words
from gemini_ft.errors import AgentError, ConfigError

RULES = Path(__file__).with_name("alerts.yml")
_KEPT = 3600.0  # seconds; the longest range of a rule
HOOK_SECONDS = 30.0
KILLED_SECONDS = 5.0  # for a hook that was killed to end; one that waits for a disk does not
_STATUS = {"warning": 3, "critical": 4}  # of this process, by the gravest alert that has fired
_FORMATS: dict[str | None, Callable[[float], str]] = {
    "humanizeDuration": in_words,
    "humanize": lambda value: f"{value:.4g}",
    "humanizePercentage": lambda value: f"{100 * value:.4g}%",
}
_EPILOG = (
    "Exit status, at the end (--for, --until, SIGINT, SIGTERM): 0, or 3 if a warning has fired, or 4 if a critical alert has. The hook is "
    "run by sh when alerts begin or end, and reads JSON as receivers of Alertmanager's webhooks do: curl -d @- URL is one."
)


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A rule as Prometheus reads it."""

    name: str
    query: str
    hold: float  # seconds for which the query must have had a result until the alert fires
    labels: Mapping[str, str]
    summary: str


def read_rules(text: str) -> list[AlertRule]:
    """Reads a file of rules. Raises ConfigError: a rule is none, or uses more of Prometheus's language than is known here."""
    import yaml

    found = list[AlertRule]()
    try:
        for rule in [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]:
            evaluate(rule["expr"], History(_KEPT), 0.0)
            summary, hold = rule.get("annotations", {}).get("summary", ""), seconds_of(rule.get("for", "0s"))
            labels = rule.get("labels", {})
            found.append(AlertRule(name=rule["alert"], query=rule["expr"], hold=hold, labels=labels, summary=summary))
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"these are no alert rules: {type(error).__name__}: {error}") from None
    if not found:
        raise ConfigError("these are no alert rules: there is none")
    return found


class Alerts:
    """The alerts of some rules: those whose queries have results, and those of them that fire."""

    def __init__(self, rules: Sequence[AlertRule]) -> None:
        self._rules = rules
        self._begun: dict[tuple[str, Labels], float] = {}
        self._firing: dict[tuple[str, Labels], dict[str, Any]] = {}

    def judge(self, history: History, at: float) -> list[dict[str, Any]]:
        """Returns the alerts that have begun to fire, or ended, in the form of Alertmanager's webhooks."""
        results = [(rule, evaluate(rule.query, history, at)) for rule in self._rules]
        found = {(rule.name, without_name(of)): (rule, value) for rule, of_rule in results for of, value in vector(of_rule).items()}
        self._begun = {key: min(self._begun.get(key, at), at) for key in found}  # a clock may be set back
        over = self._firing.keys() - found.keys()
        now = datetime.fromtimestamp(at, UTC).isoformat()
        changed = [{**self._firing.pop(key), "status": "resolved", "endsAt": now} for key in sorted(over, key=str)]
        for key, (rule, value) in found.items():
            if key not in self._firing and at - self._begun[key] >= rule.hold:
                labels = {"alertname": rule.name, **dict(key[1]), **rule.labels}
                annotations = {"summary": _filled(rule.summary, labels, value)}
                self._firing[key] = {"status": "firing", "labels": labels, "annotations": annotations, "startsAt": now}
                changed.append(self._firing[key])
        return changed


def _filled(template: str, labels: Mapping[str, str], value: float) -> str:
    """A summary with its labels and its value."""

    def part(found: re.Match[str]) -> str:
        label, form = found.groups()
        return labels.get(label, "") if label else _FORMATS.get(form, "{:.15g}".format)(value)

    return re.sub(r"\{\{\s*(?:\$labels\.(\w+)|\$value)\s*(?:\|\s*(\w+))?\s*\}\}", part, template)


def command(argv: Sequence[str]) -> int:
    """Prints a line when an alert begins or ends, and has the hook told."""
    parser = parser_of("watch", "Watch agents by the alert rules that Prometheus would have, without Prometheus.", _EPILOG)
    parser.add_argument("--rules", metavar="FILE", help="other rules, in the form of Prometheus (default: those of --print-rules)")
    parser.add_argument("--print-rules", action="store_true", help="print the rules, for Prometheus, and end")
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS", help="between two looks (default: %(default)g)")
    parser.add_argument("--for", type=float, dest="span", metavar="SECONDS", help="end after this time; 0: after one look")
    parser.add_argument("--until", choices=list(_STATUS), help="end as soon as an alert fires that is at least as grave")
    parser.add_argument("--hook", metavar="COMMAND", help="what is told of alerts")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("yaml") is None:
        raise ConfigError("gemini watch needs pyyaml: pip install 'gemini-ft[metrics]'")
    try:
        text = Path(options.rules or RULES).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--rules {options.rules}: cannot be read ({error})") from None
    if options.print_rules:
        print(text, end="")
        return 0
    if not options.every > 0:
        raise ConfigError(f"--every {options.every:g}: must be more than 0 seconds")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    worst, known = 0, dict[str, None]()
    with suppress(KeyboardInterrupt):
        for changed in _changes(options, text, known):
            for alert in changed:
                print(f"{datetime.now():%H:%M:%S} {alert['status']} {said(alert)}", flush=True)
                worst = max(worst, _STATUS.get(alert["labels"].get("severity", ""), 3) if alert["status"] == "firing" else 0)
            if changed and options.hook:
                tell(options.hook, changed)
            if options.until and worst >= _STATUS[options.until]:
                break
    if not known:
        raise AgentError("no agent has answered; `gemini ps --all` lists those of this machine")
    return worst


def said(alert: Mapping[str, Any]) -> str:
    """Returns the line about an alert."""
    return f"{alert['labels'].get('severity', 'warning')} {alert['labels']['alertname']}: {alert['annotations']['summary']}"


def _changes(options: Any, text: str, known: dict[str, None]) -> Iterator[list[dict[str, Any]]]:
    """Yields the changes of each look, and adds the agents that answer to ``known``; between two looks time passes."""
    ask, alerts, history = asking(options), Alerts(read_rules(text)), History(_KEPT)
    names = set(re.findall(r"\w+", text))  # of figures that matter
    asked = dict[str, None]()  # agents that have answered, but for those of this machine that have left
    end = math.inf if options.span is None else time.monotonic() + options.span
    while True:
        told = {agent: [each for each in of if each[0] in names] for agent, of in ask().items() if of is not None}
        known.update(dict.fromkeys(told))
        for agent in [each for each in asked if each not in told and not options.addresses and has_left(each)]:
            del asked[agent]
            history.forget(agent)
        asked |= dict.fromkeys(told)
        history.add(now := time.time(), {agent: told.get(agent) for agent in asked})
        yield alerts.judge(history, now)
        if (left := end - time.monotonic()) <= 0:
            break
        time.sleep(min(options.every, left))


def tell(hook: str, changed: Sequence[Mapping[str, Any]]) -> None:
    """Runs the hook; one that fails or hangs costs a line, and no alert."""
    status = "firing" if any(alert["status"] == "firing" for alert in changed) else "resolved"
    told = json.dumps({"version": "4", "status": status, "receiver": "gemini watch", "alerts": changed})
    try:
        process = subprocess.Popen(["sh", "-c", hook], stdin=subprocess.PIPE, text=True, start_new_session=True)
        process.communicate(told, timeout=HOOK_SECONDS)
        why = f"ended with status {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_SECONDS)
        why = f"did not end within {HOOK_SECONDS:g} s"
    except OSError as error:  # no process, or no memory, is left for it
        why = f"could not be run ({error})"
    if why:
        print(f"the hook {why}: {hook}", file=sys.stderr, flush=True)
