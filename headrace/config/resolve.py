# SPDX-License-Identifier: Apache-2.0
"""`resolve`: settings, model and device in; every number final out. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.config.base import leaves, value_of
from headrace.config.dtype import BYTES
from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.errors import ConfigError
from headrace.utils.math import round_down

RESERVE_BYTES = 1 << 30
"""Of a device's memory, left to nobody."""

ATTENTION_SLOWNESS = 1.5
"""Time of an operation in prefill attention over that of one in a large product, about: 450 and 680 TFLOP/s."""


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of the device before anything runs on it."""

    kind: str
    """cpu or cuda."""
    name: str = ""
    total_memory: int = 0
    """Bytes: of the GPU, or what this process may still take of the machine's; 0: not known."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on a CPU."""
    num_cpus: int = 1
    """Physical cores this process should use."""
    has_bf16: bool = True
    """Whether it multiplies bfloat16 in hardware."""


@dataclass(frozen=True)
class ResolvedConfig:
    """Every number of a run but the block count, which the memory ledger gives when the worker starts."""

    args: LlmArgs
    model: ModelConfig
    device: str
    """cpu or cuda."""
    dtype: str
    """Of weights and activations: float32, bfloat16 or float16."""
    kv_dtype: str
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    max_prefill_tokens: int
    """Prompt tokens in a step that also decodes; the most of them where `adapts_prefill`."""
    adapts_prefill: bool
    """The scheduler chooses how many, step by step."""
    attention_depth: int
    """The position at which a token's attention takes about as long as its products."""
    num_plans_in_flight: int
    attn_backend: str
    """As asked for: TRITON, VANILLA or AUTO, which the worker settles for each layer (`attention/choose.py`)."""
    tokens_per_block: int
    enable_block_reuse: bool
    enable_chunked_prefill: bool
    watermark: float
    policy: str
    """MAX_UTILIZATION or GUARANTEED_NO_EVICT."""
    waiting_queue_policy: str
    """fcfs or priority."""
    num_threads: int
    """CPU threads for compute."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """Dotted setting -> its source: command line, environment, yaml, argument, default, or `auto: why`."""
    notes: tuple[str, ...] = ()
    """What the user should know of these choices, a sentence each; logged once at start."""


@dataclass
class _Choices:
    """What is being filled in: the reasons for `auto` values, and the notes."""

    args: LlmArgs
    model: ModelConfig
    device: DeviceFacts
    origin: dict[str, str]
    notes: list[str] = field(default_factory=list)

    def chose(self, name: str, why: str) -> None:
        self.origin[name] = f"auto: {why}"


def resolve(
    args: LlmArgs, model: ModelConfig, device: DeviceFacts, origin: Mapping[str, str] | None = None
) -> ResolvedConfig:
    """Every number final. `origin`: where the settings that were given came from (see `ResolvedConfig.origin`).

    Raises ConfigError for an explicit value that this model or device cannot have.
    """
    given = dict(origin) if origin is not None else given_in_python(args)
    choices = _Choices(args, model, device, {leaf.name: "default" for leaf in leaves(LlmArgs)} | given)
    if args.device not in ("auto", device.kind):
        raise ConfigError(f"device = {args.device} is not possible here: only {device.kind} was found.", param="device")
    if args.device == "auto":
        choices.chose("device", device.name or device.kind)
    _check_tiers(args)
    dtype = _dtype(choices)
    kv_dtype = _kv_dtype(choices, dtype)
    return ResolvedConfig(
        args=args,
        model=model,
        device=device.kind,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_seq_len=_max_seq_len(choices, dtype, kv_dtype),
        max_batch_size=args.max_batch_size,
        max_num_tokens=args.max_num_tokens,
        max_prefill_tokens=_max_prefill_tokens(choices),
        adapts_prefill=device.kind == "cuda" and args.scheduler_config.max_prefill_tokens == "auto",
        attention_depth=_attention_depth(model),
        num_plans_in_flight=1 if args.disable_overlap_scheduler else 2,
        attn_backend=_attn_backend(choices),
        tokens_per_block=args.kv_cache_config.tokens_per_block,
        enable_block_reuse=args.kv_cache_config.enable_block_reuse,
        enable_chunked_prefill=args.enable_chunked_prefill,
        watermark=args.scheduler_config.watermark,
        policy=args.scheduler_config.capacity_scheduler_policy,
        waiting_queue_policy=args.scheduler_config.waiting_queue_policy,
        num_threads=_num_threads(choices),
        origin=choices.origin,
        notes=(*choices.notes, *_not_built_notes(args)),
    )


def given_in_python(args: LlmArgs) -> dict[str, str]:
    """The settings that a Python caller changed from their defaults, by dotted path."""
    plain = LlmArgs(model=args.model)
    changed = {
        leaf.name: "argument" for leaf in leaves(LlmArgs) if value_of(args, leaf.path) != value_of(plain, leaf.path)
    }
    return {"model": "argument", **changed}


def _dtype(choices: _Choices) -> str:
    args, model, device = choices.args, choices.model, choices.device
    if args.dtype != "auto":
        return args.dtype
    own = model.torch_dtype or "bfloat16"
    if device.kind == "cpu":
        if model.quantization is not None:
            choose, why = "bfloat16", "what packed weights are multiplied in"
        elif own == "float32" or not device.has_bf16:
            choose, why = "float32", "the checkpoint's" if own == "float32" else "this CPU has no bfloat16 units"
        else:
            choose, why = "bfloat16", "half the bytes of float32"
    elif device.capability is not None and device.capability < (8, 0):
        choose, why = "float16", "this GPU has no bfloat16 units"
    elif own == "float32":
        choose, why = "bfloat16", "the checkpoint's float32 is slow on a GPU"
        choices.notes.append("The float32 checkpoint runs in bfloat16; ask for `dtype: float32` to keep its precision.")
    else:
        choose, why = own, "the checkpoint's"
    choices.chose("dtype", why)
    return choose


def _kv_dtype(choices: _Choices, dtype: str) -> str:
    name = "kv_cache_config.dtype"
    wanted = choices.args.kv_cache_config.dtype
    asked = choices.model.kv_dtype
    if wanted != "auto":
        return wanted
    if asked in BYTES:
        choices.chose(name, "the checkpoint's")
        return asked
    if asked is not None:
        choices.notes.append(f"The checkpoint asks for a KV cache of {asked}, which is not built: it is kept wider.")
    if choices.device.kind == "cpu":
        choices.chose(name, "attention on a CPU is fastest in float32")
        return "float32"
    choices.chose(name, "the model's")
    return dtype


def _check_tiers(args: LlmArgs) -> None:
    """Blocks leave the device for the prefix cache's sake, and go everywhere else by way of host memory."""
    settings = args.kv_cache_config
    if settings.host_cache_size and not settings.enable_block_reuse:
        raise ConfigError(
            f"kv_cache_config.host_cache_size = {settings.host_cache_size} keeps blocks for reuse, and "
            "kv_cache_config.enable_block_reuse is off; turn that on, or leave the first out.",
            param="kv_cache_config.host_cache_size",
        )
    if args.kv_connector_config is not None and not settings.host_cache_size:
        raise ConfigError(
            "kv_connector_config needs kv_cache_config.host_cache_size: blocks go to the connector and come back "
            "through host memory; give it some gigabytes (1 GiB is 1073741824).",
            param="kv_connector_config",
        )


