# SPDX-License-Identifier: Apache-2.0
"""The skeleton every causal language model shares, and how checkpoint names map onto its modules."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from headrace.config.dtype import plain_dtype
from headrace.config.model import ModelConfig
from headrace.core.kv_cache_spec import KvSpec
from headrace.kernels.activation import softcap
from headrace.layers.attention import AttentionOptions
from headrace.layers.build import BuildContext, ForwardContext
from headrace.layers.embedding import Embedding
from headrace.layers.linear import ColumnLinear
from headrace.layers.norm import RMSNorm
from headrace.layers.rope import has_long_table, long_positions


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a checkpoint's names become module names. Data only: a model with other names has another map."""

    renames: tuple[tuple[str, str], ...] = ()
    """(checkpoint prefix, module prefix); the first that matches is replaced."""
    stacked: tuple[tuple[str, str, int], ...] = (
        ("q_proj", "qkv_proj", 0),
        ("k_proj", "qkv_proj", 1),
        ("v_proj", "qkv_proj", 2),
        ("gate_proj", "gate_up_proj", 0),
        ("up_proj", "gate_up_proj", 1),
    )
    """(a dot-separated component of the name, the fused module's component, which part of it this is)."""
    ignored: tuple[str, ...] = ()
    """Prefixes and suffixes of checkpoint names that may be present and are not used."""

    def locate(self, name: str) -> tuple[str, int | None] | None:
        """A checkpoint name -> (name of the module's tensor, part of it or None for all of it); None if ignored."""
        if any(name.startswith(i) or name.endswith(i) for i in (*self.ignored, "rotary_emb.inv_freq")):
            return None
        for prefix, ours in self.renames:
            if name.startswith(prefix):
                name = ours + name[len(prefix) :]
                break
        components = name.split(".")
        for theirs, ours, part in self.stacked:
            if theirs in components:
                components[components.index(theirs)] = ours
                return ".".join(components), part
        return name, None


class DecoderLayer(nn.Module):
    """What `CausalLM` asks of a layer: an attention whose options it knows, a forward that carries the residual."""

    options: AttentionOptions

    def __init__(self, ctx: BuildContext, cfg: ModelConfig, index: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, residual: Tensor | None, fwd: ForwardContext) -> tuple[Tensor, Tensor]:
        """x: the last block's output, not yet added to `residual` (None before the first layer)."""
        raise NotImplementedError


class Decoder(nn.Module):
    """Embedding, the stack of layers, and the final norm."""

    def __init__(self, ctx: BuildContext, cfg: ModelConfig, layer_cls: type[DecoderLayer], norm_offset: float) -> None:
        super().__init__()
        self.embed_tokens = Embedding(
            ctx.sub("embed_tokens"), cfg.vocab_size, cfg.hidden_size, cfg.embedding_multiplier
        )
        layers = [layer_cls(ctx.sub(f"layers.{index}"), cfg, index) for index in range(cfg.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.attention_options: list[AttentionOptions] = [layer.options for layer in layers]
        self.norm = RMSNorm(ctx.sub("norm"), cfg.hidden_size, cfg.rms_norm_eps, norm_offset)
        self._embed = self.embed_tokens.forward
        self._layers: list[Callable[..., tuple[Tensor, Tensor]]] = [layer.forward for layer in layers]
        self._norm: Callable[..., tuple[Tensor, Tensor]] = self.norm.add_forward

    def forward(self, fwd: ForwardContext) -> Tensor:
        hidden_states = self._embed(fwd.input_ids)
        residual = None
        for layer in self._layers:
            hidden_states, residual = layer(hidden_states, residual, fwd)
        return self._norm(hidden_states, residual)[0]


class CausalLM(nn.Module):
    """A decoder and a head. A model sets `layer_cls`, and the other attributes where it differs."""

    layer_cls: ClassVar[type[DecoderLayer]]
    weight_map: ClassVar[WeightMap] = WeightMap()
    norm_offset: ClassVar[float] = 0.0
    """1 where the checkpoint stores a norm's weight as its distance from 1."""

    def __init__(self, ctx: BuildContext, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.model = Decoder(ctx.sub("model"), cfg, self.layer_cls, self.norm_offset)
        if cfg.tie_word_embeddings:
            self._head = self.model.embed_tokens.project
        else:
            self.lm_head = ColumnLinear(ctx.sub("lm_head"), cfg.hidden_size, [cfg.vocab_size])
            self._head = self.lm_head.forward
        self._cap: Callable[[Tensor, float], Tensor] = softcap.choose(ctx.device.type, ctx.deterministic)
        self._max_positions = ctx.max_positions
        self._kv_dtype = plain_dtype(str(ctx.kv_dtype))
        self.needs_prompt_lens = has_long_table(cfg.rope, ctx.max_positions)
        """Whether `ForwardContext.prompt_lens` must be given."""

    def forward(self, fwd: ForwardContext) -> Tensor:
        """Final hidden states [num_tokens, hidden_size], normed. Run under `torch.inference_mode`."""
        if self.needs_prompt_lens:
            assert fwd.prompt_lens is not None
            rows = long_positions(fwd.positions, fwd.attention, fwd.prompt_lens, self.cfg.rope, self._max_positions)
            fwd = replace(fwd, positions=rows)
        return self.model.forward(fwd)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size] of the rows that sample -> [num_rows, vocab_size], in the model's dtype."""
        logits = self._head(hidden_states)
        cap = self.cfg.final_logit_softcap
        return logits if cap is None else self._cap(logits, cap)

    def kv_specs(self) -> list[KvSpec]:
        """One per layer."""
        return [KvSpec(o.num_kv_heads, o.head_dim, o.window, self._kv_dtype) for o in self.model.attention_options]
