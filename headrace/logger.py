# SPDX-License-Identifier: Apache-2.0
"""One formatter for every process of a run; messages go to stderr. `HEADRACE_LOG_LEVEL` sets how much is said."""

import logging
import os
import sys

ROOT = "headrace"
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
_FORMAT = "%(asctime)s %(levelname)s %(process_name)s%(message)s"


class _Formatter(logging.Formatter):
    """`12:34:56 INFO [core] message`; the bracket is left out in a program's first process."""

    def __init__(self) -> None:
        super().__init__(_FORMAT, datefmt="%H:%M:%S")
        self.process_name = ""

    def format(self, record: logging.LogRecord) -> str:
        record.process_name = f"[{self.process_name}] " if self.process_name else ""
        return super().format(record)


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is now, so that a progress bar or a test that replaces it keeps working."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_formatter = _Formatter()


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    root = logging.getLogger(ROOT)
    if not root.handlers:
        handler = _StderrHandler(sys.stderr)
        handler.setFormatter(_formatter)
        root.addHandler(handler)
        root.propagate = False
        set_level(os.environ.get("HEADRACE_LOG_LEVEL", "info"))
    return logging.getLogger(name if name.startswith(ROOT) else f"{ROOT}.{name}")


def set_level(level: str) -> None:
    """How much is said: debug, info, warning, error or critical; an unknown word means info."""
    logging.getLogger(ROOT).setLevel(LEVELS.get(level.lower(), logging.INFO))


def set_process_name(name: str) -> None:
    """What this process is called in its log lines, such as `core` or `worker 1`."""
    _formatter.process_name = name
