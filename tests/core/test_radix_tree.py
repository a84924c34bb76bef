# SPDX-License-Identifier: Apache-2.0
"""The prefix cache finds what was put in, gives up the right thing, and its counts are what a recount gives."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.radix_tree import Node, RadixTree


def grow(tree: RadixTree, tokens: list[int], first_block: int, extra_key: str = "") -> Node:
    """Put `tokens` in, blocks numbered from `first_block`; the pinned end of the path."""
    node = tree.root(extra_key)
    tree.pin(node)
    size = tree.tokens_per_block
    for i in range(len(tokens) // size):
        node, _ = tree.insert(node, tokens[i * size : (i + 1) * size], (first_block + i,))
    return node


def blocks(tree: RadixTree, node: Node) -> list[int]:
    return [each.block_ids[0] for each in tree.path(node)]


def test_a_match_is_whole_blocks_of_the_same_tokens_under_the_same_key() -> None:
    tree = RadixTree(2)
    grow(tree, [1, 2, 3, 4, 5, 6], 10)
    assert blocks(tree, tree.match([1, 2, 3, 4, 9, 9], "", 9)) == [10, 11]
    assert blocks(tree, tree.match([1, 2, 3], "", 9)) == [10]
    assert blocks(tree, tree.match([1, 2, 3, 4, 5, 6], "", 2)) == [10, 11]
    assert blocks(tree, tree.match([3, 4], "", 9)) == []
    assert blocks(tree, tree.match([1, 2], "salt", 9)) == []


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents() -> None:
    tree = RadixTree(1)
    ends = [grow(tree, [0, i], 10 * i) for i in (1, 2, 3)]
    for end in (ends[1], ends[0], ends[2]):
        tree.unpin(end)
    used_again = tree.match([0, 2], "", 9)
    tree.pin(used_again)
    tree.unpin(used_again)
    assert [ids[0] for ids in tree.evict(3)] == [11, 31, 21]
    assert [ids[0] for ids in tree.evict(1)] == [10]
    tree.check_invariants()
    assert not tree.nodes() and not tree._roots


def test_what_is_pinned_is_not_evictable_and_neither_is_the_way_to_it() -> None:
    tree = RadixTree(1)
    deep = grow(tree, [1, 2, 3], 0)
    side = grow(tree, [1, 2, 4], 10)
    tree.unpin(side)
    assert tree.num_evictable == 1
    assert tree.evict(1) == [(12,)]
    tree.unpin(deep)
    assert tree.num_evictable == 3


def test_a_child_in_use_keeps_its_blocks_and_one_that_is_not_takes_on_the_new_ones() -> None:
    tree = RadixTree(1)
    first = grow(tree, [1], 5)
    tree.pin(tree.root(""))
    second, given_up = tree.insert(tree.root(""), [1], (6,))
    assert second is first and given_up is None and first.block_ids == (5,)
    tree.unpin(first)
    tree.unpin(first)
    tree.pin(tree.root(""))
    again, given_up = tree.insert(tree.root(""), [1], (7,))
    assert again is first and given_up == (5,) and first.block_ids == (7,)


def test_a_discarded_way_is_not_found_and_its_users_keep_it_until_they_let_go() -> None:
    tree = RadixTree(1)
    bad, user, idle = grow(tree, [1, 2], 0), grow(tree, [1, 3, 4], 10), grow(tree, [1, 5], 20)
    tree.unpin(idle)
    assert tree.discard(bad) == [(21,)]
    tree.check_invariants()
    assert tree.match([1, 2], "", 9).depth == 0
    assert blocks(tree, user) == [0, 11, 12]
    assert sorted(tree.unpin(bad)) == [(1,)]
    fresh = grow(tree, [1, 2], 30)
    assert blocks(tree, fresh) == [30, 31]
    assert sorted(tree.unpin(user)) == [(0,), (11,), (12,)]
    tree.check_invariants()


def test_entries_of_the_past_do_not_pile_up() -> None:
    tree = RadixTree(1)
    tree.unpin(grow(tree, [1, 2], 0))
    for _ in range(1000):
        node = tree.match([1, 2], "", 9)
        tree.pin(node)
        tree.unpin(node)
    assert len(tree._leaves) < 100


class TreeMachine(RuleBasedStateMachine):
    """Against a model: which block each prefix has, and who pins what."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(2)
        self.held: list[Node] = []
        self.contents: dict[int, tuple[object, ...]] = {}
        """Block -> the extra key and tokens whose KV it holds."""
        self.next_block = 0

    @rule(blocks=st.lists(st.integers(0, 2), max_size=6), key=st.sampled_from("ab"), last=st.booleans())
    def put(self, blocks: list[int], key: str, last: bool) -> None:
        tokens = [token for block in blocks for token in (block, block + 1)]
        node = self.tree.match(tokens, key, 3)
        self.tree.pin(node)
        while node.depth < len(blocks) and not node.is_detached:
            at = node.depth
            block_id = self.next_block
            self.next_block += 1
            node, given_up = self.tree.insert(node, tokens[2 * at : 2 * at + 2], (block_id,))
            if node.block_ids == (block_id,):
                self.contents[block_id] = (key, *tokens[: 2 * at + 2])
            if given_up is not None:
                self.gone([given_up])
        self.held.append(node)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.gone(self.tree.unpin(self.held.pop(index)))

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        count = int(share * self.tree.num_evictable)
        gone = self.tree.evict(count)
        assert len(gone) == count
        self.gone(gone)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        self.gone(self.tree.discard(data.draw(st.sampled_from(self.held))))

    def gone(self, blocks: list[tuple[int, ...]]) -> None:
        in_use = {each.block_ids[0] for node in self.held for each in self.tree.path(node)}
        for (block_id,) in blocks:
            assert block_id not in in_use, "a block in use was given up"
            del self.contents[block_id]

    @invariant()
    def agrees(self) -> None:
        self.tree.check_invariants()
        nodes = self.tree.nodes()
        assert sorted(node.block_ids[0] for node in nodes) == sorted(self.contents)
        for node in nodes:
            if not node.is_detached:
                key, *tokens = self.contents[node.block_ids[0]]
                assert self.tree.match(tokens, key, 99) is node

    def teardown(self) -> None:
        for node in self.held:
            self.tree.unpin(node)
        self.tree.evict(self.tree.num_evictable)
        self.tree.check_invariants()
        assert self.tree.num_nodes == 0 and not self.tree._roots


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, database=None)
