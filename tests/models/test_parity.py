# SPDX-License-Identifier: Apache-2.0
"""Every architecture against Transformers: a tiny random checkpoint, fp32, logits and greedy tokens, on CPU and GPU.

To test a new model add one row to `CASES`: what Transformers calls its config class, and the fields that make it tiny.
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headrace.attention.base import AttentionMetadata
from headrace.attention.choose import choose_backend
from headrace.config.checkpoint import load_model_config
from headrace.layers.build import BuildContext, ForwardContext
from headrace.models.base import CausalLM
from headrace.models.registry import MODELS, build_model
from headrace.models.weights import load_model_weights, open_checkpoint
from headrace.quantization.choose import make_quant_method
from headrace.utils.hub import resolve_model

TOLERANCE = 1e-4
"""Of the largest logit: the most that two logits may differ by."""
TOKENS_PER_BLOCK = {"cpu": 4, "cuda": 16}
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
PROMPT_LENS = (41, 5, 24)
NEW_TOKENS = 10
WINDOW = 7

TINY = {
    "vocab_size": 151, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One checkpoint. config: the class in `transformers`; fields: over `TINY`."""

    name: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    max_positions: int = 64
    prompt_lens: tuple[int, ...] = PROMPT_LENS
    decodes: bool = True
    """False where Transformers' angles follow the length of each call, so that only a whole prompt can be compared."""


def rope(kind: str, theta: float = 10000.0, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **fields}}


