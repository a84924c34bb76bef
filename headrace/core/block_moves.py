# SPDX-License-Identifier: Apache-2.0
"""Blocks between device, host and outside storage: what is moved when, and who waits for it.

Blocks that the device may soon give up are copied to the host ahead of need, and from there to outside storage. Their
device blocks are not kept for the copy: where one is given up meanwhile, the copy is void. A request whose next blocks
lie on the host or outside waits for them (LOADING) while others run, and then goes on as any other, with a prefix that
is on the device.
"""

import time
from collections.abc import Callable, Collection
from typing import ClassVar

from headrace.core.block_hash import chain
from headrace.core.kv_cache_manager import KVCacheManager, Load
from headrace.core.node import Node
from headrace.core.request import Request
from headrace.core.stats import Counters
from headrace.core.transfer import BlockCopy, Transfer, TransferKind, TransferResult

WORTH_A_LOAD = 256
"""Tokens that come from the host or from outside instead of being computed anew; or half of what a request lacks."""
MAX_LOADS = 4
"""Times that a request waits for blocks before it runs. What came may be given up again before its turn."""
MAX_BLOCKS_ON_THE_WAY = 256
"""Blocks of copies to the host, and of calls of outside storage, under way at once."""
BLOCKS_PER_TRANSFER = 64
PATIENCE_S = 10.0
"""A request waits so long for outside storage. Storage that takes longer is not asked again until it has answered."""


class _Copying:
    """Nodes on their way to the host."""

    kind: ClassVar[TransferKind] = "to_host"

    def __init__(self, parts: list[tuple[Node, int]], units: dict[Node, int]) -> None:
        self.parts = parts
        """(node, group) of each copy."""
        self.units = units


class _Storing:
    """Nodes on their way from the host to outside storage."""

    kind: ClassVar[TransferKind] = "store"

    def __init__(self, units: dict[Node, int], num_copies: int) -> None:
        self.units = units
        self.num_copies = num_copies


class _Loading:
    """Blocks on their way to the device, for some requests."""

    kind: ClassVar[TransferKind] = "to_device"

    def __init__(self, load: Load) -> None:
        self.load = load


class _Lookup:
    """Outside storage is asked which blocks it has after `parent`, for one request."""

    kind: ClassVar[TransferKind] = "lookup"

    def __init__(self, request: Request, parent: Node, token_ids: list[int], hashes: list[bytes]) -> None:
        self.request = request
        self.parent = parent
        self.token_ids = token_ids
        self.hashes = hashes


class _Fetch:
    """Blocks on their way from outside storage to the host, for one request."""

    kind: ClassVar[TransferKind] = "fetch"

    def __init__(self, lookup: _Lookup, parts: list[tuple[int, int]], units: list[int]) -> None:
        self.lookup = lookup
        self.parts = parts
        """(index of the block after the parent, group) of each copy."""
        self.units = units
        """Of each block after the parent; held."""


_Move = _Copying | _Storing | _Loading | _Lookup | _Fetch


