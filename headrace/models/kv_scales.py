# SPDX-License-Identifier: Apache-2.0
"""The scales of an fp8 KV cache among a checkpoint's tensors."""

import re

import torch
from torch import Tensor

from headrace.errors import ModelLoadError
from headrace.layers.attention import Attention
from headrace.logger import get_logger
from headrace.models.base import CausalLM
from headrace.quantization.base import RawTensor

logger = get_logger(__name__)

# Under self_attn (compressed-tensors), its k_proj and v_proj (ModelOpt), or a module of its own. `output_scale` of
# k_proj and v_proj, and one scale for both, are what older files have; a query's is of no use here.
NAME = re.compile(
    r"(?P<layer>.+?)\.(?:qkv_proj\.|attn\.)?(?:(?P<kind>[qkv])_scale|kv(?:_cache)?_scale|(?P<out>output_scale))"
)


class KvScales:
    """Takes a load's scales and puts them where the layers read them; a layer that gets none has 1."""

    def __init__(self, model: CausalLM) -> None:
        self._layers = {prefix: module for prefix, module in model.named_modules() if isinstance(module, Attention)}
        self._given: set[tuple[str, int]] = set()
        for layer in self._layers.values():
            if layer.kv_scale is not None:
                layer.kv_scale.fill_(1.0)

    def take(self, name: str, part: int | None, tensor: Tensor | RawTensor, what: str) -> bool:
        """Whether a tensor, by its module's name, is a scale of the KV cache: then it is stored where the cache is fp8.

        part: of qkv_proj that it belongs to. what: the tensor, in a message. Raises ModelLoadError.
        """
        found = NAME.fullmatch(name)
        layer = self._layers.get(found["layer"]) if found else None
        if found is None or layer is None or not isinstance(tensor, Tensor):
            return False
        if found["out"]:
            rows = [] if part is None else [part - 1]
        else:
            rows = {"k": [0], "v": [1], "q": []}.get(found["kind"], [0, 1])
        for row in (row for row in rows if row >= 0):
            self._store(layer, found["layer"], row, tensor, what)
        return True

    def _store(self, layer: Attention, prefix: str, row: int, tensor: Tensor, what: str) -> None:
        scale, num_heads = tensor.to(torch.float32).flatten(), layer.options.num_kv_heads
        if len(scale) not in (1, num_heads):
            raise ModelLoadError(
                f"{what} has shape {list(tensor.shape)}; a KV scale is one number, or one for each of {num_heads} "
                "heads."
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ModelLoadError(f"{what} is {scale.tolist()}; a KV scale is a number above 0.")
        if (prefix, row) in self._given:
            raise ModelLoadError(f"{what} is a KV scale that the checkpoint holds under another name too.")
        self._given.add((prefix, row))
        if layer.kv_scale is not None:
            layer.kv_scale[row] = scale.to(layer.kv_scale.device)

    def finish(self) -> None:
        """Say once which layers have scales of their own."""
        wanted = 2 * sum(layer.kv_scale is not None for layer in self._layers.values())
        if not wanted:
            return
        if len(self._given) < wanted:
            how_many = "no KV scales" if not self._given else f"{len(self._given)} of {wanted} KV scales"
            logger.warning("The checkpoint has %s: other keys and values go into fp8 as they are.", how_many)
        else:
            logger.info("The checkpoint's KV scales are used.")
