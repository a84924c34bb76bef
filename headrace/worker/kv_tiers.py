# SPDX-License-Identifier: Apache-2.0
"""Where KV blocks go beside the device, from the settings: host memory, and a folder below it."""

from collections.abc import Sequence

from torch import Tensor, nn

from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import KvGroup
from headrace.errors import ConfigError
from headrace.logger import get_logger
from headrace.utils.hub import ModelSource
from headrace.worker.block_copier import BlockCopier, CpuCopier, CudaCopier, raw_blocks
from headrace.worker.folder_store import FolderStore
from headrace.worker.host_cache import GIB, HostCache, HostLayout, num_host_blocks, pin_for_cuda, unpin_for_cuda
from headrace.worker.kv_store import KvStore, fingerprint
from headrace.worker.kv_transfer import KvTransfers
from headrace.worker.launch_queue import LaunchQueue
from headrace.worker.weights_digest import weights_digest

logger = get_logger(__name__)


def open_tiers(
    config: ResolvedConfig,
    model: nn.Module,
    source: ModelSource,
    groups: Sequence[KvGroup],
    arenas: Sequence[Tensor],
    queue: LaunchQueue,
    free_bytes: int,
) -> KvTransfers | None:
    """The tiers that the settings ask for; None: there is none but the device.

    free_bytes: of the host, what this process may still take. ConfigError where a tier cannot be.
    """
    settings = config.args.kv_cache_config
    block_bytes = [raw_blocks(arena).shape[1] for arena in arenas]
    num_blocks = num_host_blocks(settings.host_cache_size, block_bytes, free_bytes)
    if not num_blocks:
        return None
    store: KvStore | None = None
    if settings.disk_cache_path is not None:
        if settings.disk_cache_size < sum(block_bytes):
            raise ConfigError(
                f"kv_cache_config.disk_cache_size = {settings.disk_cache_size} holds no block: one of this model takes "
                f"{sum(block_bytes)} bytes; use many times that, or 0 for no disk tier.",
                param="kv_cache_config.disk_cache_size",
            )
        name = fingerprint(config, groups, weights_digest(model, source))
        store = FolderStore(settings.disk_cache_path, name, settings.disk_cache_size)
    layout = HostLayout.side_by_side(block_bytes, num_blocks)
    copier: BlockCopier
    if arenas[0].device.type == "cuda":
        host = HostCache(layout, pin_for_cuda, unpin_for_cuda)
        copier = CudaCopier(arenas, host)
    else:
        host = HostCache(layout)
        copier = CpuCopier(arenas, host, lambda: queue.submit(_nothing))
    logger.info("Host cache: %d blocks, %.1f GiB.", num_blocks, num_blocks * layout.unit_bytes / GIB)
    return KvTransfers(copier, host, store)


def _nothing() -> None:
    """Work that ends when all before it has."""