class BlockMoves:
    """Decides about transfers for one scheduler, and takes in what came of them."""

    def __init__(
        self, cache: KVCacheManager, counters: Counters, *, has_store: bool, now: Callable[[], float] = time.monotonic
    ) -> None:
        """cache: it has a host tier. has_store: whether there is storage below the host."""
        assert cache.tree.host is not None
        self._counters = counters
        self._cache = cache
        self._tree = cache.tree
        self._host = cache.tree.host
        self._has_store = has_store
        self._now = now
        self._waiting: dict[Request, _Move] = {}
        """Requests that wait, each with what it waits for."""
        self._under_way: dict[int, tuple[_Move, float]] = {}
        """Transfers by id, each with when it began."""
        self._out: list[Transfer] = []
        """Transfers to submit."""
        self._num_transfers = 0
        self._num_copying = self._num_storing = 0
        """Blocks on their way to the host, and from there outside."""
        self._slow: set[int] = set()
        """Calls of outside storage that took too long."""

    # What the scheduler asks

    @property
    def waiting(self) -> Collection[Request]:
        """Requests that wait for blocks."""
        return self._waiting.keys()

    @property
    def is_active(self) -> bool:
        """Whether a result is about to come, or something can be begun."""
        if self._under_way:
            _, began = self._under_way[next(reversed(self._under_way))]
            return self._now() - began < PATIENCE_S
        return bool(self._out) or (self._host.can_copy and self._wants_copies)

    def begin(self, request: Request, num_promised_tokens: int, *, spare: float) -> bool:
        """Whether `request`, the first in the queue, waits from now on for blocks that can be had without computing."""
        if request.num_loads >= MAX_LOADS:
            return False
        size = self._cache.tokens_per_block
        num_blocks = (len(request.token_ids) - 1) // size
        node, target = self._tree.find(request.token_ids, request.cache_key, num_blocks)
        num_lacking = len(request.token_ids) - node.depth * size
        if self._has_store and not request.was_looked_up and not self._slow:
            request.was_looked_up = True
            if _is_worth_it((num_blocks - target.depth) * size, num_lacking):
                self._look_up(request, target, num_blocks)
                return True
        if not _is_worth_it((target.depth - node.depth) * size, num_lacking):
            return False
        self._tree.touch(target)
        move = self._load(target, num_promised_tokens, spare)
        if move is None:
            return False
        self._wait(request, move)
        return True

    def forget(self, request: Request) -> None:
        """It ends; what was under way for it comes for others, or for nobody."""
        del self._waiting[request]

    def next_transfers(self) -> list[Transfer]:
        """What to submit after the plans that are launched."""
        while self._num_copying < MAX_BLOCKS_ON_THE_WAY and self._wants_copies and self._copy_some():
            pass
        while self._has_store and self._num_storing < MAX_BLOCKS_ON_THE_WAY and not self._slow and self._store_some():
            pass
        out, self._out = self._out, []
        return out

    def take_in(self, result: TransferResult) -> list[Request]:
        """A transfer has ended; the requests that need not wait any more."""
        move, _ = self._under_way.pop(result.transfer_id)
        self._slow.discard(result.transfer_id)
        failed = set(result.failed)
        if isinstance(move, _Copying):
            self._copied(move, failed)
        elif isinstance(move, _Storing):
            self._stored(move)
        elif isinstance(move, _Loading):
            self._counters.num_onboarded_blocks += self._cache.end_load(move.load, failed)
        elif isinstance(move, _Lookup):
            if move.request in self._waiting and self._waiting[move.request] is move and self._fetch(move, failed):
                return []
        else:
            self._fetched(move, failed)
        return self._release(move)

    def out_of_patience(self) -> list[Request]:
        """Requests that have waited for outside storage long enough."""
        if not self._has_store or not self._waiting:
            return []
        late = self._now() - PATIENCE_S
        released: list[Request] = []
        for transfer_id, (move, began) in self._under_way.items():
            if began > late:
                break
            if isinstance(move, _Lookup | _Fetch) and transfer_id not in self._slow:
                self._slow.add(transfer_id)
                released += self._release(move)
        return released

    # Device to host, and outside

    @property
    def _wants_copies(self) -> bool:
        """Whether to copy on: up to half of the host holds what the device has as well, for the time when it has not.

        What is to get outside is copied in any case.
        """
        return self._has_store or self._cache.num_free_blocks + self._host.num_clean < self._host.num_units / 2

    def _copy_some(self) -> bool:
        """Begin to copy what the device may give up next; whether there was anything."""
        parts: list[tuple[Node, int]] = []
        units: dict[Node, int] = {}
        while len(units) < BLOCKS_PER_TRANSFER:
            node = self._host.next_to_copy()
            unit = None if node is None else self._tree.take_unit()
            if node is None:
                break
            if unit is None:
                self._host.queue_copy(node)
                break
            units[node] = unit
            node.stale_groups = 0
            parts += [(node, group) for group, block_id in enumerate(node.block_ids) if block_id >= 0]
        if not units:
            return False
        copies = [BlockCopy(group, node.block_ids[group], units[node]) for node, group in parts]
        self._num_copying += len(parts)
        self._submit(_Copying(parts, units), copies)
        return True

    def _copied(self, move: _Copying, failed: set[int]) -> None:
        self._num_copying -= len(move.parts)
        came = dict.fromkeys(move.units, 0)
        for index, (node, group) in enumerate(move.parts):
            came[node] |= (index not in failed) << group
        for node, groups in came.items():
            stale, node.stale_groups = node.stale_groups or 0, None
            groups &= ~stale
            unit = move.units[node]
            if node.is_in_tree and node.host is None and self._tree.is_whole(groups):
                self._tree.keep_copy(node, unit, groups)
                self._counters.num_offloaded_blocks += groups.bit_count()
                if self._has_store:
                    self._host.queue_store(node)
            self._host.let_go(unit, node)

    def _store_some(self) -> bool:
        units: dict[Node, int] = {}
        copies: list[BlockCopy] = []
        hashes: list[bytes] = []
        while len(units) < BLOCKS_PER_TRANSFER and (node := self._host.next_to_store()) is not None:
            assert node.host is not None
            node.host.is_stored = True
            unit = units[node] = node.host.unit
            self._host.hold(unit)
            for group in range(len(node.block_ids)):
                if node.host.groups >> group & 1:
                    copies.append(BlockCopy(group, -1, unit))
                    hashes.append(self._tree.hash_of(node))
        if not units:
            return False
        self._num_storing += len(copies)
        self._submit(_Storing(units, len(copies)), copies, hashes)
        return True

    def _stored(self, move: _Storing) -> None:
        self._num_storing -= move.num_copies
        for node, unit in move.units.items():
            self._host.let_go(unit, node)

    # Host to device

    def _load(self, target: Node, num_promised_tokens: int, spare: float) -> _Move | None:
        """Begin a load, or find one that brings part of what is lacking; None: there is no room for one."""
        lacking = self._tree.lacking(target)
        if any(each.is_arriving for each, _ in lacking):
            late = {each for each, _ in lacking}
            loads = [move for move, _ in self._under_way.values() if isinstance(move, _Loading)]
            return next(move for move in reversed(loads) if not late.isdisjoint(move.load.units))
        load = self._cache.start_load(target, lacking, num_promised_tokens, spare=spare)
        if load is None:
            return None
        move = _Loading(load)
        self._submit(move, [BlockCopy(group, block, load.units[each]) for each, group, block in load.parts])
        return move

    # Outside to host

    def _look_up(self, request: Request, parent: Node, num_blocks: int) -> None:
        size = self._cache.tokens_per_block
        tokens = request.token_ids[parent.depth * size : num_blocks * size]
        hashes = chain(request.cache_key, tokens, size, self._tree.hash_of(parent))
        num_groups = len(self._cache.layout.groups)
        copies = [BlockCopy(group, -1, -1) for _ in hashes for group in range(num_groups)]
        self._tree.drop_if_bare(parent.root)
        move = _Lookup(request, parent, tokens, hashes)
        self._submit(move, copies, [each for each in hashes for _ in range(num_groups)])
        self._wait(request, move)

    def _fetch(self, lookup: _Lookup, misses: set[int]) -> bool:
        """Begin to fetch what was found, and let the request wait for it; False: nothing was, or there is no room."""
        parent, num_groups = lookup.parent, len(self._cache.layout.groups)
        if parent.depth and not parent.is_in_tree:
            return False
        hits = [
            sum((index * num_groups + group not in misses) << group for group in range(num_groups))
            for index in range(len(lookup.hashes))
        ]
        wanted = self._tree.reach(parent, hits)
        units: list[int] = []
        while len(units) < len(wanted) and (unit := self._tree.take_unit()) is not None:
            units.append(unit)
        if len(units) < len(wanted):
            wanted = self._tree.reach(parent, hits[: len(units)])
        for unit in units[len(wanted) :]:
            self._host.let_go(unit, parent)
        del units[len(wanted) :]
        if not wanted or (parent.depth and not parent.is_in_tree):
            for unit in units:
                self._host.let_go(unit, parent)
            return False
        parts = [
            (index, group) for index, groups in enumerate(wanted) for group in range(num_groups) if groups >> group & 1
        ]
        copies = [BlockCopy(group, -1, units[index]) for index, group in parts]
        move = _Fetch(lookup, parts, units)
        self._submit(move, copies, [lookup.hashes[index] for index, _ in parts])
        self._waiting[lookup.request] = move
        return True

    def _fetched(self, move: _Fetch, failed: set[int]) -> None:
        """Hang what came below its parent, up to where something is missing."""
        came = [0] * len(move.units)
        for index, (block, group) in enumerate(move.parts):
            came[block] |= (index not in failed) << group
        parent, size = move.lookup.parent, self._cache.tokens_per_block
        token_ids = move.lookup.token_ids
        goes_on = parent.is_in_tree or not parent.depth
        if not parent.depth:
            parent = self._tree.root(parent.key)
        for index, unit in enumerate(move.units):
            goes_on = goes_on and self._tree.is_whole(came[index])
            if goes_on:
                tokens = tuple(token_ids[index * size : (index + 1) * size])
                child = parent.children.get(tokens)
                if child is None:
                    child = self._tree.insert_host(parent, tokens, unit, came[index])
                    child.hash = move.lookup.hashes[index]
                    assert child.host is not None
                    child.host.is_stored = True
                    self._counters.num_fetched_blocks += came[index].bit_count()
                parent = child
            self._host.let_go(unit, parent)
        self._tree.drop_if_bare(parent.root)

    # Inside

    def _wait(self, request: Request, move: _Move) -> None:
        request.num_loads += 1
        self._waiting[request] = move

    def _release(self, move: _Move) -> list[Request]:
        """Those that wait for `move` need not any more."""
        released = [request for request, wanted in self._waiting.items() if wanted is move]
        for request in released:
            del self._waiting[request]
        return released

    def _submit(self, move: _Move, copies: list[BlockCopy], hashes: list[bytes] | None = None) -> None:
        self._num_transfers += 1
        self._under_way[self._num_transfers] = (move, self._now())
        self._out.append(Transfer(self._num_transfers, move.kind, copies, hashes or []))

    def check_invariants(self) -> None:
        """Units of the host are free, a node's, or held for what is under way."""
        held: dict[int, int] = {}
        for move, _ in self._under_way.values():
            units: Collection[int] = ()
            if isinstance(move, _Copying | _Storing):
                units = move.units.values()
            elif isinstance(move, _Loading):
                units = move.load.units.values()
            elif isinstance(move, _Fetch):
                units = move.units
            for unit in units:
                held[unit] = held.get(unit, 0) + 1
        self._host.check_invariants(self._tree.nodes(), held)


def _is_worth_it(num_tokens: int, num_lacking: int) -> bool:
    """Whether to wait for `num_tokens` instead of computing them, when `num_lacking` are to be computed without."""
    return num_tokens > 0 and (num_tokens >= WORTH_A_LOAD or 2 * num_tokens >= num_lacking)
