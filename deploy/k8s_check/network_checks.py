"""The network policies against the table that documents them.

The table stands in deploy/k8s/components/network-policies/README.md. What a rendering allows is
worked out pod by pod, as Kubernetes does: a rule counts towards a pod that its policy selects, and
traffic between two pods needs the egress of the one and the ingress of the other.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.k8s_check.objects import Rendered, Workload, ports, selects, variables, workloads

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "deploy" / "k8s" / "components" / "network-policies" / "README.md"
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| (\d+) \|$", re.MULTILINE)
NAMESPACE_LABEL = "kubernetes.io/metadata.name"


class Edge(NamedTuple):
    """One thing that may open a connection to another, on a port."""

    source: str
    target: str
    port: int


def documented() -> frozenset[Edge]:
    """The rows of the table."""
    rows = _ROW.findall(TABLE.read_text())
    return frozenset(
        Edge(source.strip(), target.strip(), int(port)) for source, target, port in rows
    )


def allowed(rendered: Rendered) -> tuple[frozenset[Edge], list[str]]:
    """Edges that the policies allow, and what is wrong with them on the way."""
    problems: list[str] = []
    out: set[Edge] = set()
    into: set[Edge] = set()
    for work in workloads(rendered):
        directions = set()
        for policy in rendered.of("NetworkPolicy"):
            spec = policy["spec"]
            if not selects(spec["podSelector"], work.labels):
                continue
            directions.update(spec["policyTypes"])
            for rule in spec.get("egress", ()):
                for peer in _peers(rendered, rule.get("to")):
                    for port in _ports(rule, _named(rendered, peer)):
                        out.add(Edge(work.component, peer, port))
            for rule in spec.get("ingress", ()):
                for peer in _peers(rendered, rule.get("from")):
                    for port in _ports(rule, ports(work.containers[0])):
                        into.add(Edge(peer, work.component, port))
        if directions != {"Ingress", "Egress"}:
            problems.append(f"{work.name}: not everything is denied by default")
    inside = {work.component for work in workloads(rendered)}
    both = out & into
    for edge in sorted(out - into):
        if edge.target in inside:
            problems.append(f"{edge.source} may go to {edge.target}:{edge.port}, which refuses it")
    for edge in sorted(into - out):
        if edge.source in inside:
            problems.append(
                f"{edge.target}:{edge.port} admits {edge.source}, which may not go there"
            )
    beyond = {edge for edge in out if edge.target not in inside}
    before = {edge for edge in into if edge.source not in inside}
    return frozenset(both | beyond | before), problems


def _peers(rendered: Rendered, peers: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    """Components, namespaces or addresses that a rule names. No peers at all means anywhere."""
    if peers is None:
        yield "anywhere"
    for peer in peers or ():
        if "ipBlock" in peer:
            yield f"addresses {peer['ipBlock']['cidr']}"
        elif "namespaceSelector" in peer:
            labels = peer["namespaceSelector"].get("matchLabels", {})
            yield f"namespace {labels.get(NAMESPACE_LABEL)}"
        else:
            for work in workloads(rendered):
                if selects(peer["podSelector"], work.labels):
                    yield work.component


def _named(rendered: Rendered, component: str) -> Mapping[str, int]:
    for work in workloads(rendered):
        if work.component == component:
            return ports(work.containers[0])
    return {}


def _ports(rule: Mapping[str, Any], names: Mapping[str, int]) -> Iterator[int]:
    """Numbers of a rule's ports; 0 stands for every port, -1 for a name that the pod lacks."""
    if "ports" not in rule:
        yield 0
    for port in rule.get("ports", ()):
        number = port.get("port", 0)
        yield number if isinstance(number, int) else names.get(number, -1)


def policies_are_the_table(rendered: Rendered) -> Iterator[str]:
    """What is allowed is what is documented, both ways, for the parts that are rendered."""
    if not any(rendered.of("NetworkPolicy")):
        return
    found, problems = allowed(rendered)
    yield from problems
    expected = _expected(rendered)
    for edge in sorted(found - expected):
        yield f"allowed and not in the table: {edge.source} to {edge.target}:{edge.port}"
    for edge in sorted(expected - found):
        yield f"in the table and not allowed: {edge.source} to {edge.target}:{edge.port}"


def _expected(rendered: Rendered) -> frozenset[Edge]:
    """The table's rows for what is rendered. A Redis that is not rendered is an outer address in
    the combinations with external-redis, and another overlay's pod for a further model."""
    inside = {work.component for work in workloads(rendered)}
    edges = set()
    for edge in documented():
        source, target, port = edge
        known = {"gateway", "scheduler", "worker", "redis", "model-cache"}
        if target == "redis" and "redis" not in inside:
            if _external(rendered):
                edges.add(Edge(source, "addresses 0.0.0.0/0", port))
            continue
        if all(word in inside or word not in known for word in (source, target)):
            edges.add(edge)
    return frozenset(edges)


def _external(rendered: Rendered) -> bool:
    return "external-redis" in rendered.name


def denied_pods_have_their_model(rendered: Rendered) -> Iterator[str]:
    """Behind the policies nobody reaches the hub, so the model must lie on a volume."""
    if not any(rendered.of("NetworkPolicy")):
        return
    for work in workloads(rendered):
        if work.component in ("gateway", "worker") and not _on_a_volume(rendered, work):
            yield f"{work.name}: can't reach the hub and has no volume with its model"


def _on_a_volume(rendered: Rendered, work: Workload) -> bool:
    model = variables(rendered, work.containers[0]).get("QUIRE_MODEL") or ""
    return model.startswith("/")


CHECKS = (policies_are_the_table, denied_pods_have_their_model)
