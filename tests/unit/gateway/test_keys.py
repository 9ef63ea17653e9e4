"""API keys: what a file may hold, whose key is shown, and what time tells about it."""

import contextlib
import hashlib
import hmac
import random
import statistics
import time

import pytest

from gateway.core import keys
from gateway.core.keys import KeyRing, KeysError, UnauthorizedError

ALICE, BOB = "sk-alice-secret", "sk-bob-secret"


def digest_of(key: str) -> str:
    """As it stands in a file."""
    return hashlib.sha256(key.encode()).hexdigest()


def ring_of(*lines: str) -> KeyRing:
    """The ring of a file with these lines."""
    return keys.parse("\n".join(lines).encode())


def bearer(key: str) -> list[bytes]:
    """The one header there must be."""
    return [f"Bearer {key}".encode()]


def test_a_file_with_tenants_weights_and_comments() -> None:
    """Each key says whose it is; a tenant may have two."""
    ring = ring_of(
        "# team A",
        "",
        f"alice:{digest_of(ALICE)}",
        f"  bob:{digest_of(BOB).upper()}:7  ",
        f"alice:{digest_of('sk-alice-new')}:3",
    )
    assert len(ring) == 3
    assert [ring.weight(tenant) for tenant in ("alice", "bob", "gone")] == [3.0, 7.0, 1.0]
    assert ring.owner(bearer(ALICE)).tenant == "alice"
    assert ring.owner(bearer("sk-alice-new")).tenant == "alice"
    bob = ring.owner([b"bEaReR  sk-bob-secret "])
    assert (bob.tenant, bob.weight) == ("bob", 7)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("alice", "tenant:sha256"),
        (f"alice:{digest_of(ALICE)}:1:2", "tenant:sha256"),
        (f":{digest_of(ALICE)}", "tenant has"),
        (f"-alice:{digest_of(ALICE)}", "tenant has"),
        (f"{'a' * 65}:{digest_of(ALICE)}", "tenant has"),
        (f"al ice:{digest_of(ALICE)}", "tenant has"),
        (f"alice:{ALICE}", "64 hexadecimal digits"),
        (f"alice:{digest_of(ALICE)[1:]}", "64 hexadecimal digits"),
        (f"alice:{digest_of(ALICE)}:0", "from 1 to 1000"),
        (f"alice:{digest_of(ALICE)}:1001", "from 1 to 1000"),
        (f"alice:{digest_of(ALICE)}:-1", "from 1 to 1000"),
        (f"alice:{digest_of(ALICE)}:two", "from 1 to 1000"),
        (f"alice:{digest_of(BOB)}", "earlier line"),
        ("älice:x", "ASCII"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_alone(line: str, words: str) -> None:
    """Somebody may have written a key where its hash belongs: nothing of a line is repeated."""
    with pytest.raises(KeysError, match=words) as caught:
        ring_of("# one", f"bob:{digest_of(BOB)}", line)
    said = str(caught.value)
    assert said.startswith("line 3: ")
    assert not any(part in said for part in (ALICE, digest_of(ALICE)[:8], "alice"))


def test_a_file_is_bounded_and_not_empty() -> None:
    """In bytes and in keys."""
    lines = [f"t:{digest_of(str(i))}" for i in range(keys.MAX_KEYS)]
    assert len(ring_of(*lines)) == keys.MAX_KEYS
    with pytest.raises(KeysError, match="more than 1024"):
        ring_of(*lines, f"t:{digest_of('one more')}")
    with pytest.raises(KeysError, match="larger than"):
        keys.parse(b"#" * (keys.MAX_FILE_BYTES + 1))
    for empty in (b"", b"# nothing\n"):
        with pytest.raises(KeysError, match="no key"):
            keys.parse(empty)


@pytest.mark.parametrize(
    "shown",
    [
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        [b"Basic " + ALICE.encode()],
        [ALICE.encode()],
        [b"Bearer " + ALICE.encode() + b"x"],
        [b"Bearer " + ALICE[:-1].encode()],
        [b"Bearer " + digest_of(ALICE).encode()],
        [b"Bearer " + ALICE.encode()] * 2,
        [b"Bearer \xff"],
        [b"Bearer " + b"x" * 10_000],
    ],
)
def test_every_wrong_key_is_refused_in_the_same_words(shown: list[bytes]) -> None:
    """Missing, unknown, of another scheme, twice: who guesses learns nothing."""
    with pytest.raises(UnauthorizedError) as caught:
        ring_of(f"alice:{digest_of(ALICE)}").owner(shown)
    assert caught.value.message == UnauthorizedError().message


def test_all_keys_are_compared_whatever_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hmac.compare_digest, hash with hash."""
    compared: list[bytes] = []
    real = hmac.compare_digest

    def counting(a: bytes, b: bytes) -> bool:
        compared.append(a)
        assert len(a) == len(b) == 32
        return real(a, b)

    names = [f"key-{i}" for i in range(10)]
    ring = ring_of(*(f"t{i}:{digest_of(name)}" for i, name in enumerate(names)))
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for shown in (names[0], names[9]):
        ring.owner(bearer(shown))
    for shown in ("nobody's", names[0][:-1] + "x", "x" + names[0][1:]):
        with pytest.raises(UnauthorizedError):
            ring.owner(bearer(shown))
    assert len(compared) == 5 * 10


def test_time_does_not_tell_how_near_a_guess_was() -> None:
    """Wrong in the first byte, and in the last one; the machine's own business is not so steady."""
    ring = ring_of(*(f"t{i}:{digest_of(f'{ALICE}-{i:04}')}" for i in range(256)))
    right = f"{ALICE}-0000"
    near, far = bearer(right[:-1] + "x"), bearer("x" + right[1:])
    found = [_welch(ring, near, far) for _ in range(3)]
    assert min(found) < 4.5, found
    assert max(found) > -4.5, found


def _welch(ring: KeyRing, one: list[bytes], other: list[bytes], rounds: int = 4000) -> float:
    """t of two sets of interleaved times; without the slowest twentieth."""
    times: dict[int, list[int]] = {0: [], 1: []}
    order = random.Random(7)
    for _ in range(rounds):
        for which in order.sample((0, 1), 2):
            began = time.perf_counter_ns()
            with contextlib.suppress(UnauthorizedError):
                ring.owner(other if which else one)
            times[which].append(time.perf_counter_ns() - began)
    a, b = (sorted(times[which])[: rounds * 19 // 20] for which in (0, 1))
    spread = statistics.variance(a) / len(a) + statistics.variance(b) / len(b)
    return (statistics.mean(a) - statistics.mean(b)) / spread**0.5
