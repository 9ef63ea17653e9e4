"""Key names, pinned as literals: a renamed key is a change of the contract between services."""

from servicekit import redis_keys


def test_literals() -> None:
    """All of them, for one model."""
    model = "smollm2-135m"
    assert redis_keys.requests(model) == "quire:{smollm2-135m}:requests"
    assert redis_keys.wake(model) == "quire:{smollm2-135m}:wake"
    assert redis_keys.notices(model, "g1") == "quire:{smollm2-135m}:notices:g1"
    assert redis_keys.lease(model) == "quire:{smollm2-135m}:lease"
    assert redis_keys.epoch(model) == "quire:{smollm2-135m}:epoch"
    assert redis_keys.backlog(model) == "quire:{smollm2-135m}:backlog"
    assert redis_keys.registry(model, "worker") == "quire:{smollm2-135m}:registry:worker"
    assert redis_keys.record(model, "worker", "w1") == "quire:{smollm2-135m}:worker:w1"
    assert redis_keys.GROUP == "scheduler"
    assert redis_keys.CONSUMER == "leader"


def test_all_keys_of_a_model_share_their_hash_tag() -> None:
    """Scripts touch several of them, so they must lie on one node of a cluster."""
    keys = [
        redis_keys.requests("m"),
        redis_keys.notices("m", "g"),
        redis_keys.lease("m"),
        redis_keys.registry("m", "gateway"),
        redis_keys.record("m", "gateway", "g"),
    ]
    assert {key[key.index("{") : key.index("}") + 1] for key in keys} == {"{m}"}
