# SPDX-License-Identifier: Apache-2.0
"""The host tier remembers what is to be copied and stored, and not what is gone."""

from headrace.core.host_tier import LEAST_QUEUED, HostTier
from headrace.core.node import Node


def node_of(parent: Node) -> Node:
    return Node(parent, (1, 2), [0], 1)


def test_nodes_that_are_gone_leave_the_queue_of_copies() -> None:
    tier, root = HostTier(35), Node(None, (), [], 0)
    kept = node_of(root)
    tier.queue_copy(kept)
    for _ in range(20 * LEAST_QUEUED):
        node = node_of(root)
        tier.queue_copy(node)
        node.parent = None
    assert len(tier._to_copy) <= LEAST_QUEUED + 2
    assert tier.next_to_copy() is kept and not kept.is_queued
    assert tier.next_to_copy() is None


def test_nodes_without_a_copy_leave_the_queue_of_what_is_to_be_stored() -> None:
    tier, root = HostTier(35), Node(None, (), [], 0)
    tier.add_units(2)
    kept, *others = [node_of(root) for _ in range(20 * LEAST_QUEUED)]
    for node in (kept, *others):
        unit = tier.take()
        assert unit is not None
        tier.keep(node, unit, 1)
        tier.let_go(unit, node)
        tier.queue_store(node)
        if node is not kept:
            tier.drop(node)
    assert len(tier._to_store) <= LEAST_QUEUED + 2
    assert tier.next_to_store() is kept
    assert tier.next_to_store() is None
