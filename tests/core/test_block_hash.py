# SPDX-License-Identifier: Apache-2.0
"""Hashes of blocks: what makes two equal, and that they are the same everywhere and for ever."""

import hashlib
import os
import random
import struct
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.block_hash import as_int, chain, child_hash, root_hash

TOKENS = list(range(100, 170))
KEYS = st.lists(st.none() | st.text(max_size=4), max_size=4).map(tuple)


def test_the_hashes_are_the_written_down_ones() -> None:
    """Disk blocks and routers outlive the process: a change here must change MAGIC too."""
    root = hashlib.sha256(b"headrace kv 1\n" + struct.pack("<I", 2) + b"\1" + struct.pack("<Q", 3) + b"abc" + b"\0")
    assert root_hash(("abc", None)) == root.digest()
    first = hashlib.sha256(root.digest() + struct.pack("<4I", 1, 2, 3, 2**32 - 1)).digest()
    assert child_hash(root.digest(), [1, 2, 3, 2**32 - 1]) == first
    assert chain(("abc", None), [1, 2, 3, 2**32 - 1, 9], 4) == [first]
    assert root_hash((None,)).hex() == "7bc7b3341139179159e8c2bd0fb58a4dfaf39a0ac845a4d708c2b0df2a35abd3"
    assert as_int(root_hash((None,))) == int(root_hash((None,)).hex()[:16], 16) // 2 < 2**63


def test_they_are_the_same_in_another_process() -> None:
    code = "from headrace.core.block_hash import chain; print(chain(('s', None), range(64), 16)[-1].hex())"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert other.stdout.strip() == chain(("s", None), range(64), 16)[-1].hex()


def test_a_chain_is_its_blocks_one_by_one() -> None:
    parent = root_hash((None,))
    one_by_one = []
    for start in range(0, 64, 16):
        parent = child_hash(parent, TOKENS[start : start + 16])
        one_by_one.append(parent)
    assert chain((None,), TOKENS, 16) == one_by_one
    assert chain((None,), tuple(TOKENS), 16) == one_by_one
    assert chain((None,), TOKENS[32:], 16, parent=one_by_one[1]) == one_by_one[2:]
    assert chain((None,), TOKENS[:15], 16) == chain((None,), [], 16) == []


def test_what_makes_a_difference() -> None:
    plain = chain((None,), TOKENS, 16)
    others = [
        chain(("salt",), TOKENS, 16),
        chain((None, "salt"), TOKENS, 16),
        chain(("",), TOKENS, 16),
        chain((), TOKENS, 16),
        chain((None,), TOKENS, 32),
        chain((None,), [99, *TOKENS], 16),
    ]
    for other in others:
        assert not set(plain) & set(other)
    changed = chain((None,), [*TOKENS[:40], 7, *TOKENS[41:]], 16)
    assert changed[:2] == plain[:2] and not set(changed[2:]) & set(plain)


@given(KEYS, KEYS)
def test_two_extra_keys_share_a_root_only_where_they_are_equal(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (root_hash(one) == root_hash(other)) == (one == other)


def test_any_text_that_json_can_spell_is_a_salt() -> None:
    assert root_hash(("\ud800",)) != root_hash(("\ud801",))


def test_a_prompt_of_100k_tokens_is_hashed_in_milliseconds() -> None:
    """3 ms on one core of a small machine; the bound is wide for busy ones."""
    token_ids = [random.Random(1).randrange(150_000) for _ in range(100_000)]
    took = []
    for _ in range(10):
        started = time.perf_counter()
        assert len(chain((None,), token_ids, 32)) == 3125
        took.append(time.perf_counter() - started)
    assert min(took) < 0.015, f"{min(took) * 1e3:.1f} ms"
