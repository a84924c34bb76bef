# SPDX-License-Identifier: Apache-2.0
"""Layers that can share blocks do, and a token's bytes are counted per group."""

from headrace.core.kv_cache_spec import KvSpec, group_layers, group_of_layers, lay_out

FULL = KvSpec(num_kv_heads=8, head_dim=128)
SLIDING = KvSpec(num_kv_heads=8, head_dim=128, window=512)
WIDE = KvSpec(num_kv_heads=4, head_dim=256)


def test_sliding_layers_have_a_group_of_their_own_beside_full_ones() -> None:
    sliding, full = group_layers([SLIDING, SLIDING, FULL, SLIDING])
    assert (sliding.spec, sliding.layers) == (SLIDING, (0, 1, 3))
    assert (full.spec, full.layers) == (FULL, (2,))


def test_where_every_layer_slides_all_is_kept() -> None:
    (group,) = group_layers([SLIDING] * 3)
    assert group.layers == (0, 1, 2) and group.spec == FULL


def test_slabs_hold_whole_blocks_of_every_group_at_even_distances() -> None:
    narrow = KvSpec(num_kv_heads=2, head_dim=80, window=128)
    for specs in ([SLIDING] * 5 + [FULL], [FULL] * 7 + [narrow] * 3, [WIDE, FULL, narrow, narrow]):
        groups = group_layers(specs)
        layout = lay_out(groups, 32, 100)
        for group, lies in zip(groups, layout.groups, strict=True):
            size = group.bytes_per_block(32)
            assert lies.block_stride * lies.blocks_per_slab == layout.slab_bytes
            assert size <= lies.block_stride < 1.1 * size
            assert lies.window == group.spec.window
            assert lies.block_stride % (32 * group.spec.head_dim * 2) == 0
        assert layout.num_slabs == sum(-(-100 // lies.blocks_per_slab) for lies in layout.groups)


def test_one_group_needs_no_slabs() -> None:
    layout = lay_out(group_layers([FULL] * 36), 32, 1000)
    assert layout.num_blocks == 1000 and layout.groups[0].blocks_per_slab == 1000


def test_unequal_shapes_or_dtypes_do_not_share() -> None:
    fp8 = KvSpec(num_kv_heads=8, head_dim=128, dtype="fp8")
    groups = group_layers([FULL, WIDE, fp8, FULL])
    assert group_of_layers(groups) == [0, 1, 2, 0]


def test_bytes_are_those_of_keys_and_values_over_the_layers_of_the_group() -> None:
    (group,) = group_layers([FULL] * 36)
    assert group.bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert group.bytes_per_block(32) == 32 * group.bytes_per_token
