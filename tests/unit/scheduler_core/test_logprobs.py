"""Where logprobs are wanted: what may come from the cache, so that the logits they need exist."""

from typing import Any

import pytest

from scheduler_svc.core.types import WorkerId
from tests.builders import FakeRow, expected_output, make_core, make_prompt, make_request
from tests.cluster import Cluster

PROMPT = make_prompt(8, family=1)


def cluster(**config: object) -> Cluster:
    return Cluster(make_core(max_inflight_steps=1, **config))


def row(c: Cluster, name: str, worker: str = "w") -> FakeRow:
    """The request's row on a worker."""
    rows = c.workers[WorkerId(worker)].slots.values()
    return next(row for row in rows if row.admit.request_id == name.encode())


@pytest.mark.parametrize(
    ("wanted", "num_computed"),
    [
        ({}, 12),
        ({"num_logprobs": 0}, 4),
        ({"num_logprobs": 2}, 4),
        ({"num_logprobs": 2, "prompt_logprobs": True}, 0),
    ],
)
def test_output_that_is_repeated_is_computed_again(
    wanted: dict[str, Any], num_computed: int
) -> None:
    """Blocks of 4; prompt 8, six tokens out: all but the last two have their KV on the other."""
    c = cluster()
    c.begin("w")
    request = make_request("a", prompt=PROMPT, max_tokens=12, **wanted)
    c.arrive(request)
    c.steps(6)
    output = c.output("a")
    assert len(output) == 6
    c.begin("other")
    c.arrive(make_request("warm", prompt=[*PROMPT, *output, 5], max_tokens=1))
    c.step("other")
    c.lose("w")
    c.steps(2, "other")
    moved = row(c, "a", "other").admit
    assert (moved.attempt, moved.emit_from) == (2, 0)
    assert moved.num_computed_tokens == num_computed
    c.run()
    assert c.output("a") == expected_output(request)[0]


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_output_that_the_client_has_may_come_from_the_cache(prompt_logprobs: bool) -> None:
    """With the first token the prompt's logprobs have gone out too."""
    c = cluster()
    c.begin()
    wanted: dict[str, Any] = {"num_logprobs": 2, "prompt_logprobs": prompt_logprobs}
    c.arrive(make_request("a", prompt=PROMPT, max_tokens=12, **wanted))
    c.steps(6)
    c.step(fail=True)
    c.steps(2)
    again = row(c, "a").admit
    assert (again.attempt, again.emit_from, len(again.token_ids)) == (1, 6, 14)
    assert again.num_computed_tokens == 12
    c.arrive(make_request("b", prompt=PROMPT, max_tokens=12, outputs=5, **wanted))
    c.steps(2)
    superseded = row(c, "b").admit
    assert (superseded.emit_from, superseded.num_computed_tokens) == (5, 8)
    c.run()


def test_a_scored_prompt_takes_no_hit_but_gives_some() -> None:
    c = cluster()
    c.begin()
    prompt = make_prompt(18, family=1)
    c.arrive(make_request("plain", prompt=prompt, max_tokens=1))
    c.run()
    c.arrive(make_request("scored", prompt=prompt, num_logprobs=0, prompt_logprobs=True))
    c.step()
    scored = row(c, "scored").admit
    assert (scored.num_computed_tokens, scored.num_cached_tokens) == (0, 0)
    c.run()
    other = make_prompt(18, family=2)
    c.arrive(make_request("first", prompt=other, num_logprobs=0, prompt_logprobs=True))
    c.run()
    c.arrive(make_request("second", prompt=other, num_logprobs=0))
    c.step()
    assert row(c, "second").admit.num_computed_tokens == 16
    c.run()


def test_what_is_wanted_goes_to_the_worker() -> None:
    c = cluster()
    c.begin()
    c.arrive(make_request("a", num_logprobs=3, prompt_logprobs=True))
    c.step()
    spec = row(c, "a").admit.sampling
    assert (spec.num_logprobs, spec.prompt_logprobs) == (3, True)
