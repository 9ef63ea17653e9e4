"""Memory: what settings make a process take must fit what its container may take.

A worker's arithmetic, in GiB, as gpu_worker/kv_cache.py sizes things:

    limit    on a CPU  2 x weights + KV cache + host pool + process
             on a GPU  weights, which pass through the host, + host pool + process
    request  the same without what loading alone takes: the weights' second copy, on a GPU both

The host pool, for swapped KV blocks, is QUIRE_SWAP_SPACE_GIB, or by memory: an eighth of the limit
at most, and no more than 4 GiB with a GPU, 1 GiB without. The KV cache of a CPU is
QUIRE_KV_CACHE_GIB, or a quarter of the limit, 4 GiB at most; its pages and the pool's are taken as
blocks are first written, so what fits at the start may not fit an hour later. The weights are
an annotation of the ConfigMap model-source, beside the model's name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.k8s_check.objects import Rendered, Workload, services, variables, workloads

GPU = "nvidia.com/gpu"
# Python, torch, transformers and a step's own tensors: measured on a CPU, and with a CUDA context
# an estimate.
PROCESS_GIB = {"cpu": 1.25, "gpu": 4.0}
POOL_SHARE, POOL_MOST_GIB = 1 / 8, {"cpu": 1.0, "gpu": 4.0}
KV_SHARE, KV_MOST_GIB = 1 / 4, 4.0
# Rewriting the append-only file may copy every page.
REDIS_COPIES = 2
_QUANTITY = re.compile(r"([0-9.]+)(|Ki|Mi|Gi|Ti|k|M|G|T)")
_UNITS = {
    "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip
MODEL_GIB = "quire/model-gib"
_MAXMEMORY = re.compile(r"^maxmemory (\d+)gb$", re.MULTILINE)


def gib(quantity: str) -> float:
    """Kubernetes' form of an amount of memory. Raises ValueError."""
    found = _QUANTITY.fullmatch(quantity)
    if found is None:
        raise ValueError(f"no amount of memory: {quantity!r}")
    return float(found[1]) * _UNITS[found[2]] / 2**30


def workers_fit_their_memory(rendered: Rendered) -> Iterator[str]:
    """Weights, KV cache, host pool and process within limits and requests."""
    for work in services(rendered):
        if work.component == "worker":
            yield from _worker_fits(rendered, work)


def _worker_fits(rendered: Rendered, work: Workload) -> Iterator[str]:
    container = work.containers[0]
    found = variables(rendered, container)
    resources = container["resources"]
    limit, request = (gib(str(resources[p]["memory"])) for p in ("limits", "requests"))
    kind = "gpu" if GPU in resources["limits"] else "cpu"
    weights = _weights_gib(rendered)
    if weights is None:
        # A bare base names a model of the hub and does not say how large it is.
        if not rendered.name.startswith("base"):
            yield f"{work.name}: no {MODEL_GIB} of model-source says how large the model is"
        weights = 0.0
    pool = float(found.get("QUIRE_SWAP_SPACE_GIB") or -1)
    pool = pool if pool >= 0 else min(limit * POOL_SHARE, POOL_MOST_GIB[kind])
    kv = 0.0
    if kind == "cpu":
        kv = float(found.get("QUIRE_KV_CACHE_GIB") or 0) or min(limit * KV_SHARE, KV_MOST_GIB)
    loading, kept = (2, 1) if kind == "cpu" else (1, 0)
    for word, amount, copies in (("limit", limit, loading), ("request", request, kept)):
        parts = {
            f"{copies} x weights": copies * weights,
            "KV cache": kv,
            "host pool": pool,
            "process": PROCESS_GIB[kind],
        }
        if sum(parts.values()) > amount:
            told = " + ".join(f"{name} {value:.2f}" for name, value in parts.items() if value)
            yield f"{work.name}: memory {word} {amount:g} GiB, but {told} = {_total(parts)} GiB"


def _total(parts: Mapping[str, float]) -> str:
    return f"{sum(parts.values()):.2f}"


def _weights_gib(rendered: Rendered) -> float | None:
    for config in rendered.of("ConfigMap"):
        annotations = config["metadata"].get("annotations") or {}
        if MODEL_GIB in annotations:
            return float(annotations[MODEL_GIB])
    return None


def volumes_hold_the_model(rendered: Rendered) -> Iterator[str]:
    """The claim is larger than the model that the Job puts there."""
    weights = _weights_gib(rendered)
    for claim in rendered.of("PersistentVolumeClaim"):
        size = gib(claim["spec"]["resources"]["requests"]["storage"])
        if weights is not None and size < weights:
            name = claim["metadata"]["name"]
            yield f"PersistentVolumeClaim {name}: {size:g} GiB for a model of {weights:g}"


def redis_fits_its_memory(rendered: Rendered) -> Iterator[str]:
    """Twice maxmemory within the limit."""
    for work in workloads(rendered):
        if work.component != "redis":
            continue
        limit = gib(_limit(work.containers[0]))
        for volume in work.spec["volumes"]:
            config = rendered.find("ConfigMap", volume.get("configMap", {}).get("name", ""))
            found = _MAXMEMORY.search(config["data"].get("valkey.conf", "")) if config else None
            if found and int(found[1]) * REDIS_COPIES > limit:
                yield f"{work.name}: limit {limit:g} GiB, maxmemory {found[1]} GiB twice"


def _limit(container: Mapping[str, Any]) -> str:
    return str(container["resources"]["limits"]["memory"])


CHECKS = (workers_fit_their_memory, volumes_hold_the_model, redis_fits_its_memory)
