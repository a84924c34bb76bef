# SPDX-License-Identifier: Apache-2.0
"""A node of the prefix cache: one block of tokens, and where its KV lies."""

from typing import Any

from headrace.core.retention import DEFAULT_PRIORITY

Key = tuple[Any, ...]
"""Of a node the tokens of its block, of a root the extra key."""

HOLE = -1
"""In the place of a block that is not on the device."""


class HostCopy:
    """What the host has of a node."""

    __slots__ = ("groups", "is_stored", "unit")

    def __init__(self, unit: int, groups: int) -> None:
        self.unit = unit
        """Its place in host memory, with room for a block of every group."""
        self.groups = groups
        """A bit for each group whose block is there; those of all groups without a window are."""
        self.is_stored = False
        """Whether outside storage has been given it."""


class Node:
    """A block of tokens. Equal by identity."""

    __slots__ = (
        "block_ids",
        "children",
        "depth",
        "expires",
        "hash",
        "holds",
        "host",
        "is_arriving",
        "is_detached",
        "is_on_device",
        "is_queued",
        "key",
        "last_held",
        "last_used",
        "num_device_children",
        "num_host_children",
        "num_pins",
        "parent",
        "priority",
        "root",
        "stale_groups",
    )

    def __init__(self, parent: "Node | None", key: Key, block_ids: list[int], depth: int) -> None:
        self.parent = parent
        self.root: Node = self if parent is None else parent.root
        self.key = key
        """The tokens of the block; of a root, the extra key."""
        self.block_ids = block_ids
        """Per group; HOLE where a windowed one keeps none, and everywhere while the node is on the host only."""
        self.is_on_device = True
        """Whether groups without a window have their blocks here; its ancestors are on the device then, too."""
        self.hash: bytes | None = None
        """Its name outside (`core/block_hash.py`), once somebody has asked for it."""
        self.depth = depth
        """Blocks from the root to here, this one included."""
        self.children: dict[Key, Node] = {}
        self.num_device_children = 0
        self.num_host_children = 0
        """Children that have a copy on the host."""
        self.num_pins = 0
        self.holds: list[int] | None = None
        """Per group, how many sequences have this block in their window; None where no group has a window."""
        self.last_held: list[int] | None = None
        """Per group, when the last of these let go of it."""
        self.last_used = 0
        self.priority = DEFAULT_PRIORITY
        self.expires: float | None = None
        """When its priority falls back to the default."""
        self.is_detached = False
        """Cut off: never matched again, and given up as soon as nobody pins it."""
        self.host: HostCopy | None = None
        self.stale_groups: int | None = None
        """While it is being copied to the host, a bit for each group whose block was given up meanwhile."""
        self.is_queued = False
        """Whether it waits to be copied to the host."""
        self.is_arriving = False
        """Whether blocks of it are on their way to the device."""

    @property
    def is_leaf(self) -> bool:
        """Whether nothing on the device needs it."""
        return self.num_pins == 0 and not self.num_device_children and self.is_on_device and self.parent is not None

    @property
    def is_in_tree(self) -> bool:
        return self.parent is not None and not self.is_detached
