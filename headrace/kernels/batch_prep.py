# SPDX-License-Identifier: Apache-2.0
"""A step's tensors out of the request rows, on the device: nothing here waits for the host or is waited for.

The rows' state is one int32 tensor, cut into views by its owner; a staged write is a run of words and where it goes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cuda, op

WRITE_WORDS = 4
"""Words that describe one staged write: destination (low half, high half), source, length."""


def _int32(device: str, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _steps(device: str) -> Iterator[tuple[str, Tensor, Tensor, int, int]]:
    """(name, rows, query_start_loc, num_tokens, max_query_len) of a decode step, a mixed one and one long prefill."""
    yield "decode", _int32(device, 5, 0, 3), _int32(device, 0, 1, 2, 3), 3, 1
    yield "mixed", _int32(device, 2, 4, 1), _int32(device, 0, 1, 2, 39), 39, 37
    yield "prefill", _int32(device, 3), _int32(device, 0, 90), 90, 90


def _state(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """num_computed_tokens (strided), token_ids and a block table of 6 rows."""
    generator = torch.Generator().manual_seed(3)
    scalars = torch.randint(0, 37, (6, 16), generator=generator, dtype=torch.int32)
    token_ids = torch.randint(0, 1000, (6, 128), generator=generator, dtype=torch.int32)
    table = torch.randint(0, 50, (6, 17), generator=generator, dtype=torch.int32)
    return scalars.to(device)[:, 2], token_ids.to(device), table.to(device)


def write_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Runs of one word and of many."""
    if dtype == torch.float32:
        writes = ((5, [7]), (100, list(range(600))), (0, [1, 2, 3]))
        records: list[int] = []
        words: list[int] = []
        for dst, values in writes:
            records += [dst, 0, len(writes) * WRITE_WORDS + len(words), len(values)]
            words += values
        state = torch.zeros(1000, dtype=torch.int32, device=device)
        yield Case("three", (state, _int32(device, *records, *words), len(writes), 600))


