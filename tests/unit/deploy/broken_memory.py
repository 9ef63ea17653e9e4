"""What may be wrong with memory, each with the check that must find it and what it must say."""

from deploy.k8s_check import memory_checks
from tests.unit.deploy.manifests import Change, Check, container, get, model_gib, setting

BROKEN: list[tuple[Check, Change, str]] = [
    (
        memory_checks.workers_fit_their_memory,
        lambda r: setting(r, "QUIRE_SWAP_SPACE_GIB", "16"),
        "memory limit 32 GiB, but 1 x weights 14.20 + host pool 16.00 + process 4.00 = 34.20 GiB",
    ),
    (
        memory_checks.workers_fit_their_memory,
        lambda r: setting(r, "QUIRE_SWAP_SPACE_GIB", "12.5"),
        "memory request 16 GiB, but host pool 12.50 + process 4.00 = 16.50 GiB",
    ),
    (
        memory_checks.workers_fit_their_memory,
        lambda r: model_gib(r, "65"),
        "memory limit 32 GiB, but 1 x weights 65.00",
    ),
    (
        memory_checks.workers_fit_their_memory,
        lambda r: model_gib(r, None),
        "no quire/model-gib of model-source",
    ),
    # Without a GPU the cache is in the same memory, and weights are packed while both are there.
    (
        memory_checks.workers_fit_their_memory,
        lambda r: container(r, "worker").update(
            resources={
                "requests": {"memory": "8Gi"},
                "limits": {"memory": "16Gi"},
            }
        ),
        "2 x weights 28.40 + KV cache 4.00 + host pool 1.00 + process",
    ),
    (
        memory_checks.volumes_hold_the_model,
        lambda r: model_gib(r, "65"),
        "PersistentVolumeClaim models: 50 GiB for a model of 65",
    ),
    (
        memory_checks.redis_fits_its_memory,
        lambda r: get(r, "ConfigMap", "redis-config")["data"].update(
            {"valkey.conf": "maxmemory 2gb\n"}
        ),
        "limit 2 GiB, maxmemory 2 GiB twice",
    ),
]
