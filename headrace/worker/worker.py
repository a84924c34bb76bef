# SPDX-License-Identifier: Apache-2.0
"""One device's worker: starts it up, takes plans, shuts it down. What engines call an executor's rank."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from headrace.attention.base import DTYPES
from headrace.attention.choose import BackendChooser
from headrace.attention.long_chunk import LongShapes
from headrace.config.resolve import ResolvedConfig
from headrace.core.kv_cache_spec import CacheLayout, KvGroup, group_layers, lay_out
from headrace.core.ledger import MemoryLedger
from headrace.core.output import SchedulerOutput
from headrace.core.padded_sizes import graph_sizes
from headrace.core.transfer import Transfer, TransferResult
from headrace.layers.build import BuildContext
from headrace.logger import get_logger
from headrace.models.base import CausalLM
from headrace.models.registry import build_model
from headrace.models.weights import load_model_weights, open_checkpoint
from headrace.quantization.choose import copy_bytes, make_quant_method, require_room
from headrace.utils.hub import ModelSource
from headrace.utils.machine import available_memory
from headrace.utils.math import cdiv
from headrace.utils.phases import Phases
from headrace.worker import profiling
from headrace.worker.device import keep_freed_memory
from headrace.worker.kv_cache import KVArenas
from headrace.worker.kv_tiers import open_tiers
from headrace.worker.kv_transfer import KvTransfers
from headrace.worker.launch_queue import InlineQueue, LaunchQueue, ThreadQueue
from headrace.worker.memory import MemoryBook, usage
from headrace.worker.model_runner import ModelRunner, Padding
from headrace.worker.request_state import RequestState
from headrace.worker.step_result import PendingOutput
from headrace.worker.trace import Tracer

ProgressCallback = Callable[[str, int, int], None]
"""(what is done, how much of it, of how much), in bytes or items."""

GET_READY_S = 3.0
"""Seconds of capturing graphs before the first request; what is left is done when nothing else is."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a started worker found and decided."""

    layout: CacheLayout
    """Of the KV cache on the device."""
    tokens_per_block: int
    kv_bytes_per_token: int
    max_seq_len: int
    """The config's, or less where that was `auto` and the cache holds less."""
    num_host_blocks: int
    """Blocks of each group in the host tier; 0: there is none."""
    attn_backend: str
    """What the layers attend with; names, comma-separated, where they differ."""
    ledger: list[str]
    """The memory ledger, a line each."""
    phases: dict[str, float]
    """Seconds of each phase of the start, in order."""