def _padded(rows: Tensor, starts: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """The lists of a step with `pad` rows of padding after it."""
    return torch.cat([rows, rows.new_full((pad,), -1)]), torch.cat([starts, starts[-1:].expand(pad)])


def token_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Outputs of the step's size, and padded ones."""
    if dtype != torch.float32:
        return
    for name, rows, starts, num_tokens, longest in _steps(device):
        for pad in (0, 5):
            num_computed, token_ids, _ = _state(device)
            padded = _padded(rows, starts, pad)
            ids = torch.full((num_tokens + pad,), 99, device=device)
            lens = torch.full((rows.shape[0] + pad,), 99, dtype=torch.int32, device=device)
            yield Case(f"{name}+{pad}", (*padded, num_computed, token_ids, longest, ids, ids.clone(), lens))


def block_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """The same steps, with blocks of 8 tokens."""
    if dtype != torch.float32:
        return
    for name, rows, starts, num_tokens, longest in _steps(device):
        for pad in (0, 5):
            table = _state(device)[2]
            padded = _padded(rows, starts, pad)
            lens = padded[1].diff()
            # Nothing past a row's own blocks, where results may differ.
            columns = torch.arange(table.shape[1], device=device)
            for row, length in zip(rows.tolist(), lens.tolist(), strict=False):
                table[row].mul_(columns * 8 < length)
            positions = torch.arange(num_tokens + pad, device=device)
            positions[:num_tokens] -= padded[1][:-1].repeat_interleave(lens)
            slots = torch.full((num_tokens + pad,), 99, device=device)
            tables = torch.zeros(rows.shape[0] + pad, 20, dtype=torch.int32, device=device)[:, :13]
            args = (*padded, positions, lens, table, 8, longest, slots, tables)
            yield Case(f"{name}+{pad}", args)


def advance_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Steps with and without padding."""
    if dtype != torch.float32:
        return
    for name, rows, starts, _, _ in _steps(device):
        for pad in (0, 3):
            yield Case(f"{name}+{pad}", (*_padded(rows, starts, pad), _state(device)[0]))


def store_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Two rows that sample, one of them a failed one, and padding."""
    if dtype == torch.float32:
        num_computed, token_ids, _ = _state(device)
        sampled = torch.tensor((11, -1, 5), dtype=torch.int64, device=device)
        yield Case("3", (_int32(device, 4, 2, -1), sampled, num_computed + 40, token_ids))


@op(cases=write_cases)
def apply_writes(state: Tensor, staged: Tensor, num_writes: int, max_len: int) -> Tensor:
    """Carry out staged writes: `state[dst : dst + len] = staged[src : src + len]`; no two of them overlap.

    state: int32, flat. staged: int32; it begins with `num_writes` records of `WRITE_WORDS`. max_len: the longest one.
    """
    records = staged[: num_writes * WRITE_WORDS].tolist()
    for i in range(0, len(records), WRITE_WORDS):
        low, high, src, length = records[i : i + WRITE_WORDS]
        dst = (high << 32) | (low & 0xFFFFFFFF)
        state[dst : dst + length] = staged[src : src + length]
    return state


def _take(table: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """table[rows, columns], columns int64, of a table whose rows may be far apart but are contiguous."""
    stride = table.stride(0)
    flat = table.as_strided(((table.shape[0] - 1) * stride + table.shape[1],), (1,))
    return flat.index_select(0, torch.add(columns, rows, alpha=stride))


def _without_padding(rows: Tensor, query_start_loc: Tensor) -> tuple[Tensor, Tensor]:
    """The lists without the padding rows at their end."""
    if not rows.shape[0] or int(rows[-1]) >= 0:
        return rows, query_start_loc
    num_rows = int((rows >= 0).sum())
    return rows[:num_rows], query_start_loc[: num_rows + 1]


@op(cases=token_cases)
def gather_tokens(
    rows: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    token_ids: Tensor,
    max_query_len: int,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's next tokens and their positions, into `input_ids`, `positions` (int64) and `seq_lens` (int32).

    rows: int32 [num_rows]; those at the end that are -1 are padding, without tokens. query_start_loc: int32 [num_rows +
    1], its last entry the number of tokens. num_computed_tokens: int32 [all rows], strided. token_ids: int32 [all rows,
    capacity]. seq_lens: [num_rows]. `input_ids` and `positions` may be longer than the step: padding has token 0 and
    position 0, and a padding row length 0.
    """
    num_padded = rows.shape[0]
    rows, query_start_loc = _without_padding(rows, query_start_loc)
    num_rows, num_tokens = rows.shape[0], int(query_start_loc[-1])
    # index_select takes a third of the time of indexing with tensors, which counts on a CPU.
    starts = num_computed_tokens.index_select(0, rows)
    if num_tokens == num_rows:
        positions[:num_rows].copy_(starts)
        input_ids[:num_rows].copy_(_take(token_ids, rows, positions[:num_rows]))
        torch.add(starts, 1, out=seq_lens[:num_rows])
    else:
        lens = query_start_loc[1:] - query_start_loc[:-1]
        of = torch.repeat_interleave(lens, output_size=num_tokens)
        at = (starts - query_start_loc[:-1])[of] + torch.arange(num_tokens, device=rows.device)
        positions[:num_tokens].copy_(at)
        input_ids[:num_tokens].copy_(_take(token_ids, rows[of], at))
        torch.add(starts, lens, out=seq_lens[:num_rows])
    if input_ids.shape[0] > num_tokens:
        input_ids[num_tokens:] = 0
        positions[num_tokens:] = 0
    if num_padded > num_rows:
        seq_lens[num_rows:] = 0
    return input_ids, positions, seq_lens


@op(cases=block_cases)
def gather_blocks(
    rows: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tokens_per_block: int,
    max_query_len: int,
    slot_mapping: Tensor,
    tables: Tensor,
) -> tuple[Tensor, Tensor]:
    """One group's slots and block tables, into `slot_mapping` (int64) and `tables` (int32 [num_rows, width]).

    rows, query_start_loc, positions, seq_lens: as `gather_tokens` takes and leaves them. block_table: int32 [all rows,
    capacity]. tokens_per_block: a power of two. Padding gets slot -1. Entries of `tables` past a row's own blocks are
    undefined.
    """
    rows, query_start_loc = _without_padding(rows, query_start_loc)
    num_rows, num_tokens, width = rows.shape[0], int(query_start_loc[-1]), tables.shape[1]
    tables[:num_rows].copy_(block_table[:, :width].index_select(0, rows))
    at = positions[:num_tokens]
    if num_tokens == num_rows:
        of = rows
    else:
        of = rows[torch.repeat_interleave(query_start_loc[1:] - query_start_loc[:-1], output_size=num_tokens)]
    blocks = _take(block_table, of, at >> (tokens_per_block.bit_length() - 1))
    torch.add(at & (tokens_per_block - 1), blocks, alpha=tokens_per_block, out=slot_mapping[:num_tokens])
    if slot_mapping.shape[0] > num_tokens:
        slot_mapping[num_tokens:] = -1
    return slot_mapping, tables


@op(cases=advance_cases)
def advance_rows(rows: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor) -> Tensor:
    """After a step's body: its rows have computed their tokens. Arguments as `gather_tokens` takes them; the last one
    is changed here."""
    rows, query_start_loc = _without_padding(rows, query_start_loc)
    return num_computed_tokens.index_add_(0, rows, query_start_loc[1:] - query_start_loc[:-1])


@op(cases=store_cases)
def store_tokens(sample_rows: Tensor, sampled: Tensor, num_tokens: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """After the sampler: the rows that sampled know one token more.

    sample_rows: int32 [n], rows of the state; those at the end that are -1 are padding. sampled: int64 [n]; a negative
    token (its row failed) is stored as 0, so that a step already launched reads a valid id. num_tokens: int32 [all
    rows], strided, changed here like token_ids, int32 [all rows, capacity].
    """
    sample_rows, _ = _without_padding(sample_rows, sample_rows)
    sampled = sampled[: sample_rows.shape[0]]
    if sample_rows.shape[0]:
        at = num_tokens.index_select(0, sample_rows)
        token_ids[sample_rows, at] = sampled.clamp(min=0).int()
        num_tokens.index_copy_(0, sample_rows.long(), at + 1)
    return num_tokens, token_ids


for _op in (apply_writes, gather_tokens, gather_blocks, advance_rows, store_tokens):
    _op.impl("triton", on_cuda, f"headrace.kernels.batch_prep_triton:{_op.name}")
