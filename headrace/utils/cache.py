# SPDX-License-Identifier: Apache-2.0
"""The one folder that outlives a run: the demo model, compiled kernels, what was measured of this machine."""

import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.utils.failure import is_disk_full

PROBE_BYTES = 1 << 20
"""Written and removed, to know that there is room: some ten compiled kernels."""
TRITON, CUDA = "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"


def cache_dir() -> Path:
    """Headrace's own cache: HEADRACE_CACHE, else `headrace` in the user's cache folder."""
    own = os.environ.get("HEADRACE_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"


@dataclass(frozen=True, slots=True)
class KernelCache:
    """Where compiled kernels go."""

    environment: dict[str, str]
    """Variables to set before any is compiled; empty where the user has set them all."""
    note: str
    """Where that is, in a sentence."""
    is_kept: bool = True
    """They outlive this process."""


def kernel_cache(environ: Mapping[str, str], instead: Path) -> KernelCache:
    """Choose the folder of compiled kernels, and find out whether it can be written. The user's own choices win.

    A folder for each version of Triton, which itself tells GPUs, options and the source of a kernel apart: after an
    upgrade of Headrace what has not changed is found again, and what an old Triton made can be deleted.

    Args:
        environ: the process's.
        instead: a folder that ends with the process, for when ours cannot be written.
    """
    given = {name: environ[name] for name in (TRITON, CUDA) if environ.get(name)}
    if TRITON in given:
        return KernelCache({}, f"Compiled kernels are kept in {given[TRITON]} ({TRITON} is set).")
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    folder = cache_dir() / "kernels" / f"triton-{version}"
    try:
        _probe(folder)
        note, is_kept = f"Compiled kernels are kept in {folder}.", True
    except OSError as error:
        why = "the disk is full" if is_disk_full(error) else error.strerror or type(error).__name__
        folder, note, is_kept = instead / "kernels", (
            f"Compiled kernels are not kept, so each start compiles them again: {folder} cannot be written ({why}); "
            f"HEADRACE_CACHE or {TRITON} names another folder."
        ), False  # fmt: skip
    # What the driver itself compiles, for a GPU that is newer than PyTorch's binaries.
    wanted = {TRITON: str(folder), CUDA: str(folder / "driver")}
    return KernelCache({name: path for name, path in wanted.items() if name not in given}, note, is_kept)


def _probe(folder: Path) -> None:
    """Make a folder and write into it. OSError where that cannot be."""
    # Whoever may write here decides what this user's GPU runs.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
