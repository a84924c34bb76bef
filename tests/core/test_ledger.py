# SPDX-License-Identifier: Apache-2.0
"""The memory adds up, `auto` says what it chose, and what does not fit names changes that do help."""

from dataclasses import replace

import pytest

from headrace.core.ledger import GIB, MemoryNeeds, MemoryWish, changes_that_fit, plan_memory
from headrace.errors import ConfigError

# An 8B model in bf16 on a card of 24 GiB: 128 KiB of KV a token.
NEEDS = MemoryNeeds(
    total_bytes=24 * GIB,
    weight_bytes=15 * GIB,
    activation_bytes_per_token=128 * 1024,
    kv_bytes_per_block=32 * 128 * 1024,
    tokens_per_block=32,
    fixed_bytes=GIB // 2,
    other_bytes=GIB // 2,
    device="cuda:0",
)
WISH = MemoryWish(max_seq_len=None, model_max_seq_len=40960, max_num_tokens=8192, min_num_tokens=256)


def test_everything_the_device_has_is_accounted_for() -> None:
    ledger = plan_memory(NEEDS, WISH)
    activations = 128 * 1024 * 8192
    spent = NEEDS.weight_bytes + NEEDS.fixed_bytes + NEEDS.other_bytes + activations + ledger.kv_bytes
    assert 0 <= NEEDS.total_bytes - NEEDS.reserve_bytes - spent < NEEDS.kv_bytes_per_block
    assert ledger.num_blocks == 6 * 256
    assert ledger.kv_bytes_per_token == 128 * 1024


def test_auto_takes_the_models_length_or_what_fits_and_says_so() -> None:
    assert plan_memory(NEEDS, WISH).max_seq_len == 40960
    assert plan_memory(NEEDS, WISH).notes == ()
    ledger = plan_memory(replace(NEEDS, weight_bytes=19 * GIB), WISH)
    assert ledger.max_seq_len == ledger.num_kv_tokens == 16384
    assert "16,384 of the model's 40,960" in ledger.notes[0]


def test_a_fraction_is_of_what_is_left_after_load_and_the_smaller_cap_holds() -> None:
    half = plan_memory(NEEDS, replace(WISH, free_memory_fraction=0.5, max_seq_len=1024))
    assert half.kv_bytes == int(3.5 * GIB)
    capped = plan_memory(NEEDS, replace(WISH, free_memory_fraction=0.5, max_kv_tokens=2000, max_seq_len=1024))
    assert capped.num_blocks == 63


def test_the_table_names_each_part() -> None:
    ledger = plan_memory(NEEDS, WISH)
    table = "\n".join(ledger.lines())
    for part in ("cuda:0", "total", "weights", "activations (8,192 tokens)", "KV cache", "left over", "49,152 tokens"):
        assert part in table
    (weights,) = [line for line in ledger.lines() if "weights" in line]
    assert weights.split()[-1] == "15.00"


def test_the_table_shows_predicted_beside_measured_and_a_dash_for_what_is_neither() -> None:
    needs = replace(NEEDS, graph_bytes=GIB // 4)
    reckoned = plan_memory(replace(needs, weight_bytes=16 * GIB, graph_bytes=GIB // 2), WISH)
    lines = plan_memory(needs, WISH).lines(reckoned, {"graphs"})
    columns = {line[:44].strip("-= ").strip(): line[44:].split() for line in lines[1:9]}
    assert lines[0].split()[-2:] == ["predicted", "measured"]
    assert columns["total"] == ["-", "24.00"]
    assert columns["other processes, driver, libraries"] == ["-", "0.50"]
    assert columns["weights"] == ["16.00", "15.00"]
    assert columns["CUDA graphs"] == ["0.50", "-"]
    for column in (0, 1):
        kinds = ("weights", "activations (8,192 tokens)", "request rows and workspaces", "KV cache", "left over")
        parts = sum(float(columns[part][column]) for part in kinds)
        assert parts + 0.5 + (0.5, 0.25)[column] == pytest.approx(24, abs=0.03)


def test_an_explicit_length_that_does_not_fit_names_the_three_smallest_changes() -> None:
    wish = replace(WISH, max_seq_len=50_000)
    with pytest.raises(ConfigError) as caught:
        plan_memory(NEEDS, wish)
    message = caught.value.message
    first, table = message.split("\n", 1)
    assert caught.value.param == "max_seq_len"
    assert first.startswith("max_seq_len (50,000) does not fit")
    assert "lower max_seq_len from 50,000 to 49,152 or auto" in first
    assert "use a device with 24." in first
    assert "raise kv_cache_config.free_gpu_memory_fraction from auto to 0.8" in first
    assert first.count(";") == 2
    assert "memory of cuda:0" in table


@pytest.mark.parametrize(
    ("needs", "wish"),
    [
        (NEEDS, replace(WISH, max_seq_len=50_000)),
        (NEEDS, replace(WISH, max_seq_len=55_000, max_num_tokens=16384)),
        (NEEDS, replace(WISH, max_seq_len=30_000, free_memory_fraction=0.4)),
        (NEEDS, replace(WISH, max_seq_len=30_000, max_kv_tokens=20_000)),
        (replace(NEEDS, other_bytes=4 * GIB), replace(WISH, max_seq_len=40_960)),
        (NEEDS, replace(WISH, max_seq_len=90_000, kv_bytes_per_block_by_dtype={"int8": 16 * 128 * 1024})),
        (replace(NEEDS, weight_bytes=23 * GIB), WISH),
    ],
)
def test_each_change_named_does_make_it_fit(needs: MemoryNeeds, wish: MemoryWish) -> None:
    with pytest.raises(ConfigError):
        plan_memory(needs, wish)
    seq_len = wish.max_seq_len or 512
    # Nothing is checked at this length, so that the ledger of the failure can be had.
    failed = plan_memory(needs, replace(wish, max_seq_len=None, model_max_seq_len=0))
    failed = replace(failed, wish=wish)
    changes = changes_that_fit(failed, seq_len)
    assert changes and [each.factor for each in changes] == sorted(each.factor for each in changes)
    for change in changes:
        plan_memory(*applied(change.sentence, needs, wish))


def applied(sentence: str, needs: MemoryNeeds, wish: MemoryWish) -> tuple[MemoryNeeds, MemoryWish]:
    """The settings after doing what the sentence says."""
    words = sentence.replace(",", "").split()
    if "max_seq_len" in sentence:
        return needs, replace(wish, max_seq_len=int(words[5]))
    if "max_num_tokens" in sentence:
        return needs, replace(wish, max_num_tokens=int(words[5]))
    if "max_tokens" in sentence:
        return needs, replace(wish, max_kv_tokens=int(words[5]))
    if "fraction" in sentence:
        return needs, replace(wish, free_memory_fraction=float(words[5]))
    if "dtype" in sentence:
        return replace(needs, kv_bytes_per_block=wish.kv_bytes_per_block_by_dtype[words[3]]), wish
    if "device" in sentence:
        return replace(needs, total_bytes=int((float(words[4]) + 0.01) * GIB)), wish
    return replace(needs, other_bytes=needs.other_bytes - int((float(words[1]) + 0.01) * GIB)), wish
