"""What the code says of itself, read from its sources: routes, metrics, label names.

The checks import no service: a check of manifests must not need torch, and a launcher knows
servicekit only. tests/unit/deploy/test_k8s_facts.py holds what is read here against the objects.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from servicekit.catalogue import CATALOGUE
from servicekit.settings import PREFIX, Setting

ROOT = Path(__file__).resolve().parents[2]
METRIC_SOURCES = (
    "gateway/metrics.py",
    "scheduler_svc/metrics.py",
    "gpu_worker/metrics.py",
    "servicekit/ops.py",
)
_METRIC = re.compile(r"(vllm|quire):[a-z][a-z0-9_]*")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_KINDS = ("counter", "gauge", "histogram")
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Series that some service exports, and the labels that some series carries."""

    series: frozenset[str]
    labels: frozenset[str]


def settings() -> dict[str, Setting]:
    """Variable to setting."""
    return {PREFIX + entry.name.upper(): entry for entry in CATALOGUE}


@cache
def ops_routes() -> frozenset[str]:
    """Paths of the ops port."""
    tree = ast.parse((ROOT / "servicekit" / "ops.py").read_text())
    return frozenset(
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Route"
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    )


@cache
def metrics() -> Metrics:
    """Of all services. Raises ValueError at a metric whose kind can't be told."""
    series: set[str] = set()
    labels: set[str] = set()
    for name in METRIC_SOURCES:
        tree = ast.parse((ROOT / name).read_text(), name)
        for metric, kind in _families(tree):
            # prometheus_client takes a `_total` off a counter's name and adds it again.
            base = metric.removesuffix("_total") if kind == "counter" else metric
            series.update(base + suffix for suffix in SUFFIXES[kind])
        labels.update(_labels(tree))
    return Metrics(series=frozenset(series), labels=frozenset(labels))


def version() -> str:
    """Quire's own."""
    found = re.search(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _families(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Metric names with their kind: of the call that makes them, or of the table they stand in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = _metric_name(node.args[0])
            if name is not None:
                yield name, _kind(tree, ast.unparse(node.func), name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for row in node.value.elts:
                name = _metric_name(row.elts[0]) if isinstance(row, ast.Tuple) else None
                if name is not None:
                    yield name, _kind(tree, ast.unparse(node.targets[0]), name)


def _metric_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if _METRIC.fullmatch(node.value) else None
    return None


def _kind(tree: ast.Module, word: str, name: str) -> str:
    """By the maker's own name, or by what a maker of another name makes."""
    texts = [word]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == word.rpartition(".")[2]:
            texts += [
                ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)
            ]
    for text in texts:
        for kind in _KINDS:
            if kind in text.lower():
                return kind
    raise ValueError(f"{name}: is {word} a counter, a gauge or a histogram?")


def _labels(tree: ast.Module) -> Iterator[str]:
    """Words of lists of strings, and words beside a metric's name: label names, all of them."""
    for node in ast.walk(tree):
        words: list[ast.expr] = []
        if isinstance(node, ast.List):
            words = node.elts
        elif isinstance(node, ast.Call) and node.args and _metric_name(node.args[0]) is not None:
            words = node.args[1:]
        for word in words:
            text = word.value if isinstance(word, ast.Constant) else None
            if isinstance(text, str) and _LABEL.fullmatch(text):
                yield text
