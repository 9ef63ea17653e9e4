"""Fields and types: Kubernetes' own schemas, and those of KEDA and Prometheus that stand here.

Kubernetes is checked in the oldest version that Quire supports and in the newest that the schemas
know. The schemas of custom resources (schemas/) hold the fields that the manifests use and allow no
other, so that a new field is looked up once and written down.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from kubernetes_validate import utils
from referencing import Registry, Resource

from deploy.k8s_check.objects import Manifest, Rendered, title

SCHEMAS = Path(__file__).resolve().parent / "schemas"
OLDEST = "1.29"
LIMIT = 200


@cache
def versions() -> tuple[str, str]:
    """The oldest and the newest, with their patch numbers."""
    known = utils.all_versions()
    oldest = next(version for version in known if version.startswith(OLDEST + "."))
    return oldest, utils.latest_version()


@cache
def custom() -> dict[tuple[str, str], dict[str, Any]]:
    """Schemas of custom resources, by apiVersion and kind."""
    found = {}
    for path in sorted(SCHEMAS.glob("*.json")):
        schema = json.loads(path.read_text())
        properties = schema["properties"]
        found[properties["apiVersion"]["const"], properties["kind"]["const"]] = schema
    return found


@cache
def _definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    return Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))


@cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    group, _, number = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0]}-{number}" if group else f"{kind.lower()}-{number}"
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    try:
        schema = utils.schema_contents(f"{folder}/{name}.json", version)
    except FileNotFoundError:
        return None
    registry: Registry[Any] = _definitions(version) @ Registry()
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems_of(manifest: Manifest) -> Iterator[str]:
    """Of one object."""
    key = (manifest["apiVersion"], manifest["kind"])
    if key in custom():
        validator = jsonschema.Draft202012Validator(custom()[key])
        yield from _errors(validator, manifest, "")
        return
    for version in versions():
        found = _validator(version, *key)
        if found is None:
            yield f"{title(manifest)}: Kubernetes {version} has no {key[1]} in {key[0]}"
        else:
            yield from _errors(found, manifest, f" (Kubernetes {version})")


def _errors(validator: Any, manifest: Manifest, where: str) -> Iterator[str]:
    for error in validator.iter_errors(manifest):
        path = ".".join(str(part) for part in error.absolute_path)
        yield f"{title(manifest)}: {path}: {error.message[:LIMIT]}{where}"


_seen: dict[str, tuple[str, ...]] = {}


def objects_fit_their_schemas(rendered: Rendered) -> Iterator[str]:
    """Each object once, however many renderings hold it."""
    for manifest in rendered.manifests:
        key = json.dumps(manifest, sort_keys=True)
        if key not in _seen:
            _seen[key] = tuple(problems_of(manifest))
        yield from _seen[key]


CHECKS = (objects_fit_their_schemas,)