SHORT_FACTORS, LONG_FACTORS = [1.0, 1.3, 1.7, 2.1], [1.5, 3.0, 5.0, 9.0]
LONGROPE = rope("longrope", short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS, original_max_position_embeddings=20)
STRETCHED = {"max_position_embeddings": 24} | rope("dynamic", factor=2.0)
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CASES = (
    Case("llama", "LlamaConfig"),
    Case("llama-tied", "LlamaConfig", {"tie_word_embeddings": True}),
    Case("llama-bias", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-mha", "LlamaConfig", {"num_key_value_heads": 6}),
    Case("llama-mqa", "LlamaConfig", {"num_key_value_heads": 1}),
    Case("llama-wide-heads", "LlamaConfig", {"head_dim": 16}),
    Case("rope-linear", "LlamaConfig", rope("linear", factor=4.0)),
    Case("rope-dynamic", "LlamaConfig", rope("dynamic", factor=2.0)),
    Case("rope-dynamic-stretched", "LlamaConfig", STRETCHED, max_positions=48, prompt_lens=(48,), decodes=False),
    Case(
        "rope-llama3",
        "LlamaConfig",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    Case(
        "rope-yarn",
        "LlamaConfig",
        {"head_dim": 32, "max_position_embeddings": 4096}
        | rope("yarn", factor=4.0, original_max_position_embeddings=1024),
    ),
    Case(
        "rope-yarn-mscale",
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9, beta_fast=8.0),
    ),
    Case("rope-longrope", "LlamaConfig", LONGROPE),
    Case("rope-longrope-short-only", "LlamaConfig", LONGROPE, max_positions=20, prompt_lens=(10, 5, 7)),
    Case("mistral", "MistralConfig", {"sliding_window": WINDOW}),
    Case("mistral-full", "MistralConfig", {"sliding_window": None}),
    Case("qwen2", "Qwen2Config", {"use_sliding_window": False}),
    Case(
        "qwen2-mixed-windows",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    Case("qwen3", "Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    Case("smollm3", "SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    Case(
        "gemma3",
        "Gemma3TextConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": GEMMA_ROPES,
            "use_bidirectional_attention": False,
        },
    ),
    Case("gemma3-mqa-wide-window", "Gemma3TextConfig", {"sliding_window": 512, "num_key_value_heads": 1}),
)  # fmt: skip


@dataclass
class Row:
    """A request: its tokens, how many have KV, its blocks, and its prompt's length."""

    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    prompt_len: int = 0


class PagedModel:
    """Our model over a small paged cache: makes the metadata of a step, as the worker does."""

    def __init__(self, model: CausalLM, device: str, num_blocks: int = 96) -> None:
        self.model = model
        self.device = torch.device(device)
        self.tokens_per_block = TOKENS_PER_BLOCK[device]
        specs = model.kv_specs()
        heads, dim = specs[0].num_kv_heads, specs[0].head_dim
        # Large where nothing was written: reading what is not the row's own cannot pass unseen.
        shape = (num_blocks, len(specs), 2, heads, self.tokens_per_block, dim)
        self.arena = torch.full(shape, 1e4, device=self.device)
        self.caches = [self.arena[:, layer] for layer in range(len(specs))]
        self.free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()

    def tensor(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def step(self, work: list[tuple[Row, int]], padding: int = 0) -> list[Tensor]:
        """Run n more tokens of each row (rows of one token first). Returns each row's logits [n, vocab]."""
        for row, n in work:
            while len(row.blocks) * self.tokens_per_block < row.num_computed + n:
                row.blocks.append(self.free.pop())
        positions = [p for row, n in work for p in range(row.num_computed, row.num_computed + n)]
        ids = [t for row, n in work for t in row.tokens[row.num_computed : row.num_computed + n]]
        slots = [
            row.blocks[p // self.tokens_per_block] * self.tokens_per_block + p % self.tokens_per_block
            for row, n in work
            for p in range(row.num_computed, row.num_computed + n)
        ]
        counts = [n for _, n in work]
        lens = [row.num_computed + n for row, n in work]
        width = max(len(row.blocks) for row, _ in work)
        tables = [row.blocks + [0] * (width - len(row.blocks)) for row, _ in work]
        all_positions = self.tensor(positions + [0] * padding)
        metadata = AttentionMetadata(
            num_tokens=len(ids) + padding,
            num_rows=len(work),
            num_decode_rows=sum(n == 1 for n in counts),
            first_prefill_row=sum(n == 1 for n in counts),
            max_query_len=max(counts),
            max_seq_len=max(lens),
            query_start_loc=self.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=self.tensor(lens, torch.int32),
            positions=all_positions,
            block_tables=(self.tensor(tables, torch.int32),),
            slot_mapping=(self.tensor(slots + [-1] * padding),),
        )
        prompt_lens = self.tensor([row.prompt_len or len(row.tokens) for row, _ in work], torch.int32)
        fwd = ForwardContext(
            input_ids=self.tensor(ids + [0] * padding),
            positions=all_positions,
            attention=metadata,
            kv_caches=self.caches,
            groups=[0] * len(self.caches),
            prompt_lens=prompt_lens,
        )
        with torch.inference_mode():
            logits = self.model.compute_logits(self.model.forward(fwd))
        for row, n in work:
            row.num_computed += n
        return list(logits[: len(ids)].cpu().split(counts))


@dataclass
class Pair:
    """The two implementations of a case, and prompts with the reference's answers."""

    case: Case
    device: str
    reference: Any
    model: CausalLM
    prompts: list[list[int]]

    def paged(self) -> PagedModel:
        return PagedModel(self.model, self.device)

    def logits(self, tokens: list[int]) -> Tensor:
        """Transformers' logits [num_tokens, vocab] of a whole prompt."""
        with torch.inference_mode():
            return self.reference(torch.tensor([tokens])).logits[0]

    def check(self, got: Tensor, want: Tensor) -> None:
        scale = want.abs().max()
        assert got.shape == want.shape
        assert (got - want).abs().max() < TOLERANCE * scale


def reference_model(case: Case, folder: Path) -> Any:
    """A Transformers model with random weights that make every part count, saved to `folder`."""
    torch.manual_seed(0)
    # Transformers writes into the dicts it is given.
    config = getattr(transformers, case.config)(**copy.deepcopy(TINY | case.fields))
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in reference.named_parameters():
        # Norms around their neutral value; attention sharp enough that positions and windows are seen.
        spread = 0.2 if weight.dim() == 1 else 1.5 * weight.shape[-1] ** -0.5
        neutral = weight.detach().mean() if "norm" in name else 0.0
        weight.data = neutral + spread * torch.randn_like(weight)
    reference.save_pretrained(folder)
    return reference


def our_model(folder: Path, max_positions: int, device: str) -> CausalLM:
    """Headrace's model of the checkpoint in `folder`, loaded as an engine loads it."""
    source = resolve_model(str(folder))
    cfg = load_model_config(source)
    ctx = BuildContext(
        dtype=torch.float32,
        device=torch.device(device),
        quant=lambda prefix: make_quant_method(prefix, cfg, torch.float32, device, "hf"),
        backend=lambda need: choose_backend(need, device),
        kv_dtype=torch.float32,
        max_positions=max_positions,
        tokens_per_block=TOKENS_PER_BLOCK[device],
    )
    model = build_model(cfg, ctx)
    load_model_weights(model, open_checkpoint(source, "auto"))
    return model


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=CASES, ids=lambda c: c.name)
def pair(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    reference = reference_model(case, folder)
    model = our_model(folder, case.max_positions, device)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 151, (n,), generator=generator).tolist() for n in case.prompt_lens]
    return Pair(case, device, reference, model, prompts)


def test_every_model_has_a_case() -> None:
    tested = {getattr(transformers, case.config).model_type for case in CASES}
    for architecture in MODELS:
        if architecture != "Gemma3ForConditionalGeneration":  # its text half is Gemma3ForCausalLM
            mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            assert tested & {kind for kind, name in mapping.items() if name == architecture}, architecture


def test_a_whole_prompt_gives_the_same_logits(pair: Pair) -> None:
    paged = pair.paged()
    for prompt in pair.prompts:
        pair.check(paged.step([(Row(prompt), len(prompt))])[0], pair.logits(prompt))


@pytest.mark.parametrize("chunk", [1, 3, 17])
def test_a_prompt_in_chunks_gives_the_same_logits(pair: Pair, chunk: int) -> None:
    prompt = pair.prompts[0]
    paged, row, got = pair.paged(), Row(prompt), []
    while row.num_computed < len(prompt):
        got += paged.step([(row, min(chunk, len(prompt) - row.num_computed))])
    pair.check(torch.cat(got), pair.logits(prompt))


def needs_more_than_one_call(pair: Pair) -> None:
    if not pair.case.decodes:
        pytest.skip("Transformers would use other angles in each call")


def test_a_cached_prefix_gives_the_same_logits(pair: Pair) -> None:
    needs_more_than_one_call(pair)
    first = pair.prompts[0]
    paged, row = pair.paged(), Row(first)
    shared = len(first) * 6 // 10 // paged.tokens_per_block
    cut = shared * paged.tokens_per_block
    second = first[:cut] + pair.prompts[-1][: len(first) - cut]
    paged.step([(row, len(first))])
    hit = Row(second, num_computed=cut, blocks=row.blocks[:shared])
    got = paged.step([(hit, len(second) - cut)])[0]
    pair.check(got, pair.logits(second)[cut:])


def test_rows_of_a_mixed_batch_do_not_disturb_each_other(pair: Pair) -> None:
    needs_more_than_one_call(pair)
    paged = pair.paged()
    one, two, three = (Row(prompt) for prompt in pair.prompts)
    paged.step([(one, len(one.tokens) - 1)])
    paged.step([(two, len(two.tokens) - 1), (three, 2)])
    for (row, n), got in zip(
        work := [(one, 1), (two, 1), (three, len(three.tokens) - 2)], paged.step(work, padding=5), strict=True
    ):
        pair.check(got, pair.logits(row.tokens)[-n:])


def test_greedy_decoding_in_a_batch_gives_the_same_tokens(pair: Pair) -> None:
    needs_more_than_one_call(pair)
    paged = pair.paged()
    rows = [Row(list(prompt), prompt_len=len(prompt)) for prompt in pair.prompts]
    work = [(row, len(row.tokens)) for row in rows]
    for _ in range(NEW_TOKENS):
        for row, logits in zip(rows, paged.step(work), strict=True):
            row.tokens.append(int(logits[-1].argmax()))
        work = [(row, 1) for row in rows]
    for row, prompt in zip(rows, pair.prompts, strict=True):
        ids = torch.tensor([prompt])
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        want = pair.reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0]
        assert row.tokens == want.tolist()
