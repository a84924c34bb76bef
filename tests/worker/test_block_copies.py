# SPDX-License-Identifier: Apache-2.0
"""Copies of a plan, grouped into launches, give what they give one after the other."""

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.block_copies import rounds_of_copies

COPIES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 5)), max_size=14)


@given(COPIES, st.randoms(use_true_random=False))
def test_rounds_give_what_one_copy_after_the_other_gives(
    copies: list[tuple[int, int, int]], order: random.Random
) -> None:
    expected = [list(range(6)), list(range(6))]
    for group, source, destination in copies:
        expected[group][destination] = expected[group][source]
    got = [list(range(6)), list(range(6))]
    for group, flat in rounds_of_copies(copies):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        # On a device the copies of one launch happen at the same time, in no order.
        order.shuffle(pairs)
        for source, destination in pairs:
            got[group][destination] = got[group][source]
        assert len({destination for _, destination in pairs}) == len(pairs)
        assert not {source for source, _ in pairs} & {destination for _, destination in pairs}
    assert got == expected


def test_copies_that_do_not_meet_are_one_launch_for_each_group() -> None:
    copies = [(0, 1, 9), (1, 1, 9), (0, 1, 8), (1, 9, 1), (0, 3, 7)]
    assert rounds_of_copies(copies) == [(0, [1, 9, 1, 8, 3, 7]), (1, [1, 9]), (1, [9, 1])]


def test_no_copies_are_no_launches() -> None:
    assert rounds_of_copies([]) == []
    assert rounds_of_copies([(0, 4, 4)]) == []
