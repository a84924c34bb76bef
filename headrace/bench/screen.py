# SPDX-License-Identifier: Apache-2.0
"""What a person sees while a run is on: sentences and a bar on stderr."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headrace.bench.load import Load

T = TypeVar("T")
REFRESH_S = 0.25


class Screen:
    """Says things, and draws a bar over a load where stderr is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    def say(self, text: str) -> None:
        """A sentence."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def follow(self, label: str, load: Load, work: Awaitable[T]) -> T:
        """Wait for `work`, which runs `load`, with a bar."""
        bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            # Drawn between pieces of work, never by a thread beside them.
            auto_refresh=False,
            disable=not self._console.is_terminal,
        )
        task = bars.add_task(label, total=load.num_requests, rate="")

        async def draw() -> None:
            seen, num_tokens = 0, 0
            while True:
                await asyncio.sleep(REFRESH_S)
                fresh = load.records[seen:]
                seen += len(fresh)
                num_tokens += sum(record.num_output for record in fresh)
                rate = f"{num_tokens / load.seconds:,.0f} tokens/s" if num_tokens else ""
                bars.update(task, completed=seen, rate=rate)
                bars.refresh()

        drawing = asyncio.ensure_future(draw()) if self._console.is_terminal else None
        with bars:
            try:
                return await work
            finally:
                if drawing is not None:
                    drawing.cancel()
