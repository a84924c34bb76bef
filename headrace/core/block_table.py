# SPDX-License-Identifier: Apache-2.0
"""The blocks of one running sequence."""

from headrace.core.node import Node


class BlockTable:
    """The blocks of one running sequence, one list per group, all of one length."""

    __slots__ = (
        "block_ids",
        "first",
        "nodes",
        "num_cached_tokens",
        "num_promised_tokens",
        "num_token_slots",
        "part",
        "promised",
        "root",
    )

    def __init__(self, root: Node, nodes: list[Node], num_groups: int, size: int) -> None:
        self.root = root
        self.nodes = nodes
        """Its way through the prefix cache, from below the root, one node per block; the table pins it."""
        self.block_ids: tuple[list[int], ...] = tuple([each.block_ids[g] for each in nodes] for g in range(num_groups))
        """Per group; below `first` those of windowed groups mean nothing."""
        self.first = [0] * num_groups
        """Per group, the first block that it holds."""
        self.promised = [0] * num_groups
        """Per group, blocks it has been promised and not taken yet."""
        self.num_promised_tokens = 0
        """The length up to which it has been promised blocks."""
        self.num_cached_tokens = len(nodes) * size
        """Leading tokens that were found in the prefix cache."""
        self.num_token_slots = len(nodes) * size
        """Tokens its blocks have room for."""
        self.part: Node | None = None
        """Until its copies are made, the node whose blocks hold its last few cached tokens; pinned."""

    @property
    def node(self) -> Node:
        """The deepest node on its way. `node.depth` blocks are committed."""
        return self.nodes[-1] if self.nodes else self.root


CLOSED = BlockTable(Node(None, (), [], 0), [], 0, 0)
"""The table of a request that does not run."""