class Worker:
    """Carries plans out in the order of their launch; `forward` and `sample` return at once.

    On a GPU the launches go to its stream. On a CPU one thread does all of torch's work, so that there, too, the host
    is ahead of the device.
    """

    def __init__(self, config: ResolvedConfig, source: ModelSource) -> None:
        self._config = config
        self._source = source
        self._device = torch.device("cuda:0" if config.device == "cuda" else "cpu")
        self._queue: LaunchQueue = InlineQueue() if config.device == "cuda" else ThreadQueue(config.num_threads)
        capability = torch.cuda.get_device_capability(self._device) if config.device == "cuda" else None
        self._backends = BackendChooser(config.device, config.attn_backend, capability, config.args.deterministic)
        self._runner: ModelRunner | None = None
        self._long_shapes: LongShapes | None = None
        self._transfers: KvTransfers | None = None
        self.tracer = Tracer(config.device, self._queue)

    def start(self, progress: ProgressCallback | None = None) -> WorkerInfo:
        """Load the model, share out the memory, warm up. ModelLoadError or ConfigError where that cannot be."""
        return self._queue.submit(lambda: self._start(progress)).result()

    def forward(self, plan: SchedulerOutput) -> None:
        """Launch a plan's body."""
        assert self._runner is not None, "the worker is started first"
        self._queue.submit(partial(self._runner.forward, plan))

    def sample(self, plan: SchedulerOutput, masks: None = None) -> PendingOutput:
        """Launch the rest of the plan that `forward` was last given."""
        assert self._runner is not None, "the worker is started first"
        return PendingOutput(plan, self._queue.submit(partial(self._runner.sample, plan, masks)))

    def transfer(self, transfer: Transfer) -> None:
        """Begin to move KV blocks, after the plans that are launched."""
        assert self._transfers is not None, "only a worker with a host tier moves blocks"
        self._transfers.submit(transfer)

    def poll_transfers(self) -> list[TransferResult]:
        """The transfers that have ended since the last call."""
        return [] if self._transfers is None else self._transfers.poll()

    def num_ready_host_blocks(self) -> int:
        """Blocks of each group in the host tier that can be used; it takes a while to pin all."""
        return 0 if self._transfers is None else self._transfers.host.num_ready_units

    def use_idle_time(self) -> bool:
        """With no plan in flight: capture one more CUDA graph, or build one more shape of long prefill chunks. False:
        nothing is left to do."""
        runner, shapes = self._runner, self._long_shapes
        if runner is None or shapes is None:
            return False
        return self._queue.submit(lambda: runner.capture_next() or shapes.build_next()).result()

    def memory(self) -> dict[str, int]:
        """Bytes of the device: the most that were taken since start, and all there are."""
        return usage(self._device)

    def shutdown(self) -> None:
        """Finish what was launched and let go of the device. Any number of times."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        self._queue.close()
        if self._runner is not None:
            self._runner = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _start(self, progress: ProgressCallback | None) -> WorkerInfo:
        phases = Phases()
        config, device = self._config, self._device
        book = MemoryBook(config, device, self._packed_bytes())
        model = self._build()
        logger.info("Attention: %s.", self._backends.describe())
        phases.end_of("model's layers")
        stream = open_checkpoint(self._source, config.args.load_format)
        load_model_weights(model, stream, progress)
        book.weights_loaded()
        phases.end_of("weights")
        if device.type == "cpu":
            keep_freed_memory()
        groups = group_layers(model.kv_specs())
        if device.type == "cuda":
            needs = self._backends.long_needs(device)
            self._long_shapes = LongShapes(needs, config.max_num_tokens, config.max_seq_len, device)
        ledger = self._share_memory(model, groups, book)
        phases.end_of("memory measuring")
        layout = lay_out(groups, config.tokens_per_block, ledger.num_blocks)
        self._runner = self._make_runner(model, groups, layout)
        phases.end_of("KV cache")
        self._warm_up(self._runner, layout)
        phases.end_of("warm-up")
        self._get_ready()
        phases.end_of("CUDA graphs")
        # On a CPU the device's blocks are the host's memory too, taken as they are written.
        free = available_memory() - (ledger.kv_bytes if device.type == "cpu" else 0)
        self._transfers = open_tiers(config, model, self._source, groups, self._runner.arenas.groups, self._queue, free)
        phases.end_of("KV tiers")
        return WorkerInfo(
            layout=layout,
            tokens_per_block=config.tokens_per_block,
            kv_bytes_per_token=ledger.kv_bytes_per_token,
            max_seq_len=min(ledger.max_seq_len, config.max_seq_len),
            num_host_blocks=0 if self._transfers is None else self._transfers.host.layout.num_units,
            attn_backend=",".join(self._backends.chosen),
            ledger=book.lines(self._runner.graph_bytes, self._runner.num_to_capture),
            phases=phases.seconds,
        )

    def _build(self) -> CausalLM:
        config, device = self._config, self._device
        dtype = DTYPES[config.dtype]
        if self._is_packed and config.args.deterministic:
            require_room(config.model, available_memory())
        quant = partial(
            make_quant_method,
            cfg=config.model,
            dtype=dtype,
            device_type=device.type,
            source_kind=self._source.kind,
            free_memory=available_memory() if device.type == "cpu" else None,
            deterministic=config.args.deterministic,
        )
        ctx = BuildContext(
            dtype=dtype,
            device=device,
            quant=quant,
            backend=self._backends,
            kv_dtype=DTYPES[config.kv_dtype],
            max_positions=config.max_seq_len,
            tokens_per_block=config.tokens_per_block,
            deterministic=config.args.deterministic,
        )
        return build_model(config.model, ctx)

    def _make_runner(self, model: CausalLM, groups: list[KvGroup], layout: CacheLayout) -> ModelRunner:
        config, device = self._config, self._device
        max_blocks = cdiv(config.max_seq_len, config.tokens_per_block)
        state = RequestState(config.max_batch_size, config.max_seq_len, [max_blocks] * len(groups), device)
        arenas = KVArenas(groups, layout, config.tokens_per_block, DTYPES[config.kv_dtype], device)
        return ModelRunner(
            model,
            state,
            arenas,
            config.max_num_tokens,
            config.tokens_per_block,
            config.model.vocab_size,
            clear_new_blocks=self._backends.reads_unused_slots,
            padding=self._padding(model),
            long_shapes=self._long_shapes,
            deterministic=config.args.deterministic,
        )

    @property
    def _is_packed(self) -> bool:
        """Weights come packed, and are multiplied in bf16 on a CPU."""
        config = self._config
        return config.device == "cpu" and config.dtype == "bfloat16" and self._source.kind == "gguf"

    def _packed_bytes(self) -> int | None:
        """About what weights that stay packed take, beside the copy that prefill has of them; None: none stay so."""
        config = self._config
        if not self._is_packed or config.args.deterministic:
            return None
        return self._source.path.stat().st_size + copy_bytes(config.model, available_memory())

    def _share_memory(self, model: CausalLM, groups: list[KvGroup], book: MemoryBook) -> MemoryLedger:
        """On a GPU after the largest step has been run and measured, over a cache of few blocks used many times."""
        config = self._config
        if self._device.type == "cpu":
            return book.share_host(groups)
        before = torch.cuda.memory_allocated()
        layout = replace(lay_out(groups, config.tokens_per_block, 1), num_slabs=1)
        runner = self._make_runner(model, groups, layout)
        fixed = torch.cuda.memory_allocated() - before - layout.slab_bytes
        lengths = profiling.largest_step(config.max_batch_size, config.max_num_tokens, config.max_seq_len)
        plan = profiling.made_up_plan(lengths, profiling.EVERYTHING, layout, config.tokens_per_block)
        # Twice: the first also compiles, and allocates what libraries keep.
        peak = max(profiling.peak_bytes(runner, plan) for _ in range(2))
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return book.share_gpu(groups, fixed, peak, has_graphs=self._padding(model) is not None)

    def _padding(self, model: CausalLM) -> Padding | None:
        """The shapes that steps run in as CUDA graphs; None: none do."""
        config = self._config
        sizes = graph_sizes(config)
        if sizes is None:
            return None
        if not self._backends.capturable or model.needs_prompt_lens:
            why = "RoPE depends on the prompt's length" if model.needs_prompt_lens else "attention cannot be captured"
            logger.warning("No CUDA graphs for this model, its %s: short steps are slower.", why)
            return None
        return Padding(sizes, config.model.hidden_size, DTYPES[config.dtype], captures=True)

    def _get_ready(self) -> None:
        """Spend a moment on what idle time is for, so that the first requests need not do without."""
        began, num_done = time.monotonic(), 0
        while time.monotonic() - began < GET_READY_S and self.use_idle_time():
            num_done += 1
        logger.debug("%d graphs and shapes ready in %.1f s.", num_done, time.monotonic() - began)

    def _warm_up(self, runner: ModelRunner, layout: CacheLayout) -> None:
        config = self._config
        limits = (config.max_batch_size, config.max_num_tokens, config.max_seq_len)
        for lengths, spec in profiling.warm_up_steps(self._device.type, *limits):
            profiling.run(runner, profiling.made_up_plan(lengths, spec, layout, config.tokens_per_block))
