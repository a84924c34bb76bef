# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr: bars on a terminal, a line at the start and end of each job elsewhere."""

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from headrace.engine.executor import ProgressCallback
from headrace.logger import get_logger

logger = get_logger(__name__)

BYTES_FROM = 1 << 20
"""Totals from here on are bytes, not items."""


class ProgressBars:
    """Draws what (label, done, total) reports say; gone when the `with` block ends. Called from any thread."""

    def __init__(self, instead: ProgressCallback | None = None) -> None:
        """
        Args:
            instead: gets the reports; nothing is drawn.
        """
        self._instead = instead
        self._console = Console(stderr=True)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID | None] = {}
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, label: str, done: int, total: int) -> None:
        if self._instead is not None:
            self._instead(label, done, total)
            return
        with self._lock:
            if self._closed:
                return
            if self._console.is_terminal:
                self._draw(label, done, total)
            else:
                self._say(label, done, total)

    def __enter__(self) -> "ProgressBars":
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._closed = True
            if self._bars is not None:
                self._bars.stop()

    def _draw(self, label: str, done: int, total: int) -> None:
        if self._bars is None:
            amount = DownloadColumn() if total >= BYTES_FROM else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total)
        task = self._tasks[label]
        if task is not None:
            self._bars.update(task, completed=done, total=total)

    def _say(self, label: str, done: int, total: int) -> None:
        if label not in self._tasks:
            self._tasks[label] = None
            logger.info("%s ...", label)
        if done >= total:
            logger.info("%s: done.", label)
