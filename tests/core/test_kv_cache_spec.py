# SPDX-License-Identifier: Apache-2.0
"""Layers that can share blocks do, and a token's bytes are counted per group."""

from headrace.core.kv_cache_spec import KvSpec, group_layers, group_of_layers

FULL = KvSpec(num_kv_heads=8, head_dim=128)
SLIDING = KvSpec(num_kv_heads=8, head_dim=128, window=512)
WIDE = KvSpec(num_kv_heads=4, head_dim=256)


def test_sliding_layers_share_the_full_group_until_windows_are_split() -> None:
    specs = [SLIDING, SLIDING, FULL, SLIDING]
    (group,) = group_layers(specs)
    assert group.layers == (0, 1, 2, 3) and group.spec == FULL
    sliding, full = group_layers(specs, split_windows=True)
    assert (sliding.spec, sliding.layers) == (SLIDING, (0, 1, 3))
    assert (full.spec, full.layers) == (FULL, (2,))


def test_unequal_shapes_or_dtypes_do_not_share() -> None:
    fp8 = KvSpec(num_kv_heads=8, head_dim=128, dtype="fp8")
    groups = group_layers([FULL, WIDE, fp8, FULL])
    assert group_of_layers(groups) == [0, 1, 2, 0]


def test_bytes_are_those_of_keys_and_values_over_the_layers_of_the_group() -> None:
    (group,) = group_layers([FULL] * 36)
    assert group.bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert group.bytes_per_block(32) == 32 * group.bytes_per_token
