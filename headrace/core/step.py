# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: requests are put in, and what the workers must know of it is written down."""

from headrace.core.block_table import BlockTable
from headrace.core.kv_cache_manager import BlockCopy, KVCacheManager
from headrace.core.output import AdmittedRequest, BlockAppend, CachePlan, ScheduledRow, SchedulerOutput
from headrace.core.request import Request

NO_COPIES = CachePlan()


class Step:
    """Collects decodes, rows of one token and longer chunks, each with its request beside it."""

    __slots__ = (
        "_admitted",
        "_appended",
        "_cache",
        "_chunk_requests",
        "_chunks",
        "_copies",
        "_copying",
        "_decode_requests",
        "_decode_rows",
        "_decode_starts",
        "_single_requests",
        "_singles",
        "step_id",
    )

    def __init__(self, step_id: int, cache: KVCacheManager) -> None:
        self.step_id = step_id
        self._cache = cache
        self._admitted: list[AdmittedRequest] = []
        self._appended: list[BlockAppend] = []
        self._decode_rows: list[int] = []
        self._decode_starts: list[int] = []
        self._decode_requests: list[Request] = []
        self._singles: list[ScheduledRow] = []
        self._single_requests: list[Request] = []
        self._chunks: list[ScheduledRow] = []
        self._chunk_requests: list[Request] = []
        self._copies: list[BlockCopy] = []
        self._copying: list[BlockTable] = []

    @property
    def is_empty(self) -> bool:
        return not self._decode_rows and not self._singles and not self._chunks

    @property
    def requests(self) -> list[Request]:
        """The requests of the plan's rows, in their order."""
        return self._decode_requests + self._single_requests + self._chunk_requests

    def admit(self, request: Request) -> None:
        """Tell the workers of a request that has just got its row and its first blocks."""
        copies = self._cache.copies(request.table)
        if copies:
            self._copies += copies
            self._copying.append(request.table)
        self._admitted.append(
            AdmittedRequest(
                row=request.row,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=self._cache.readable(request.table),
                sampling=request.sampling,
            )
        )

    def run_decodes(self, decodes: dict[Request, int]) -> list[Request]:
        """Run the newest token of each; the blocks they need can be had. Called once.

        decodes: each with its row. Returns those whose output the launched plans now cover.
        """
        starts: list[int] = []
        covered: list[Request] = []
        for request in decodes:
            start = request.num_launched_tokens
            starts.append(start)
            if start >= request.num_plain_tokens:
                if start == request.table.num_token_slots:
                    self._extend(request, start + 1)
                request.count_plain_tokens()
                if start + 2 >= request.max_total_tokens:
                    covered.append(request)
            request.num_launched_tokens = start + 1
            request.num_known_tokens = start + 2
        self._decode_starts = starts
        self._decode_rows = list(decodes.values())
        self._decode_requests = list(decodes)
        return covered

    def run_chunk(self, request: Request, num_tokens: int) -> None:
        """Run the next `num_tokens` of a prefill; the blocks it needs can be had."""
        start = request.num_launched_tokens
        end = start + num_tokens
        if end > request.table.num_token_slots:
            self._extend(request, end)
        samples = end == request.num_known_tokens
        if samples:
            request.num_known_tokens += 1
        request.num_launched_tokens = end
        row = ScheduledRow(request.row, num_tokens, samples, start)
        if num_tokens == 1:
            self._singles.append(row)
            self._single_requests.append(request)
        else:
            self._chunks.append(row)
            self._chunk_requests.append(request)

    def _extend(self, request: Request, num_tokens: int) -> None:
        start = request.table.num_token_slots // self._cache.tokens_per_block
        added = self._cache.extend(request.table, num_tokens)
        self._appended += [BlockAppend(request.row, group, start, block_ids) for group, block_ids in enumerate(added)]

    def plan(self, freed_rows: list[int]) -> SchedulerOutput:
        """The finished plan."""
        for table in self._copying:
            self._cache.end_copies(table)
        return SchedulerOutput(
            step_id=self.step_id,
            freed_rows=freed_rows,
            admitted=self._admitted,
            appended_blocks=self._appended,
            cache_plan=CachePlan(self._copies) if self._copies else NO_COPIES,
            chunks=self._singles + self._chunks,
            decode_rows=self._decode_rows,
            decode_starts=self._decode_starts,
        )
