"""Queries of alerts, dashboards and autoscalers: they parse, and what they ask for exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
from promql_parser import VectorSelector

from deploy.k8s_check import code_facts
from deploy.k8s_check.objects import Rendered, ports, selects, title, workloads

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docs" / "operations" / "alerts.md"
# Labels that Prometheus or the PodMonitor adds to every series.
TARGET_LABELS = {"namespace", "pod", "container", "job", "instance"}
HISTOGRAM_LABELS = {"le"}
TO_DRAIN, BACKLOG = "quire:time_to_drain_seconds", "quire:backlog_tokens"
# Grafana replaces these; any value of the right form lets the query be parsed.
GRAFANA = {
    "$__rate_interval": "1m",
    "$__interval": "1m",
    "$namespace": "quire",
    "$model": "m",
}
_BY = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def queries(rendered: Rendered) -> Iterator[tuple[str, str]]:
    """Where a query stands, and its text."""
    for rules in rendered.of("PrometheusRule"):
        for group in rules["spec"]["groups"]:
            for rule in group["rules"]:
                yield f"alert {rule.get('alert', rule.get('record'))}", rule["expr"]
    for scaler in rendered.of("ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            if trigger["type"] == "prometheus":
                yield f"{title(scaler)}, {trigger.get('name')}", trigger["metadata"]["query"]
    for config in rendered.of("ConfigMap"):
        if "grafana_dashboard" in config["metadata"].get("labels", {}):
            for name, text in config["data"].items():
                yield from _dashboard_queries(name, json.loads(text))


def _dashboard_queries(name: str, dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield f"{name}, {panel['title']}", target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            text = variable["query"]["query"]
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
            if found:
                yield f"{name}, variable {variable['name']}", f"count by ({found[2]}) ({found[1]})"


def selectors(expression: Any) -> Iterator[VectorSelector]:
    """Every selector in a parsed query."""
    if isinstance(expression, VectorSelector):
        yield expression
        return
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(expression, name, None)
        if child is not None and not isinstance(child, str | float | int):
            yield from selectors(child)
    for argument in getattr(expression, "args", None) or ():
        yield from selectors(argument)


def problems_of(query: str) -> Iterator[str]:
    """A query that does not parse, or asks for a series or a label that nothing has."""
    for name, value in GRAFANA.items():
        query = query.replace(name, value)
    try:
        parsed = promql_parser.parse(query)
    except ValueError as error:
        yield f"does not parse: {error}"
        return
    known = code_facts.metrics()
    labels = known.labels | TARGET_LABELS | HISTOGRAM_LABELS
    found = list(selectors(parsed))
    if not found:
        yield "asks for no series"
    for selector in found:
        if selector.name not in known.series:
            yield f"nothing exports {selector.name}"
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                yield f"no series has the label {matcher.name}"
    for names in _BY.findall(query):
        for label in filter(None, (word.strip() for word in names.split(","))):
            if label not in labels:
                yield f"no series has the label {label}"


def queries_ask_for_what_there_is(rendered: Rendered) -> Iterator[str]:
    """Of alerts, panels and triggers."""
    for where, query in queries(rendered):
        for problem in problems_of(query):
            yield f"{where}: {problem}"


def scalers_ask_for_their_model(rendered: Rendered) -> Iterator[str]:
    """Each selector of a trigger carries the name that this model is served under, and the
    namespace: the same model may be served in another one."""
    for scaler in rendered.of("ScaledObject"):
        names = {
            config["data"]["QUIRE_SERVED_MODEL_NAME"]
            for config in rendered.of("ConfigMap")
            if "QUIRE_SERVED_MODEL_NAME" in config.get("data", {})
        }
        for trigger in scaler["spec"]["triggers"]:
            try:
                parsed = promql_parser.parse(trigger["metadata"]["query"])
            except ValueError:
                continue  # queries_ask_for_what_there_is names it
            for selector in selectors(parsed):
                where = f"{title(scaler)}, {trigger['name']}"
                asked = {m.value for m in selector.matchers.matchers if m.name == "model_name"}
                if asked != names:
                    yield f"{where}: asks for {asked}, serves {names}"
                asked = {m.value for m in selector.matchers.matchers if m.name == "namespace"}
                if asked != {scaler["metadata"].get("namespace")}:
                    yield f"{where}: asks in {asked or 'every namespace'}"


def scalers_have_both_signals(rendered: Rendered) -> Iterator[str]:
    """Time to drain says how many workers; it says nothing while there is none, so that the
    backlog alone must be a trigger too. That one is always there: where it is missing the
    monitoring is broken, and busy workers must not be taken for idle ones."""
    for scaler in rendered.of("ScaledObject"):
        asked = []
        for trigger in scaler["spec"]["triggers"]:
            try:
                parsed = promql_parser.parse(trigger["metadata"]["query"])
            except ValueError:
                continue  # queries_ask_for_what_there_is names it
            asked.append({selector.name for selector in selectors(parsed)})
            # KEDA's default is "true".
            reads_zero = trigger["metadata"].get("ignoreNullValues", "true") == "true"
            if reads_zero != (TO_DRAIN in asked[-1]):
                yield (
                    f"{title(scaler)}, {trigger['name']}: ignoreNullValues must be "
                    f"{'false' if reads_zero else 'true'}"
                )
        if not any(TO_DRAIN in names for names in asked):
            yield f"{title(scaler)}: no trigger asks for {TO_DRAIN}"
        if {BACKLOG} not in asked:
            yield f"{title(scaler)}: no trigger asks for {BACKLOG} alone, so none would start"


def alerts_are_explained(rendered: Rendered) -> Iterator[str]:
    """Each alert has its section in the documentation, and names it."""
    text = ALERTS.read_text()
    sections = set(re.findall(r"^## (\w+)$", text, re.MULTILINE))
    named = set()
    for rules in rendered.of("PrometheusRule"):
        for group in rules["spec"]["groups"]:
            for rule in group["rules"]:
                named.add(rule["alert"])
                if rule["alert"] not in sections:
                    yield f"alert {rule['alert']}: no section in docs/operations/alerts.md"
                link = f"docs/operations/alerts.md#{rule['alert'].lower()}"
                if rule.get("annotations", {}).get("runbook") != link:
                    yield f"alert {rule['alert']}: its runbook must be {link}"
                if rule.get("labels", {}).get("severity") not in ("critical", "warning"):
                    yield f"alert {rule['alert']}: no severity"
    for extra in sorted(sections - named) if named else ():
        yield f"docs/operations/alerts.md: {extra} is no alert"


def monitors_scrape_the_ops_port(rendered: Rendered) -> Iterator[str]:
    """Every pod of ours that a PodMonitor takes serves /metrics there; none is left out."""
    for monitor in rendered.of("PodMonitor"):
        taken = [w for w in workloads(rendered) if selects(monitor["spec"]["selector"], w.labels)]
        if {w.component for w in taken} != {"gateway", "scheduler", "worker"}:
            yield f"{title(monitor)}: takes {[w.name for w in taken]}"
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if endpoint["path"] not in code_facts.ops_routes():
                yield f"{title(monitor)}: nothing serves {endpoint['path']}"
            for work in taken:
                if endpoint["port"] not in ports(work.containers[0]):
                    yield f"{title(monitor)}: {work.name} has no port {endpoint['port']}"


CHECKS = (
    queries_ask_for_what_there_is,
    scalers_ask_for_their_model,
    scalers_have_both_signals,
    alerts_are_explained,
    monitors_scrape_the_ops_port,
)
