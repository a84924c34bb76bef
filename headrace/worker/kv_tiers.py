# SPDX-License-Identifier: Apache-2.0
"""Where KV blocks go beside the device, from the settings: host memory, and a folder below it."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from headrace.config.kv_connector import KvCacheConnectorConfig
from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import KvGroup
from headrace.errors import ConfigError
from headrace.kernels.op import bind
from headrace.logger import get_logger
from headrace.utils.hub import ModelSource
from headrace.worker.block_copier import BlockCopier, CpuCopier, CudaCopier, raw_blocks
from headrace.worker.folder_store import FolderStore
from headrace.worker.host_cache import GIB, HostCache, HostLayout, num_host_blocks, pin_for_cuda, unpin_for_cuda
from headrace.worker.kv_store import KvStore, KvStores, fingerprint
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
    stores = _open_stores(config, sum(block_bytes), lambda: fingerprint(config, groups, weights_digest(model, source)))
    layout = HostLayout.side_by_side(block_bytes, num_blocks)
    copier: BlockCopier
    if arenas[0].device.type == "cuda":
        host = HostCache(layout, pin_for_cuda, unpin_for_cuda)
        copier = CudaCopier(arenas, host)
    else:
        host = HostCache(layout)
        copier = CpuCopier(arenas, host, lambda: queue.submit(_nothing))
    logger.info("Host cache: %d blocks, %.1f GiB.", num_blocks, num_blocks * layout.unit_bytes / GIB)
    store = stores[0] if len(stores) == 1 else KvStores(stores) if stores else None
    return KvTransfers(copier, host, store)


def _open_stores(config: ResolvedConfig, block_bytes: int, make_fingerprint: Callable[[], bytes]) -> list[KvStore]:
    """The disk tier and the connector, where there are. block_bytes: of a block of every group."""
    cache, connector = config.args.kv_cache_config, config.args.kv_connector_config
    folders = []
    if cache.disk_cache_path is not None:
        folders.append((cache.disk_cache_path, cache.disk_cache_size, "kv_cache_config.disk_cache_"))
    if connector is not None and connector.path is not None and connector.max_bytes is not None:
        folders.append((connector.path, connector.max_bytes, "kv_connector_config."))
    if not folders and connector is None:
        return []
    name = make_fingerprint()
    stores: list[KvStore] = []
    for path, size, setting in folders:
        if size < block_bytes:
            setting += "size" if setting.endswith("_") else "max_bytes"
            raise ConfigError(
                f"{setting} = {size} holds no block: one of this model takes {block_bytes} bytes; use many times that.",
                param=setting,
            )
        stores.append(FolderStore(path, name, size, f"{setting}path"))
    if connector is not None and connector.connector_module is not None:
        stores.append(_own_connector(connector, name))
    return stores


def _own_connector(connector: KvCacheConnectorConfig, name: bytes) -> KvStore:
    setting = "kv_connector_config.connector_worker_class"
    target = f"{connector.connector_module}:{connector.connector_worker_class}"
    try:
        store: KvStore = bind(target)(name)
    except Exception as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {target} could not be made ({reason}).", param=setting) from error
    return store


def _nothing() -> None:
    """Work that ends when all before it has."""
