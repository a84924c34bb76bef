# SPDX-License-Identifier: Apache-2.0
"""Steps get the smallest shape they fit in, and none that cannot occur is captured."""

import pytest

from headrace.core.padded_sizes import PaddedSize, PaddedSizes, decode_sizes, mixed_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 100, 256, 700, 2048])
def test_decode_sizes_reach_the_largest_batch_and_never_pass_it(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    waste = max((at - below - 1) / (below + 1) for below, at in zip([0, *sizes], sizes, strict=False))
    assert waste <= 0.6


def test_mixed_sizes_stay_within_the_tokens_of_a_step() -> None:
    assert mixed_sizes(100) == [16, 32, 64, 96]
    assert mixed_sizes(8) == []


def test_a_decode_step_takes_a_decode_shape_and_a_mixed_one_does_not() -> None:
    sizes = PaddedSizes(8, [1, 2, 4, 8], [16, 32])
    assert sizes.of_body(3, 3, is_decode=True) == PaddedSize(4, 4, True)
    assert sizes.of_body(3, 3, is_decode=False) == PaddedSize(16, 8, False)
    assert sizes.of_body(17, 2, is_decode=False) == PaddedSize(32, 8, False)
    assert sizes.of_body(33, 2, is_decode=False) is None
    assert sizes.of_head(5) == 8


def test_a_decode_step_beyond_the_decode_shapes_takes_a_mixed_one() -> None:
    assert PaddedSizes(16, [1, 2], [16]).of_body(9, 9, is_decode=True) == PaddedSize(16, 16, False)


def test_without_padding_only_an_exact_fit_will_do() -> None:
    sizes = PaddedSizes(8, [1, 4], [16], enable_padding=False)
    assert sizes.of_body(4, 4, is_decode=True) == PaddedSize(4, 4, True)
    assert sizes.of_body(3, 3, is_decode=True) is None
    assert sizes.of_body(16, 2, is_decode=False) == PaddedSize(16, 8, False)


def test_sizes_over_the_largest_batch_are_dropped() -> None:
    assert PaddedSizes(8, [1, 16, 64], []).decode == [1]
