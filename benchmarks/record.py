# SPDX-License-Identifier: Apache-2.0
"""Where a figure comes from: what each benchmark says of the machine, the versions, the commit and the command."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

from headrace.utils.machine import cpu_name


def _output_of(*command: str) -> str:
    """A command's first line; empty where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def provenance(*packages: str) -> dict[str, Any]:
    """packages: whose versions matter, besides torch and triton. COMMIT names the commit where there is no checkout."""
    return {
        "cpu": cpu_name(),
        "num_cpus": os.cpu_count(),
        "gpu": _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or None,
        "versions": {"python": platform.python_version()}
        | {name: version for name in ("torch", "triton", *packages) if (version := _version(name))},
        "commit": os.environ.get("COMMIT") or _output_of("git", "rev-parse", "HEAD"),
        "command": "python -m " + " ".join([_module(), *sys.argv[1:]]),
        "load_average": os.getloadavg(),
    }


def _module() -> str:
    """The running script as `python -m` names it."""
    parts = os.path.relpath(sys.argv[0]).removesuffix(".py").split(os.sep)
    return ".".join(parts)
