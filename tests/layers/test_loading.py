# SPDX-License-Identifier: Apache-2.0
"""How layers take their weights: in parts, fused, again into the same storage; and how names find them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.layers.build import BuildContext, LoadableLayer
from headrace.layers.embedding import Embedding
from headrace.layers.linear import ColumnLinear, RowLinear
from headrace.layers.norm import RMSNorm
from headrace.models.base import WeightMap
from headrace.models.gemma3 import Gemma3ForCausalLM
from headrace.quantization.base import RawTensor


class PlainMethod:
    """The smallest QuantMethod: weights as they are; it remembers what it was asked."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.num_finished = 0

    def create(
        self, layer: nn.Module, in_features: int, out_features: list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.starts = [sum(out_features[:i]) for i in range(len(out_features) + 1)]
        layer.weight = nn.Parameter(torch.empty(self.starts[-1], in_features, dtype=dtype), requires_grad=False)

    def load_shard(self, layer: nn.Module, weight: Tensor | RawTensor, shard: int) -> None:
        rows = weight.data.view(torch.float32) if isinstance(weight, RawTensor) else weight
        layer.weight[self.starts[shard] : self.starts[shard + 1]].copy_(rows)

    def finish(self, layer: nn.Module) -> None:
        self.num_finished += 1

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layer.weight, bias)

    def fused_gated(self, is_gelu: bool) -> None:
        return None

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        return layer.weight[ids]


def context(prefix: str = "model") -> BuildContext:
    cpu = torch.device("cpu")
    return BuildContext(torch.float32, cpu, PlainMethod, lambda _: None, torch.float32, 64, prefix=prefix)  # type: ignore


def test_a_child_is_named_as_the_checkpoint_names_it() -> None:
    layer = ColumnLinear(context().sub("layers.3").sub("mlp").sub("up_proj"), 8, [4])
    assert layer.method.prefix == "model.layers.3.mlp.up_proj"  # type: ignore
    assert context(prefix="").sub("lm_head").prefix == "lm_head"


def test_parts_and_a_fused_tensor_fill_the_same_storage() -> None:
    weight, bias, x = torch.randn(7, 8), torch.randn(7), torch.randn(3, 8)
    in_parts, fused, raw = (ColumnLinear(context(), 8, [4, 1, 2], bias=True) for _ in range(3))
    assert in_parts.part_shapes() == {"weight": [(4, 8), (1, 8), (2, 8)], "bias": [(4,), (1,), (2,)]}
    for part, (rows, biases) in enumerate(zip(weight.split([4, 1, 2]), bias.split([4, 1, 2]), strict=True)):
        in_parts.load_part("weight", part, rows)
        in_parts.load_part("bias", part, biases)
    for layer in (fused, raw):
        layer.load_whole("bias", bias)
    fused.load_whole("weight", weight)
    raw.load_whole("weight", RawTensor(weight.view(torch.uint8), "F32", (7, 8)))
    for layer in (in_parts, fused, raw):
        layer.finish_load()
        torch.testing.assert_close(layer.forward(x), F.linear(x, weight, bias))
        assert layer.method.num_finished == 1  # type: ignore


def test_a_second_load_keeps_every_address() -> None:
    layers: list[LoadableLayer] = [
        RowLinear(context(), 8, 4, bias=True),
        RMSNorm(context(), 8, 1e-6),
        Embedding(context(), 9, 8),
    ]
    for layer in layers:
        seen = []
        for value in (1.0, 2.0):
            for name, shapes in layer.part_shapes().items():
                layer.load_whole(name, torch.full((sum(s[0] for s in shapes), *shapes[0][1:]), value))
            layer.finish_load()
            seen.append({name: p.data_ptr() for name, p in layer.named_parameters()})
            assert all((p == value).all() for p in layer.parameters())
        assert seen[0] == seen[1]


def test_a_tied_head_multiplies_by_the_embedding() -> None:
    layer = Embedding(context(), 11, 8, multiplier=2.5)
    weight = torch.randn(11, 8)
    layer.load_whole("weight", weight)
    torch.testing.assert_close(layer.forward(torch.tensor([3, 0])), weight[[3, 0]] * 2.5)
    torch.testing.assert_close(layer.project(weight[:2]), weight[:2] @ weight.T)


def test_an_embedding_multiplier_is_rounded_to_the_weights_dtype() -> None:
    cpu = torch.device("cpu")
    ctx = BuildContext(torch.bfloat16, cpu, PlainMethod, lambda _: None, torch.float32, 64)  # type: ignore
    layer = Embedding(ctx, 4, 8, multiplier=640**0.5)  # 25.298 is 25.25 in bf16
    layer.load_whole("weight", torch.ones(4, 8))
    assert layer.forward(torch.tensor([1])).float().unique().tolist() == [25.25]


def test_checkpoint_names_find_their_module_and_part() -> None:
    locate = WeightMap().locate
    assert locate("model.layers.1.self_attn.k_proj.bias") == ("model.layers.1.self_attn.qkv_proj.bias", 1)
    assert locate("model.layers.1.mlp.up_proj.weight") == ("model.layers.1.mlp.gate_up_proj.weight", 1)
    assert locate("model.layers.1.self_attn.qkv_proj.weight") == ("model.layers.1.self_attn.qkv_proj.weight", None)
    assert locate("model.norm.weight") == ("model.norm.weight", None)
    assert locate("model.layers.0.self_attn.rotary_emb.inv_freq") is None


def test_a_gemma_checkpoint_with_vision_gives_its_text_model() -> None:
    locate = Gemma3ForCausalLM.weight_map.locate
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        assert locate(prefix + "layers.2.self_attn.v_proj.weight") == ("model.layers.2.self_attn.qkv_proj.weight", 2)
    assert locate("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight") is None
    assert locate("model.multi_modal_projector.mm_input_projection_weight") is None
