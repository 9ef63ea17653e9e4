"""What travels beside a prompt: a partition that keeps tenants apart, a well-formed trace."""

import pytest

from gateway.core.labels import cache_partition, valid_traceparent

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_tenant_and_salt_the_partition_is_shared() -> None:
    """Nothing to keep apart."""
    assert cache_partition("", "") == b""


def test_no_two_callers_share_a_partition_by_accident() -> None:
    """Neither by the same salt, nor by names that run into each other."""
    pairs = [("", "s"), ("a", ""), ("a", "s"), ("b", "s"), ("as", ""), ("a", "s:"), ("", "1:as")]
    partitions = {cache_partition(*pair) for pair in pairs}
    assert len(partitions) == len(pairs)
    assert {len(p) for p in partitions} == {32}
    assert cache_partition("a", "s") == cache_partition("a", "s")


def test_a_long_salt_costs_no_more_than_a_short_one() -> None:
    """A digest travels, and nobody's own words."""
    assert len(cache_partition("t", "é" * 256)) == 32
    assert b"secret" not in cache_partition("secret", "secret")


@pytest.mark.parametrize(
    "text", [TRACE, TRACE[:-2] + "00", "cc" + TRACE[2:], "cc" + TRACE[2:] + "-what-comes-later"]
)
def test_a_trace_goes_on(text: str) -> None:
    """Later versions may add parts."""
    assert valid_traceparent(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        TRACE.upper(),
        TRACE + "-more",
        TRACE + "\n",
        "ff" + TRACE[2:],
        "00-" + "0" * 32 + TRACE[35:],
        TRACE[:36] + "0" * 16 + "-01",
        TRACE[:-1],
        TRACE.replace("-", "_"),
        "cc" + TRACE[2:] + "-" + "x" * 300,
        TRACE.replace("0", "\uff10"),
    ],
)
def test_a_broken_trace_is_dropped(text: str) -> None:
    """A request is never refused for it."""
    assert valid_traceparent(text) == ""
