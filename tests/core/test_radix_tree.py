# SPDX-License-Identifier: Apache-2.0
"""The prefix cache finds what was put in, gives up the right thing, and its counts are what a recount gives."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.block_pool import BlockPool
from headrace.core.kv_cache_spec import CacheLayout
from headrace.core.radix_tree import Node, RadixTree


class Tree(RadixTree):
    """Of one group, with its pool."""

    def __init__(self, tokens_per_block: int, num_blocks: int = 100) -> None:
        self.pool = BlockPool(CacheLayout.plain(num_blocks))
        self.time = 0.0
        super().__init__(tokens_per_block, self.pool, lambda: self.time)

    def grow(self, tokens: list[int], extra_key: str = "", priority: int = 35, duration_ms: int | None = None) -> Node:
        """Put `tokens` in; the pinned end of the path."""
        node = self.root(extra_key)
        self.pin(node)
        size = self.tokens_per_block
        for start in range(0, len(tokens) // size * size, size):
            block = tokens[start : start + size]
            if self.is_in_use(node, block):
                node = node.children[tuple(block)]
                node.num_pins += 1
            else:
                node = self.insert(node, block, self.pool.take(0, 1), priority, duration_ms)
        return node

    def prefixes(self) -> set[tuple[int, ...]]:
        """What can be found, one token a block."""
        return {tuple(each.key[0] for each in self.path(node)) for node in self.nodes() if not node.is_detached}


def blocks(tree: RadixTree, node: Node) -> list[int]:
    return [each.block_ids[0] for each in tree.path(node)]


def test_a_match_is_whole_blocks_of_the_same_tokens_under_the_same_key() -> None:
    tree = Tree(2)
    tree.grow([1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 9, 9], "", 9).depth == 2
    assert tree.match([1, 2, 3], "", 9).depth == 1
    assert tree.match([1, 2, 3, 4, 5, 6], "", 2).depth == 2
    assert tree.match([3, 4], "", 9).depth == 0
    assert tree.match([1, 2], "salt", 9).depth == 0


def test_a_part_of_a_block_is_the_longest_common_beginning() -> None:
    tree = Tree(4)
    for tail in ([1, 2, 3, 9], [1, 2, 8, 8], [7, 2, 3, 4]):
        tree.grow(tail)
    node, count = tree.match_part(tree.root(""), [1, 2, 3, 4])
    assert node is not None and node.key == (1, 2, 3, 9) and count == 3
    assert tree.match_part(tree.root(""), [5]) == (None, 0)
    assert tree.match_part(tree.root(""), []) == (None, 0)


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    tree = Tree(1)
    ends = [tree.grow([0, i]) for i in (1, 2, 3)]
    for end in (ends[1], ends[0], ends[2]):
        tree.unpin(end)
    used_again = tree.match([0, 2], "", 9)
    tree.pin(used_again)
    tree.unpin(used_again)
    gone = []
    for _ in range(4):
        before = tree.prefixes()
        tree.give_up_one(0)
        gone += before - tree.prefixes()
        tree.check_invariants()
    assert gone == [(0, 1), (0, 3), (0, 2), (0,)]
    assert not tree.nodes() and not tree._roots and tree.pool.groups[0].num_free == 100


def test_what_is_pinned_stays_and_so_does_the_way_to_it() -> None:
    tree = Tree(1)
    deep = tree.grow([1, 2, 3])
    tree.unpin(tree.grow([1, 2, 4]))
    assert tree.pool.groups[0].num_cached == 1
    tree.give_up_one(0)
    assert tree.prefixes() == {(1,), (1, 2), (1, 2, 3)}
    with pytest.raises(AssertionError, match="nothing may go"):
        tree.give_up_one(0)
    tree.unpin(deep)
    assert tree.pool.groups[0].num_cached == 3


def test_a_lower_priority_goes_first_however_recently_it_was_used() -> None:
    tree = Tree(1)
    for token, priority in ((1, 80), (2, 35), (3, 10)):
        tree.unpin(tree.grow([token], priority=priority))
    order = []
    for _ in range(3):
        before = tree.prefixes()
        tree.give_up_one(0)
        order += before - tree.prefixes()
    assert order == [(3,), (2,), (1,)]


def test_a_priority_falls_back_when_its_time_is_up() -> None:
    tree = Tree(1)
    tree.unpin(tree.grow([1], priority=80, duration_ms=1000))
    tree.unpin(tree.grow([2], priority=50))
    tree.time = 0.999
    tree.unpin(tree.grow([3]))
    tree.give_up_one(0)
    assert tree.prefixes() == {(1,), (2,)}
    tree.time = 1.0
    tree.give_up_one(0)
    assert tree.prefixes() == {(2,)}
    tree.check_invariants()


def test_a_cached_block_takes_on_what_is_put_in_again() -> None:
    tree = Tree(1)
    tree.unpin(tree.grow([1]))
    old = tree.match([1], "", 9).block_ids[0]
    new = tree.grow([1])
    assert new.block_ids[0] != old and tree.pool.groups[0].num_free == 99
    tree.check_invariants()


def test_a_stolen_leaf_is_the_thief_s_and_is_not_found_any_more() -> None:
    tree = Tree(1)
    tree.unpin(tree.grow([1, 2]))
    (block_id,) = tree.steal(tree.match([1, 2], "", 9))
    assert tree.prefixes() == {(1,)}
    assert (tree.pool.groups[0].num_used, tree.pool.groups[0].num_cached) == (1, 1)
    tree.pool.free(0, [block_id])
    tree.check_invariants()


def test_a_discarded_way_is_not_found_and_its_users_keep_it_until_they_let_go() -> None:
    tree = Tree(1)
    bad, user, idle = tree.grow([1, 2]), tree.grow([1, 3, 4]), tree.grow([1, 5])
    held = blocks(tree, user)
    tree.unpin(idle)
    tree.discard(bad)
    tree.check_invariants()
    assert tree.match([1, 2], "", 9).depth == 0 and tree.pool.groups[0].num_used == 4
    assert blocks(tree, user) == held
    tree.unpin(bad)
    assert tree.pool.groups[0].num_used == 3
    fresh = tree.grow([1, 2])
    assert not set(blocks(tree, fresh)) & set(held)
    tree.unpin(user)
    assert tree.pool.groups[0].num_used == 2
    tree.check_invariants()


def test_entries_of_the_past_do_not_pile_up() -> None:
    tree = Tree(1)
    tree.unpin(tree.grow([1, 2]))
    for _ in range(1000):
        node = tree.match([1, 2], "", 9)
        tree.pin(node)
        tree.unpin(node)
    assert len(tree._leaves._entries) < 100


class TreeMachine(RuleBasedStateMachine):
    """Against a model: which block each prefix has, and who pins what."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = Tree(2, 10_000)
        self.held: list[Node] = []
        self.contents: dict[int, tuple[object, ...]] = {}
        """Block -> the extra key and tokens whose KV it was given."""

    @rule(blocks=st.lists(st.integers(0, 2), max_size=6), key=st.sampled_from("ab"), priority=st.integers(30, 40))
    def put(self, blocks: list[int], key: str, priority: int) -> None:
        tokens = [token for block in blocks for token in (block, block + 1)]
        node = self.tree.match(tokens, key, 3)
        self.tree.pin(node)
        for at in range(node.depth, len(blocks)):
            block = tokens[2 * at : 2 * at + 2]
            if node.is_detached or self.tree.is_in_use(node, block):
                break
            (block_id,) = self.tree.pool.take(0, 1)
            node = self.tree.insert(node, block, (block_id,), priority, 1000 if priority > 37 else None)
            self.contents[block_id] = (key, *tokens[: 2 * at + 2])
        self.held.append(node)

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.tree.time += seconds

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.tree.unpin(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        for _ in range(int(share * self.tree.pool.groups[0].num_cached)):
            self.tree.give_up_one(0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.tree.discard(data.draw(st.sampled_from(self.held)))

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        nodes = self.tree.nodes()
        used = [node.block_ids[0] for node in nodes if node.num_pins]
        self.tree.pool.check_invariants([used], [[node.block_ids[0] for node in nodes if not node.num_pins]])
        assert {node for held in self.held for node in self.tree.path(held)} <= set(nodes), "a block in use is gone"
        for node in nodes:
            if not node.is_detached:
                key, *tokens = self.contents[node.block_ids[0]]
                assert self.tree.match(tokens, key, 99) is node

    def teardown(self) -> None:
        for node in self.held:
            self.tree.unpin(node)
        while self.tree.pool.groups[0].num_cached:
            self.tree.give_up_one(0)
        self.tree.check_invariants()
        assert self.tree.num_nodes == 0 and not self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, database=None)
