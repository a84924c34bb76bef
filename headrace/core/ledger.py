# SPDX-License-Identifier: Apache-2.0
"""Memory arithmetic: weights + activations + KV + reserve = one device.

The same sums serve the start of a worker (with measured bytes) and `headrace doctor` (with predicted ones). Nothing is
clamped silently: `auto` values adapt and the ledger says to what; an explicit value that does not fit is an error
with the smallest changes that would make it fit.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from headrace.config.resolve import RESERVE_BYTES
from headrace.errors import ConfigError
from headrace.utils.math import cdiv

GIB = 2**30
MIN_AUTO_SEQ_LEN = 512
"""`max_seq_len: auto` does not adapt below this (or below the model's own, where that is less)."""
NUM_CHANGES_NAMED = 3
PARTS = {
    "total": "  total",
    "other": "- other processes, driver, libraries",
    "weights": "- weights",
    "activations": "- activations ({num_tokens:,} tokens)",
    "graphs": "- CUDA graphs",
    "workspaces": "- request rows and workspaces",
    "kv_cache": "- KV cache",
    "left": "= left over",
}
FOUND = ("total", "other")
"""Parts that are found as they are; nothing predicts them."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes of one device, and who needs how many."""

    total_bytes: int
    weight_bytes: int
    activation_bytes_per_token: int
    """Peak of a step, for each of its `max_num_tokens`."""
    kv_bytes_per_block: int
    """One block of every KV group."""
    tokens_per_block: int
    window_bytes_per_block: int = 0
    """Of these, what groups with a window take: of a long request they keep `max_window_blocks` at most."""
    max_window_blocks: int = 0
    slack_bytes: int = 0
    """Lost at most because groups share the cache out in whole slabs."""
    fixed_bytes: int = 0
    """Request rows and workspaces: what does not grow with the tokens of a step."""
    graph_bytes: int = 0
    """CUDA graphs."""
    other_bytes: int = 0
    """In use by other processes, the driver and the libraries' own."""
    reserve_bytes: int = RESERVE_BYTES
    device: str = "the device"


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """The settings that share the memory out. None is `auto`."""

    max_seq_len: int | None
    model_max_seq_len: int
    max_num_tokens: int
    min_num_tokens: int = 1
    """The least `max_num_tokens` may be lowered to: `max_batch_size`."""
    free_memory_fraction: float | None = None
    """Share of what is left after load that goes to the KV cache; None: all but the reserve."""
    max_kv_tokens: int | None = None
    """kv_cache_config.max_tokens."""
    kv_dtype: str = "auto"
    kv_bytes_per_block_by_dtype: Mapping[str, int] = field(default_factory=dict)
    """Other values of kv_cache_config.dtype that would work here, and what a block would then take."""


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """How the memory is shared out."""

    needs: MemoryNeeds
    wish: MemoryWish
    left_bytes: int
    """After weights, activations and fixed bytes; the reserve is still in it."""
    kv_bytes: int
    num_blocks: int
    max_seq_len: int
    notes: tuple[str, ...] = ()
    """What `auto` chose, a sentence each."""

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.needs.tokens_per_block

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that the cache holds."""
        needs = self.needs
        all_kept = self.kv_bytes // needs.kv_bytes_per_block
        if not needs.window_bytes_per_block or all_kept <= needs.max_window_blocks:
            return all_kept * needs.tokens_per_block
        whole = needs.kv_bytes_per_block - needs.window_bytes_per_block
        room = self.kv_bytes - needs.slack_bytes - needs.max_window_blocks * needs.window_bytes_per_block
        return max(room // whole, needs.max_window_blocks) * needs.tokens_per_block

    @property
    def kv_bytes_per_token(self) -> int:
        return self.needs.kv_bytes_per_block // self.needs.tokens_per_block

    def lines(self, predicted: "MemoryLedger | None" = None, unmeasured: Collection[str] = ()) -> list[str]:
        """The ledger as a table, for a terminal.

        Args:
            predicted: what was reckoned before anything ran: a column beside this ledger's, which is then what was
                measured.
            unmeasured: parts that this device cannot measure, by their names in `PARTS`.
        """
        mine = self._entries()
        if predicted is None:
            rows = [f"{'memory of ' + self.needs.device:<44}{'GiB':>12}"]
            rows += [f"{self._label(part):<44}{value / GIB:12.2f}" for part, value in mine.items()]
        else:
            before = predicted._entries()
            rows = [f"{'memory of ' + self.needs.device + ', GiB':<44}{'predicted':>12}{'measured':>12}"]
            for part, value in mine.items():
                found = "-" if part in unmeasured else f"{value / GIB:.2f}"
                reckoned = "-" if part in FOUND or part not in before else f"{before[part] / GIB:.2f}"
                rows.append(f"{self._label(part):<44}{reckoned:>12}{found:>12}")
        if self.needs.window_bytes_per_block:
            size, windows = self.needs.tokens_per_block, self.needs.window_bytes_per_block
            most = self.needs.max_window_blocks * windows
            whole = self.needs.kv_bytes_per_block - windows
            rows.append(
                f"Of a token's {self.kv_bytes_per_token / 1024:,.1f} KiB, {windows / size / 1024:,.1f} lie in layers "
                f"with a window, which keep {most / 2**20:,.1f} MiB of a request at most; a long one takes "
                f"{whole / size / 1024:,.1f} KiB a token."
            )
        rows.append(
            f"KV cache: {self.num_blocks:,} blocks of {self.needs.tokens_per_block} tokens = {self.num_kv_tokens:,} "
            f"tokens of {self.kv_bytes_per_token / 1024:,.1f} KiB; max_seq_len {self.max_seq_len:,}, "
            f"{self.num_kv_tokens // self.max_seq_len:,} requests of that length at once"
        )
        return rows + list(self.notes)

    def _label(self, part: str) -> str:
        return PARTS[part].format(num_tokens=self.wish.max_num_tokens)

    def _entries(self) -> dict[str, int]:
        needs = self.needs
        parts = {
            "total": needs.total_bytes,
            "other": needs.other_bytes,
            "weights": needs.weight_bytes,
            "activations": needs.activation_bytes_per_token * self.wish.max_num_tokens,
            "graphs": needs.graph_bytes,
            "workspaces": needs.fixed_bytes,
            "kv_cache": self.kv_bytes,
            "left": self.left_bytes - self.kv_bytes,
        }
        if not needs.graph_bytes:
            del parts["graphs"]
        return parts


@dataclass(frozen=True, slots=True)
class Change:
    """One change of one setting that makes things fit by itself."""

    sentence: str
    factor: float
    """How large a change it is: the larger value over the smaller one."""


def plan_memory(needs: MemoryNeeds, wish: MemoryWish) -> MemoryLedger:
    """Share the memory out.

    Raises:
        ConfigError: an explicit max_seq_len, or the least that `auto` may choose, does not fit. The message holds the
            ledger and the three smallest changes that would make it fit.
    """
    left = _left_bytes(needs, wish.max_num_tokens)
    num_blocks = _num_blocks(needs, wish, left)
    ledger = MemoryLedger(needs, wish, left, num_blocks * needs.kv_bytes_per_block, num_blocks, 1)
    num_tokens = ledger.max_request_tokens
    max_seq_len = wish.max_seq_len if wish.max_seq_len is not None else min(wish.model_max_seq_len, num_tokens)
    notes: tuple[str, ...] = ()
    if wish.max_seq_len is None and max_seq_len < wish.model_max_seq_len:
        notes = (
            f"max_seq_len is auto: {max_seq_len:,} of the model's {wish.model_max_seq_len:,} tokens, "
            "which is what the KV cache holds.",
        )
    ledger = replace(ledger, max_seq_len=max(1, max_seq_len), notes=notes)
    least = wish.max_seq_len or min(wish.model_max_seq_len, MIN_AUTO_SEQ_LEN)
    if num_tokens < least:
        raise ConfigError(_does_not_fit(ledger, least), param="max_seq_len")
    return ledger


def changes_that_fit(ledger: MemoryLedger, seq_len: int) -> list[Change]:
    """Single changes after each of which a request of `seq_len` tokens fits, the smallest first."""
    candidates = [
        _shorter(ledger, seq_len),
        _more_kv_tokens(ledger, seq_len),
        _smaller_steps(ledger, seq_len),
        _larger_fraction(ledger, seq_len),
        _less_used_by_others(ledger, seq_len),
        _larger_device(ledger, seq_len),
        *_smaller_dtypes(ledger, seq_len),
    ]
    return sorted((each for each in candidates if each is not None), key=lambda each: each.factor)


# Inside: one function per change, None where it cannot help by itself


def _left_bytes(needs: MemoryNeeds, max_num_tokens: int) -> int:
    taken = needs.other_bytes + needs.weight_bytes + needs.fixed_bytes + needs.graph_bytes
    return needs.total_bytes - taken - needs.activation_bytes_per_token * max_num_tokens


def _num_blocks(needs: MemoryNeeds, wish: MemoryWish, left: int) -> int:
    fraction = wish.free_memory_fraction
    room = left - needs.reserve_bytes if fraction is None else int(left * fraction)
    num_blocks = max(0, room) // needs.kv_bytes_per_block
    if wish.max_kv_tokens is not None:
        num_blocks = min(num_blocks, cdiv(wish.max_kv_tokens, needs.tokens_per_block))
    return num_blocks


def _needed_bytes(ledger: MemoryLedger, seq_len: int) -> int:
    needs, num_blocks = ledger.needs, cdiv(seq_len, ledger.needs.tokens_per_block)
    dropped = max(0, num_blocks - needs.max_window_blocks) * needs.window_bytes_per_block
    return num_blocks * needs.kv_bytes_per_block - max(0, dropped - needs.slack_bytes)


def _needed_left_bytes(ledger: MemoryLedger, seq_len: int) -> int:
    """What must be left after load for the KV cache to get what it needs."""
    needed, fraction = _needed_bytes(ledger, seq_len), ledger.wish.free_memory_fraction
    return needed + ledger.needs.reserve_bytes if fraction is None else math.ceil(needed / fraction) + 1


def _is_capped(ledger: MemoryLedger, seq_len: int) -> bool:
    """Whether kv_cache_config.max_tokens alone forbids `seq_len`."""
    return ledger.wish.max_kv_tokens is not None and ledger.wish.max_kv_tokens < seq_len


def _shorter(ledger: MemoryLedger, seq_len: int) -> Change | None:
    most = ledger.max_request_tokens
    if ledger.wish.max_seq_len is None or most == 0:
        return None
    return Change(f"lower max_seq_len from {seq_len:,} to {most:,} or auto", seq_len / most)


def _more_kv_tokens(ledger: MemoryLedger, seq_len: int) -> Change | None:
    cap = ledger.wish.max_kv_tokens
    if cap is None or cap >= seq_len or ledger.left_bytes < _needed_left_bytes(ledger, seq_len):
        return None
    return Change(f"raise kv_cache_config.max_tokens from {cap:,} to {seq_len:,}", seq_len / max(cap, 1))


def _smaller_steps(ledger: MemoryLedger, seq_len: int) -> Change | None:
    wish, per_token = ledger.wish, ledger.needs.activation_bytes_per_token
    if per_token == 0 or _is_capped(ledger, seq_len):
        return None
    short = _needed_left_bytes(ledger, seq_len) - ledger.left_bytes
    fitting = wish.max_num_tokens - cdiv(short, per_token)
    if fitting < wish.min_num_tokens:
        return None
    return Change(
        f"lower max_num_tokens from {wish.max_num_tokens:,} to {fitting:,}", wish.max_num_tokens / max(fitting, 1)
    )


def _larger_fraction(ledger: MemoryLedger, seq_len: int) -> Change | None:
    needed, left, old = _needed_bytes(ledger, seq_len), ledger.left_bytes, ledger.wish.free_memory_fraction
    if left < needed or _is_capped(ledger, seq_len):
        return None
    new = min(1.0, math.ceil((needed + 1) / left * 1000) / 1000)
    now = "auto" if old is None else f"{old:g}"
    before = old if old is not None else max(left - ledger.needs.reserve_bytes, 1) / left
    return Change(f"raise kv_cache_config.free_gpu_memory_fraction from {now} to {new:g}", new / before)


def _less_used_by_others(ledger: MemoryLedger, seq_len: int) -> Change | None:
    short = _needed_left_bytes(ledger, seq_len) - ledger.left_bytes
    other = ledger.needs.other_bytes
    if _is_capped(ledger, seq_len) or not 0 < short < other:
        return None
    return Change(
        f"free {short / GIB:.2f} of the {other / GIB:.2f} GiB that other processes use", other / (other - short)
    )


def _larger_device(ledger: MemoryLedger, seq_len: int) -> Change | None:
    total = ledger.needs.total_bytes
    needed = total + _needed_left_bytes(ledger, seq_len) - ledger.left_bytes
    if _is_capped(ledger, seq_len):
        return None
    return Change(f"use a device with {needed / GIB:.2f} GiB instead of {total / GIB:.2f} GiB", needed / total)


def _smaller_dtypes(ledger: MemoryLedger, seq_len: int) -> list[Change]:
    found = []
    for dtype, kv_bytes in ledger.wish.kv_bytes_per_block_by_dtype.items():
        needs = ledger.needs
        room = ledger.left_bytes - needs.reserve_bytes
        if ledger.wish.free_memory_fraction is not None:
            room = int(ledger.left_bytes * ledger.wish.free_memory_fraction)
        if cdiv(seq_len, needs.tokens_per_block) * kv_bytes <= room and not _is_capped(ledger, seq_len):
            change = f"set kv_cache_config.dtype to {dtype} instead of {ledger.wish.kv_dtype}"
            found.append(Change(change, needs.kv_bytes_per_block / kv_bytes))
    return found


def _does_not_fit(ledger: MemoryLedger, seq_len: int) -> str:
    changes = [each.sentence for each in changes_that_fit(ledger, seq_len)[:NUM_CHANGES_NAMED]]
    wished = "max_seq_len" if ledger.wish.max_seq_len is not None else "the least max_seq_len that auto may choose"
    return (
        f"{wished} ({seq_len:,}) does not fit: one such request needs {_needed_bytes(ledger, seq_len) / GIB:.2f} GiB "
        f"of KV cache and there is room for {ledger.max_request_tokens:,} tokens ({ledger.kv_bytes / GIB:.2f} GiB). "
        f"Any one of these makes it fit: {'; '.join(changes) or 'none by itself'}.\n" + "\n".join(ledger.lines())
    )
