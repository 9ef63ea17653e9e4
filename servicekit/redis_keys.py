"""Names of all Redis keys, as pure functions of the served model's name.

All keys of a model carry the hash tag {model}, so that scripts stay on one cluster node.
"""

GROUP = "scheduler"
CONSUMER = "leader"


def _key(model: str, *parts: str) -> str:
    return ":".join(("quire", "{" + model + "}", *parts))


def requests(model: str) -> str:
    """Stream of QueueEntry; entries are deleted when their request has ended."""
    return _key(model, "requests")


def wake(model: str) -> str:
    """Channel published to after an entry has been added."""
    return _key(model, "wake")


def notices(model: str, gateway_id: str) -> str:
    """Stream of Notice for one gateway."""
    return _key(model, "notices", gateway_id)


def lease(model: str) -> str:
    """Holder of the leadership, with a TTL."""
    return _key(model, "lease")


def epoch(model: str) -> str:
    """Highest epoch handed out."""
    return _key(model, "epoch")


def backlog(model: str) -> str:
    """Hash published by the leader: requests, tokens, tokens_per_s."""
    return _key(model, "backlog")


def registry(model: str, kind: str) -> str:
    """Sorted set of ids by expiry in Redis milliseconds; kind is `worker` or `gateway`."""
    return _key(model, "registry", kind)


def record(model: str, kind: str, member_id: str) -> str:
    """Record of one registry member, with a TTL."""
    return _key(model, kind, member_id)
