# SPDX-License-Identifier: Apache-2.0
"""Which priority a block gets."""

import msgspec
import pytest

from headrace.core.retention import Retention

RETENTION = Retention([(0, 40, 90, None), (40, 64, 10, 500), (100, 130, 80, None)], 20, 3000)


@pytest.mark.parametrize(
    ("first_token", "wanted"),
    [
        (0, (90, None)),
        (32, (90, None)),  # Straddles two ranges: its first token is in the first of them.
        (64, (35, None)),
        (96, (35, None)),  # A range begins in its middle.
        (128, (80, None)),  # The prompt ends in it, and so does the range.
        (160, (20, 3000)),
    ],
)
def test_the_first_token_of_a_block_decides(first_token: int, wanted: tuple[int, int | None]) -> None:
    assert RETENTION.of_block(first_token, 135) == wanted


def test_a_block_before_the_first_range_is_in_none() -> None:
    assert Retention([(64, 96, 90, None)]).of_block(32, 128) == (35, None)


def test_without_a_wish_blocks_have_the_usual_priority() -> None:
    assert Retention().of_block(0, 10) == Retention().of_block(32, 10) == (35, None)


def test_it_crosses_to_the_core_as_it_is() -> None:
    data = msgspec.msgpack.encode(RETENTION)
    assert msgspec.msgpack.decode(data, type=Retention) == RETENTION