def _max_seq_len(choices: _Choices, dtype: str, kv_dtype: str) -> int:
    args, model = choices.args, choices.model
    if args.max_seq_len != "auto":
        if args.max_seq_len > model.longest_allowed:
            raise ConfigError(
                f"max_seq_len ({args.max_seq_len}) is more than the model's positions allow ({model.longest_allowed}); "
                f"use at most {model.longest_allowed}, or auto.",
                param="max_seq_len",
            )
        return args.max_seq_len
    fits = _tokens_that_fit(choices, dtype, kv_dtype)
    if fits is None or fits >= model.max_model_len:
        choices.chose("max_seq_len", "the model's")
        return model.max_model_len
    size = args.kv_cache_config.tokens_per_block
    limit = max(round_down(fits, size), min(size * 8, model.max_model_len))
    choices.chose("max_seq_len", f"what fits in memory (the model's is {model.max_model_len})")
    choices.notes.append(
        f"max_seq_len is {limit}, less than the model's {model.max_model_len}: the KV cache of one request that long "
        "would not fit in memory beside the weights."
    )
    return limit


def _tokens_that_fit(choices: _Choices, dtype: str, kv_dtype: str) -> int | None:
    """Tokens of KV cache that the device has room for by estimate; None where its memory is not known.

    The worker's ledger has the last word; this keeps `auto` from promising what cannot be.
    """
    args, model, device = choices.args, choices.model, choices.device
    if not device.total_memory:
        return args.kv_cache_config.max_tokens
    packed = model.quantization is not None
    reserve = RESERVE_BYTES if device.kind == "cuda" else min(RESERVE_BYTES, device.total_memory // 8)
    weights = model.num_params() * (1.0 if packed else BYTES[dtype])
    share = args.kv_cache_config.free_gpu_memory_fraction
    room = (device.total_memory - weights - reserve) * (1.0 if share == "auto" else share)
    tokens = max(0, int(room)) // model.kv_bytes_per_token(kv_dtype)
    return min(tokens, args.kv_cache_config.max_tokens or tokens)


def _max_prefill_tokens(choices: _Choices) -> int:
    name, args = "scheduler_config.max_prefill_tokens", choices.args
    wanted = args.scheduler_config.max_prefill_tokens
    if wanted == "auto":
        is_gpu = choices.device.kind == "cuda"
        choices.chose(
            name,
            "at most; each step takes what its decodes and the waiting prompts ask for" if is_gpu else "usual on a cpu",
        )
        return min(2048 if is_gpu else 256, args.max_num_tokens)
    if wanted > args.max_num_tokens:
        raise ConfigError(
            f"{name} ({wanted}) must not be above max_num_tokens ({args.max_num_tokens}), the tokens of a whole step; "
            "lower the first or raise the second.",
            param=name,
        )
    return wanted


def _attention_depth(model: ModelConfig) -> int:
    """Floating-point operations of a token's products over those of its attention to one key, which are slower."""
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    products = 2 * (model.num_params() - tables)
    per_key = 4 * model.num_q_heads * model.head_dim * model.num_layers
    return max(1, int(products / (per_key * ATTENTION_SLOWNESS)))


def _attn_backend(choices: _Choices) -> str:
    wanted = choices.args.attn_backend
    if wanted == "AUTO":
        choices.chose("attn_backend", "at start, the first of TRITON and VANILLA that serves the model on this device")
    if wanted == "FLASHINFER":
        raise ConfigError("attn_backend = FLASHINFER is not built yet; use TRITON or AUTO.", param="attn_backend")
    if wanted == "TRITON" and choices.device.kind == "cpu":
        raise ConfigError("attn_backend = TRITON needs a GPU; on a CPU use VANILLA or AUTO.", param="attn_backend")
    return wanted


def _num_threads(choices: _Choices) -> int:
    if choices.args.num_threads != "auto":
        return choices.args.num_threads
    choices.chose("num_threads", "the physical cores that are free")
    return max(1, choices.device.num_cpus)


def _not_built_notes(args: LlmArgs) -> list[str]:
    """Settings that are taken because they never change an answer, and do nothing."""
    notes = []
    if args.trust_remote_code:
        notes.append("trust_remote_code has no effect: Headrace never runs code that comes with a checkpoint.")
    return notes
