"""Ten thousand requests, good and bad, over both protocols, beside a stream that must not notice.

`make fuzz N=100000` sends more; FUZZ_SEED=n sends the same ones again.
"""

from collections import Counter

import grpc
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.asking import OF_STATUS, Asker, Outcome, same_param
from tests.fuzz.asks import ASKS, CALLS, POSTS, Ask, Call, Post
from tests.fuzz.conftest import NUM_REQUESTS, SEED
from tests.fuzz.world import World, leak_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300 + NUM_REQUESTS // 50)]
# So many at a time.
BATCH = 48
SENT_TWICE, POSTED, CALLED = 0.25, 0.4, 0.1
DOCUMENTED = {200, 400, 401, 404, 405, 413, 415, 504}
DOCUMENTED_CODES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


def fuzz(share: float) -> settings:
    """So large a share of the requests."""
    return settings(
        max_examples=max(1, round(NUM_REQUESTS * share / BATCH)),
        deadline=None,
        database=None,
        # A failure names its one request, which is small; to make it smaller would take minutes.
        phases=(Phase.generate,),
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )


def batches(asked: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
    """BATCH of them."""
    return st.lists(asked, min_size=BATCH, max_size=BATCH)


def compare(ask: Ask, rest: Outcome, grpc_: Outcome) -> None:
    """One validator, one engine: the same words and the same tokens."""
    late = {rest.verdict, grpc_.verdict}
    if "deadline" in late and late <= {"ok", "deadline"} and "deadline_ms" in ask.fields:
        return
    exactly = ask.known_seed
    assert rest.said(exactly=exactly) == grpc_.said(exactly=exactly), f"FUZZ_SEED={SEED} {ask}"
    assert same_param(rest, grpc_), f"FUZZ_SEED={SEED} {ask}: {rest.param}, {grpc_.param}"
    assert rest.verdict in {"ok", *OF_STATUS.values()} - {"failed", "full", "unavailable"}, ask
    for outcome in (rest, grpc_):
        asked = f"{ask.prompt!r}{ask.fields!r}"
        assert leak_in(outcome.raw, asked) == "", f"FUZZ_SEED={SEED} {ask}: {outcome.raw}"


def test_both_protocols_say_the_same(fuzzed: World, asker: Asker) -> None:
    """Verdict, field and words of refusals; text, tokens, end and cost of answers."""
    verdicts: Counter[str] = Counter()

    @seed(SEED)
    @fuzz(SENT_TWICE)
    @given(batches(ASKS))
    def throw(asks: list[Ask]) -> None:
        rest = [asker.by_rest(ask) for ask in asks]
        outcomes = asker.together([*rest, *(asker.by_grpc(ask) for ask in asks)])
        for i, ask in enumerate(asks):
            compare(ask, outcomes[i], outcomes[i + len(asks)])
            verdicts[outcomes[i].verdict] += 2

    with fuzzed.round(f"both protocols, FUZZ_SEED={SEED}"):
        throw()
    print(dict(verdicts))
    # Half of what is generated is good: a fuzzer whose requests all end at the door tests the door.
    assert verdicts["ok"] > sum(verdicts.values()) / 4
    assert verdicts["invalid"] > sum(verdicts.values()) / 10


def check_response(post: Post, status: int, text: str) -> None:
    """A documented status, well-formed, and nothing of ours in it."""
    asked = post.path + repr(post.headers) + post.body.decode("utf-8", "replace")
    where = f"FUZZ_SEED={SEED} {post}: {status} {text[:500]}"
    assert status in DOCUMENTED, where
    assert status != 504 or "deadline_ms" in asked, where
    if post.path not in ("/openapi.json", "/metrics"):
        assert leak_in(text, asked) == "", where


def test_whatever_is_posted_gets_a_documented_answer(fuzzed: World, asker: Asker) -> None:
    """All routes, JSON of all kinds and what is none; pickles and addresses among it."""
    statuses: Counter[int] = Counter()

    @seed(SEED)
    @fuzz(POSTED)
    @given(batches(POSTS))
    def throw(posts: list[Post]) -> None:
        responses = asker.together([asker.post(post) for post in posts])
        for post, response in zip(posts, responses, strict=True):
            check_response(post, response.status, response.text)
            statuses[response.status] += 1

    with fuzzed.round(f"posts, FUZZ_SEED={SEED}"):
        throw()
    print(dict(statuses))
    assert statuses[200] > sum(statuses.values()) / 10


def test_whatever_is_called_gets_a_documented_status(fuzzed: World, asker: Asker) -> None:
    """All methods of both services, messages and what is none."""
    codes: Counter[str] = Counter()

    @seed(SEED)
    @fuzz(CALLED)
    @given(batches(CALLS))
    def throw(calls: list[Call]) -> None:
        ends = asker.together([asker.call(call) for call in calls])
        for call, (code, said) in zip(calls, ends, strict=True):
            where = f"FUZZ_SEED={SEED} {call}: {code} {said[:500]}"
            assert code in DOCUMENTED_CODES, where
            assert leak_in(said, call.data.decode("utf-8", "replace")) == "", where
            codes[code.name] += 1

    with fuzzed.round(f"calls, FUZZ_SEED={SEED}"):
        throw()
    print(dict(codes))
    assert codes["OK"] > sum(codes.values()) / 10
