"""Names of blocks: a keyed chain, the same in every process."""

import os
import subprocess
import sys
from array import array

import pytest

from scheduler_svc.core import prefix
from scheduler_svc.core.types import BlockHash

PINNED = ["e7f5ec54ce8801102b220dc474cfa8c5", "80382ff19be86dc2969c4533b44182e0"]


def names(tokens: range, size: int = 4, key: bytes = b"k", salt: bytes = b"") -> list[BlockHash]:
    chain: list[BlockHash] = []
    prefix.extend_chain(chain, prefix.chain_start(key, salt), array("I", tokens), size)
    return chain


@pytest.mark.parametrize(("num_tokens", "num_names"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2)])
def test_only_full_blocks_have_names(num_tokens: int, num_names: int) -> None:
    assert len(names(range(num_tokens))) == num_names


def test_a_name_covers_all_tokens_before_it() -> None:
    one, other = names(range(12)), names(range(100, 112))
    assert len({*one, *other}) == 6
    moved: list[BlockHash] = []
    prefix.extend_chain(
        moved, prefix.chain_start(b"k", b""), array("I", [9, 9, 9, 9, *range(4, 12)]), 4
    )
    assert not set(moved) & set(one)


def test_equal_prefixes_have_equal_names() -> None:
    assert names(range(20))[:3] == names(range(14))


def test_a_chain_grows_without_renaming() -> None:
    grown = names(range(8))
    before = list(grown)
    prefix.extend_chain(grown, prefix.chain_start(b"k", b""), array("I", range(17)), 4)
    assert grown[:2] == before
    assert grown == names(range(17))


def test_salts_and_keys_separate() -> None:
    chains = [
        names(range(8)),
        names(range(8), salt=b"tenant"),
        names(range(8), key=b"other"),
        names(range(8), key=b"other", salt=b"tenant"),
    ]
    assert len({block for chain in chains for block in chain}) == 8


def test_a_key_of_any_length_is_taken() -> None:
    assert len(prefix.chain_start(b"x" * 1000, b"y" * 1000)) == 16


SCRIPT = """
from array import array
from scheduler_svc.core import prefix
chain = []
prefix.extend_chain(chain, prefix.chain_start(b"k", b"salt"), array("I", range(8)), 4)
print([name.hex() for name in chain])
"""


@pytest.mark.parametrize("hash_seed", ["0", "1234"])
def test_names_are_the_same_in_every_process(hash_seed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == str(PINNED)
