# SPDX-License-Identifier: Apache-2.0
"""A block's checksum shows every flipped bit, and every word in the wrong place."""

import random

import numpy as np
import pytest
import torch

from headrace.kernels.block_checksum import PIECE, block_checksums, checksum_of

NUM_WORDS = PIECE + 300


@pytest.fixture
def block() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 1 << 63, NUM_WORDS, dtype=np.uint64)


def test_every_flip_of_one_bit_shows(block: np.ndarray) -> None:
    # Of a word the mix is one to one, so a few words stand for all; of each, every bit.
    right = checksum_of(block.data)
    seen = {right}
    for word in (0, 1, 77, PIECE - 1, PIECE, NUM_WORDS - 1):
        for bit in range(64):
            block[word] ^= np.uint64(1 << bit)
            seen.add(checksum_of(block.data))
            block[word] ^= np.uint64(1 << bit)
    assert len(seen) == 1 + 6 * 64
    assert checksum_of(block.data) == right


def test_two_flips_of_the_highest_bit_do_not_cancel(block: np.ndarray) -> None:
    right = checksum_of(block.data)
    block[[5, 900]] ^= np.uint64(1 << 63)
    assert checksum_of(block.data) != right


def test_words_in_each_others_place_show(block: np.ndarray) -> None:
    right = checksum_of(block.data)
    rng = random.Random(1)
    for _ in range(50):
        pair = rng.sample(range(NUM_WORDS), 2)
        block[pair] = block[pair[::-1]]
        assert checksum_of(block.data) != right
        block[pair] = block[pair[::-1]]
    assert checksum_of(np.roll(block, 1).data) != right


def test_a_block_of_zeros_has_a_checksum_of_its_own() -> None:
    assert len({0, *(checksum_of(bytes(8 * n)) for n in (2, 8, 512, NUM_WORDS))}) == 5


def test_the_checksum_does_not_change_between_versions() -> None:
    """Files hold it."""
    assert checksum_of(np.arange(1000, dtype=np.uint64).data) == VALUE
    assert block_checksums(torch.arange(1000)[None], torch.tensor([0])).tolist() == [VALUE]


def _splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return x ^ (x >> 31)


VALUE = sum(_splitmix((i + i * 0x9E3779B97F4A7C15) % (1 << 64)) for i in range(1000)) % (1 << 64)
VALUE -= (VALUE >> 63) << 64
