# SPDX-License-Identifier: Apache-2.0
"""A plan in the making: requests are put in, and what the workers must know of it is written down."""

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.output import AdmittedRequest, BlockAppend, CachePlan, ScheduledRow, SchedulerOutput
from headrace.core.request import Request

NO_COPIES = CachePlan()


class Step:
    """Collects rows of one token and prefill chunks, each with its request beside it."""

    __slots__ = ("_admitted", "_appended", "_cache", "_chunk_requests", "_chunks", "_requests", "_singles", "step_id")

    def __init__(self, step_id: int, cache: KVCacheManager) -> None:
        self.step_id = step_id
        self._cache = cache
        self._admitted: list[AdmittedRequest] = []
        self._appended: list[BlockAppend] = []
        self._singles: list[ScheduledRow] = []
        self._requests: list[Request] = []
        self._chunks: list[ScheduledRow] = []
        self._chunk_requests: list[Request] = []

    @property
    def is_empty(self) -> bool:
        return not self._singles and not self._chunks

    @property
    def requests(self) -> list[Request]:
        """The requests of `scheduled`, in its order."""
        return self._requests + self._chunk_requests

    def admit(self, request: Request) -> None:
        """Tell the workers of a request that has just got its row and its first blocks."""
        self._admitted.append(
            AdmittedRequest(
                row=request.row,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=tuple(list(block_ids) for block_ids in request.table.block_ids),
                sampling=request.sampling,
            )
        )

    def run(self, request: Request, num_tokens: int) -> None:
        """Run the next `num_tokens` of a request; the blocks it needs can be had."""
        start = request.num_launched_tokens
        end = start + num_tokens
        if end > request.table.num_token_slots:
            self._extend(request, end)
        samples = end == request.num_known_tokens
        if samples:
            request.num_known_tokens += 1
        request.num_launched_tokens = end
        request.last_step_id = self.step_id
        row = ScheduledRow(request.row, num_tokens, samples, start)
        if num_tokens == 1:
            self._singles.append(row)
            self._requests.append(request)
        else:
            self._chunks.append(row)
            self._chunk_requests.append(request)

    def _extend(self, request: Request, num_tokens: int) -> None:
        start = request.table.num_token_slots // self._cache.tokens_per_block
        added = self._cache.extend(request.table, num_tokens)
        self._appended += [BlockAppend(request.row, group, start, block_ids) for group, block_ids in enumerate(added)]

    def plan(self, freed_rows: list[int]) -> SchedulerOutput:
        """The finished plan."""
        return SchedulerOutput(
            step_id=self.step_id,
            freed_rows=freed_rows,
            admitted=self._admitted,
            appended_blocks=self._appended,
            cache_plan=NO_COPIES,
            scheduled=self._singles + self._chunks,
        )
