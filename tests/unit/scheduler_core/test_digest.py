"""The digest of block tables: values that both ends of a session must compute."""

import numpy as np
import pytest

from scheduler_svc.core import digest

MAX = (1 << 64) - 1


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ((0, 0, 0, 0, 0), 0x0000000000000000),
        ((0, 1, 0, 0, 0), 0x3571BF6A698C351C),
        ((1, 1, 0, 0, 7), 0x8DC54EB353BA604B),
        ((255, 3, 0, 127, 65535), 0xFA40EFA2831EA37C),
        ((7, 4294967295, 1, 2, 4294967295), 0xADF76CD935C09075),
    ],
)
def test_mix_is_pinned(entry: tuple[int, int, int, int, int], value: int) -> None:
    assert digest.mix(*entry) == value


def test_every_column_counts() -> None:
    entries = [(1, 2, 3, 4, 5), (2, 1, 3, 4, 5), (1, 2, 4, 3, 5), (1, 2, 3, 5, 4), (1, 2, 3, 4, 6)]
    assert len({digest.mix(*entry) for entry in entries}) == len(entries)


def test_a_table_is_the_sum_of_its_entries() -> None:
    whole = digest.table_sum(3, 1, 0, [9, 8, 7])
    assert whole == sum(digest.mix(3, 1, 0, i, b) for i, b in enumerate([9, 8, 7])) & MAX
    grown = digest.add(digest.table_sum(3, 1, 0, [9, 8]), digest.table_sum(3, 1, 2, [7]))
    assert grown == whole


def test_swapped_blocks_change_the_sum() -> None:
    assert digest.table_sum(3, 1, 0, [9, 8]) != digest.table_sum(3, 1, 0, [8, 9])


def test_what_is_added_can_be_taken_away() -> None:
    amount = digest.table_sum(1, 1, 0, range(50))
    assert digest.add(digest.add(MAX, amount), -amount) == MAX


def test_columns_are_mixed_as_single_entries_are() -> None:
    entries = [(i, 2 * i + 1, 3 * i, 2**32 - 1 - i) for i in range(300)]
    mixed = digest.mix_columns(
        np.array(
            [digest.row_key(slot, generation) for slot, generation, _, _ in entries], np.uint64
        ),
        np.array([index for _, _, index, _ in entries], np.uint64),
        np.array([block for _, _, _, block in entries], np.uint64),
    )
    assert mixed.tolist() == [digest.mix(s, g, 0, i, b) for s, g, i, b in entries]


@pytest.mark.parametrize("count", [0, 1, 11, 12, 13, 500])
def test_long_tables_add_up_like_short_ones(count: int) -> None:
    blocks = [(i * 7919) % 5003 for i in range(count)]
    singly = sum(digest.mix(200, 9, 0, 40 + i, b) for i, b in enumerate(blocks)) & MAX
    assert digest.table_sum(200, 9, 40, blocks) == singly
