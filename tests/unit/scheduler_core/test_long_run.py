"""Long random histories from plain seeds: every promise holds, every request gets its tokens."""

import random

import pytest

from scheduler_svc.core.events import (
    GatewayLost,
    StepFailed,
    WorkerDraining,
    WorkerSubscribed,
)
from scheduler_svc.core.types import FaultScope, FinishReason, WorkerId
from tests.builders import GATEWAY, expected_output, make_core, make_request
from tests.cluster import MS, Cluster

NAMES = ("w0", "w1")
OTHER_GATEWAY = "other gateway"


class History:
    """One seeded history: so many random events, then everything heals and must end."""

    def __init__(self, seed: int, depth: int) -> None:
        self.random = random.Random(seed)
        self.cluster = Cluster(
            make_core(
                max_inflight_steps=depth,
                prefill_chunk_tokens=self.random.choice((0, 0, 7)),
                scheduling_policy=self.random.choice(("fcfs", "fcfs", "fair", "static")),
                max_skips=self.random.choice((1, 16)),
            )
        )
        self.num_requests = 0
        for name in NAMES:
            self.join(name)

    def join(self, name: str) -> None:
        """Sizes change from one life of a worker to the next."""
        self.cluster.join(
            name,
            num_slots=self.random.choice((3, 8)),
            num_blocks=self.random.choice((24, 30, 60)),
            block_size=self.random.choice((4, 16)),
            max_num_batched_tokens=self.random.choice((5, 32, 64)),
            max_model_len=self.random.choice((90, 400)),
        )

    def play(self, num_events: int) -> None:
        """Random events."""
        for _ in range(num_events):
            self.cluster.now_ns += self.random.choice((0, 1, 5)) * MS
            chance = self.random.random()
            if chance < 0.08:
                self.arrive()
            elif chance < 0.10:
                self.cancel()
            elif chance < 0.11:
                self.supersede()
            elif chance < 0.116:
                self.change_worker()
            elif chance < 0.13:
                self.fail()
            elif chance < 0.134:
                self.other()
            else:
                self.complete()

    def arrive(self) -> None:
        """Prompts of a few families, so that prefixes are shared."""
        pick = self.random
        self.cluster.arrive(
            make_request(
                f"r{self.num_requests}",
                prompt=pick.randint(1, 110),
                family=pick.randint(0, 3),
                max_tokens=pick.randint(1, 60),
                stop_after=pick.choice((None, None, pick.randint(1, 60))),
                priority=pick.choice((0, 0, 0, 1, -1)),
                tenant=pick.choice("abc"),
                deadline_ns=pick.choice(
                    (None, None, self.cluster.now_ns + pick.randint(1, 800) * MS)
                ),
                gateway_id=pick.choice((GATEWAY, GATEWAY, GATEWAY)),
            )
        )
        self.num_requests += 1

    def some_request(self) -> str | None:
        return f"r{self.random.randrange(self.num_requests)}" if self.num_requests else None

    def cancel(self) -> None:
        """Any request, ended or not; sometimes its worker hears it first."""
        name = self.some_request()
        if name is not None:
            if self.random.random() < 0.5:
                for worker in self.cluster.workers.values():
                    worker.cancel(make_request(name).request_id)
            self.cluster.cancel(name)

    def supersede(self) -> None:
        """A gateway that waits too long asks anew."""
        name = self.some_request()
        if name is not None and self.cluster.end(name) is None:
            self.cluster.supersede(name)

    def change_worker(self) -> None:
        """A worker dies, comes back, or comes back without anyone having seen it die."""
        name = self.random.choice(NAMES)
        if WorkerId(name) in self.cluster.workers and self.random.random() < 0.8:
            self.cluster.lose(name)
        else:
            self.join(name)

    def fail(self) -> None:
        """A step or a worker fails."""
        busy = [w for w in self.cluster.workers.values() if w.plans]
        if not busy:
            return
        worker = self.random.choice(busy)
        if self.random.random() < 0.1:
            step = worker.plans[0].step
            self.cluster.feed(
                StepFailed(
                    now_ns=self.cluster.now_ns,
                    worker_id=worker.worker_id,
                    step=step,
                    scope=FaultScope.WORKER,
                    reason="planted",
                )
            )
        else:
            self.cluster.step(worker.worker_id, fail=True)

    def other(self) -> None:
        """Drains, subscriptions, losses of a gateway that nobody uses."""
        now_ns, name = self.cluster.now_ns, WorkerId(self.random.choice(NAMES))
        chance = self.random.random()
        if chance < 0.3:
            self.cluster.feed(WorkerDraining(now_ns=now_ns, worker_id=name))
        elif chance < 0.6:
            gateways = self.random.choice(((), (GATEWAY,), (GATEWAY, OTHER_GATEWAY)))
            self.cluster.feed(
                WorkerSubscribed(now_ns=now_ns, worker_id=name, gateway_ids=frozenset(gateways))
            )
        else:
            self.cluster.feed(GatewayLost(now_ns=now_ns, gateway_id=OTHER_GATEWAY))

    def complete(self) -> None:
        """A worker answers; now and then a result comes twice."""
        busy = [w for w in self.cluster.workers.values() if w.plans]
        if not busy:
            self.cluster.advance(0)
            return
        event = self.cluster.result(self.random.choice(busy).worker_id)
        self.cluster.feed(event)
        if self.random.random() < 0.02:
            self.cluster.feed(event)

    def heal(self) -> None:
        """Fresh workers that everyone reads; what a gateway still misses it asks for anew."""
        for name in NAMES:
            self.cluster.join(name, num_blocks=64, block_size=4, max_model_len=400)
        self.cluster.run()
        for stream in self.cluster.gateway.streams.values():
            if stream.end is None:
                self.cluster.supersede(stream.arrival.request_id.decode())
        self.cluster.run()

    def check_end(self) -> None:
        """One end for every client, with the right tokens; nothing is left behind."""
        for request_id, stream in self.cluster.gateway.streams.items():
            output, reason = expected_output(stream.arrival)
            assert stream.end is not None, f"{request_id!r} never ends"
            assert stream.tokens == output[: len(stream.tokens)]
            if stream.end in (FinishReason.STOP, FinishReason.LENGTH):
                assert (stream.tokens, stream.end) == (output, reason)
        self.cluster.assert_idle()


@pytest.mark.parametrize(
    ("seed", "depth"),
    [
        (0, 2),
        (0, 0),
        *(
            pytest.param(seed, depth, marks=pytest.mark.slow)
            for seed in range(2)
            for depth in (1, 2, 4, 8, 0)
            if (seed, depth) not in {(0, 2), (0, 0)}
        ),
    ],
)
def test_every_request_ends_once_with_its_tokens(seed: int, depth: int) -> None:
    history = History(seed * 8 + depth, depth)
    history.play(2000)
    history.heal()
    history.check_end()
