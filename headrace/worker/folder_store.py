# SPDX-License-Identifier: Apache-2.0
"""KV blocks in a folder: the disk tier, and what several engines with one folder share."""

import contextlib
import os
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.errors import ConfigError
from headrace.kernels.block_checksum import checksum_of
from headrace.logger import get_logger
from headrace.worker.kv_store import BlockKey

MAGIC = b"headrace"
VERSION = 1
FIELDS = struct.Struct("<8sIIQ32s32sq")
"""Magic, version, group, bytes of the block, its hash, the fingerprint of its model, its checksum."""
HEADER_BYTES = 128
SUFFIX, UNFINISHED = ".kv", ".unfinished"
SHARE_LEFT = 0.9
"""Of `max_bytes`, after the least recently used were deleted."""
BYTES_BETWEEN_SCANS = 0.05
"""Of `max_bytes`: others may write into the folder too."""
ABANDONED_S = 3600.0
"""A file unfinished for so long is nobody's any more."""

logger = get_logger(__name__)


class FolderStore:
    """One file per block, `FOLDER/fingerprint/12/34/hash-group.kv`: a header and the block.

    Safe to share: a file appears whole or not at all, may vanish at any time, and is read only where its header, length
    and checksum are what they must be; one that is not is deleted. The least recently used are deleted for room,
    whichever model's they are.
    """

    def __init__(
        self, folder: str | Path, fingerprint: bytes, max_bytes: int, setting: str = "kv_cache_config.disk_cache_path"
    ) -> None:
        """
        Args:
            fingerprint: of the model and layout whose blocks these are (`kv_store.fingerprint`).
            max_bytes: of all files in the folder.
            setting: that named the folder, for what is said of it.

        Raises:
            ConfigError: nothing can be written there, or the disk is smaller than that.
        """
        self._folder = Path(folder)
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._mine = self._folder / fingerprint.hex()[:32]
        self._lock = threading.Lock()
        self._before_scan = 0
        """Bytes that may be written before the folder is looked through again."""
        try:
            self._mine.mkdir(parents=True, exist_ok=True)
            probe = self._unfinished(self._mine)
            probe.touch()
            probe.unlink()
            disk = os.statvfs(self._mine)
        except OSError as error:
            raise ConfigError(
                f"{setting} = {folder} cannot be written to ({error.strerror}); name a folder of this user's.",
                param=setting,
            ) from error
        if max_bytes > disk.f_blocks * disk.f_frsize:
            raise ConfigError(
                f"{setting} = {folder} is on a disk of {disk.f_blocks * disk.f_frsize} bytes, and {max_bytes} were "
                "asked for; ask for less than the disk holds, or name a folder on a larger one.",
                param=setting,
            )

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `KvStore.lookup`."""
        return [self.path(key).exists() for key in keys]

    def load(self, key: BlockKey, into: memoryview) -> int | None:
        """See `KvStore.load`."""
        path = self.path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                checksum = self._read(key, file.fileno(), into)
        except FileNotFoundError:
            return None
        if checksum is None:
            logger.warning("%s is not the KV block that it should be; deleted.", path)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return checksum

    def save(self, key: BlockKey, block: memoryview, checksum: int) -> None:
        """See `KvStore.save`. OSError where it cannot be written, as on a full disk."""
        path = self.path(key)
        try:
            os.utime(path)
            return
        except FileNotFoundError:
            pass
        self._make_room(HEADER_BYTES + block.nbytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._unfinished(path.parent)
        try:
            with open(unfinished, "xb", buffering=0) as file:
                _write(file.fileno(), memoryview(self._header(key, block.nbytes, checksum)))
                _write(file.fileno(), block)
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def close(self) -> None:
        """See `KvStore.close`."""

    def path(self, key: BlockKey) -> Path:
        """The file of a block."""
        name = key.hash.hex()
        return self._mine / name[:2] / name[2:4] / f"{name}-{key.group}{SUFFIX}"

    def _header(self, key: BlockKey, num_bytes: int, checksum: int) -> bytes:
        fields = FIELDS.pack(MAGIC, VERSION, key.group, num_bytes, key.hash, self._fingerprint, checksum)
        return fields.ljust(HEADER_BYTES, b"\0")

    def _read(self, key: BlockKey, file: int, into: memoryview) -> int | None:
        """The checksum of the block; None: the file is cut short, changed, or another block's."""
        header = bytearray(HEADER_BYTES)
        if os.fstat(file).st_size != HEADER_BYTES + into.nbytes or not _fill(file, memoryview(header)):
            return None
        checksum = int(FIELDS.unpack_from(header)[-1])
        if bytes(header) != self._header(key, into.nbytes, checksum):
            return None
        return checksum if _fill(file, into) and checksum_of(into) == checksum else None

    def _unfinished(self, folder: Path) -> Path:
        return folder / f"{uuid.uuid4().hex}{UNFINISHED}"

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            self._before_scan -= num_bytes
            if self._before_scan >= 0:
                return
            files = sorted(self._files())
            total = sum(size for _, size, _ in files) + num_bytes
            if total > self._max_bytes:
                for _, size, path in files:
                    if total <= self._max_bytes * SHARE_LEFT:
                        break
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                    total -= size
            self._before_scan = min(self._max_bytes - total, int(self._max_bytes * BYTES_BETWEEN_SCANS))

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(time of last use, bytes, path) of every block's file in the folder."""
        folders = [str(self._folder)]
        while folders:
            with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.name.endswith((SUFFIX, UNFINISHED)):
                        yield from _seen(entry)


def _seen(entry: "os.DirEntry[str]") -> Iterator[tuple[int, int, str]]:
    with contextlib.suppress(OSError):
        found = entry.stat(follow_symlinks=False)
        if entry.name.endswith(SUFFIX):
            yield found.st_mtime_ns, found.st_size, entry.path
        elif time.time() - found.st_mtime > ABANDONED_S:
            os.unlink(entry.path)


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _fill(file: int, into: memoryview) -> bool:
    """Whether the file had that many bytes left."""
    while into:
        count = os.readv(file, [into])
        if not count:
            return False
        into = into[count:]
    return True
