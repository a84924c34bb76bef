# SPDX-License-Identifier: Apache-2.0
"""The report of a run, as it grows: a JSON file, whole after every level, that says where a run was cut short."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from headrace.bench.hardware import describe_machine, describe_software
from headrace.errors import ConfigError

FORMAT = "headrace-bench-1"
RUNNING = "the run has not ended"
NOT_REPORTED = ("core_pid", "address", "model_path", "startup")
"""What an engine says of itself that is no property of it, or stands elsewhere in the report."""


class Report:
    """What a run has found so far. Saved after each level, so that what there is outlives whatever ends the run."""

    def __init__(self, kind: str, path: str | None) -> None:
        """
        Args:
            kind: throughput, latency or serve.
            path: where to write; None: nowhere.

        Raises:
            ConfigError: the file cannot be written, found out before hours of measuring.
        """
        self._path = None if path is None else Path(path)
        self.levels: list[dict[str, Any]] = []
        self.values: dict[str, Any] = {
            "format": FORMAT,
            "kind": kind,
            "is_partial": True,
            "partial_reason": RUNNING,
            "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "levels": self.levels,
            **describe_software(),
        }
        self.save()

    def describe(self, device: str, **facts: Any) -> None:
        """What was measured, and on what."""
        self.values |= {"machine": describe_machine(device), **facts}
        self.save()

    def add(self, level: dict[str, Any]) -> None:
        """A level, whole or cut short."""
        self.levels.append(level)
        self.save()

    def end(self, why_partial: str | None = None) -> None:
        """The run is over. why_partial: what cut it short."""
        self.values |= {"is_partial": why_partial is not None, "partial_reason": why_partial}
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self._path is None:
            return
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            part.write_text(json.dumps(_plain(self.values), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(part, self._path)
        except OSError as error:
            raise ConfigError(
                f"report_json {self._path} cannot be written: {error.strerror}.", param="report_json"
            ) from None


def read_report(path: str) -> dict[str, Any]:
    """A report from its file.

    Raises:
        ConfigError: it cannot be read, or is no report of ours.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(f"{path} is no report of `headrace bench` (--report_json writes one).")
    if not values.get("levels"):
        raise ConfigError(f"{path} holds no level: its run ended before one did ({values.get('partial_reason')}).")
    return values


def _plain(value: Any) -> Any:
    """The same without numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
