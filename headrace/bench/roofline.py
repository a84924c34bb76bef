# SPDX-License-Identifier: Apache-2.0
"""The least time that the hardware could take: bytes over bandwidth or operations over the matrix rate, by phase.

A product of M rows with a weight of K x N takes the longer of reading the weight and of its 2MKN operations; products
run one after another, and attention after them. That is what an engine of one kernel after another can reach: going
past it takes overlap inside kernels. Activations are left out: they mostly stay in the caches.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.config.dtype import BYTES, kv_head_bytes
from headrace.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the hardware was measured to do."""

    read_bytes_per_s: float
    matrix_flops: dict[str, float]
    """Sustained multiply-adds as two operations per second, by dtype: float32, bfloat16, float16, fp8."""
    attention_flops: float | None = None
    """The same of causal attention over a long prompt; None: that of a product."""
    clock_mhz: Mapping[str, float] = field(default_factory=dict)
    """The clock at which each rate was sustained, by dtype, and "attention"; empty where it is not known."""
    burst_flops: Mapping[str, float] = field(default_factory=dict)
    """Rates of the first moment, by dtype: the most there is at any clock."""

    def at_clock(self, mhz: float) -> "Ceilings":
        """The ceilings of a run that saw this clock on average: operations follow it, the memory's bandwidth does not.

        A card that is held by its power runs products at a lower clock than anything else, and how low depends on the
        card and its cooling: without this a share would hold the weather of two different moments.
        """

        def scaled(name: str, rate: float) -> float:
            known = self.clock_mhz.get(name)
            return rate if not known else min(rate * mhz / known, max(rate, self.burst_flops.get(name, math.inf)))

        rates = {dtype: scaled(dtype, rate) for dtype, rate in self.matrix_flops.items()}
        attention = None if self.attention_flops is None else scaled("attention", self.attention_flops)
        return replace(self, matrix_flops=rates, attention_flops=attention)

    def rate(self, dtype: str) -> float:
        """Operations per second of a product in `dtype`; that of the nearest known dtype where it was not measured."""
        for name in (dtype, "bfloat16", "float16", "float32"):
            if self.matrix_flops.get(name):
                return self.matrix_flops[name]
        return max(self.matrix_flops.values())


@dataclass(frozen=True, slots=True)
class Product:
    """A weight of K x N that every token is multiplied with, in `count` layers."""

    k: int
    n: int
    count: int
    bytes_per_weight: float
    dtype: str
    """In which it is multiplied."""

    @property
    def num_bytes(self) -> float:
        return self.k * self.n * self.count * self.bytes_per_weight

    def flops(self, num_rows: float) -> float:
        """Operations for `num_rows` tokens."""
        return 2.0 * num_rows * self.k * self.n * self.count


@dataclass(frozen=True, slots=True)
class Phase:
    """The least time of one phase, and what sets it."""

    seconds: float
    bytes_read: float
    flops: float
    bound: str
    """bytes or operations: what takes most of the time."""


@dataclass(frozen=True)
class Shape:
    """What a step of a model reads and computes. Dense models; one GPU."""

    body: tuple[Product, ...]
    head: Product
    layer_windows: tuple[int | None, ...]
    """Per layer: keys that a query sees; None: all."""
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: float
    """Of one number in the KV cache, on average."""
    dtype: str
    """Of activations."""

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        dtype: str,
        kv_dtype: str,
        bytes_per_weight: float | None = None,
        matrix_dtype: str | None = None,
        head_bytes_per_weight: float | None = None,
    ) -> "Shape":
        """
        Args:
            bytes_per_weight: as stored; None: the dtype's.
            matrix_dtype: in which the body is multiplied; None: `dtype`.
            head_bytes_per_weight: None: that of the others where it was given, for packed files pack it too.
        """
        stored = BYTES[dtype] if bytes_per_weight is None else bytes_per_weight
        layers, width = model.num_layers, model.hidden_size
        q, kv = model.num_q_heads * model.head_dim, model.num_kv_heads * model.head_dim
        inner = model.intermediate_size
        sizes = [(width, q + 2 * kv), (q, width), (width, 2 * inner), (inner, width)]
        body = tuple(Product(k, n, layers, stored, matrix_dtype or dtype) for k, n in sizes)
        head_stored = stored if head_bytes_per_weight is None else head_bytes_per_weight
        return cls(
            body=body,
            head=Product(width, model.vocab_size, 1, head_stored, dtype),
            layer_windows=model.layer_windows or (None,) * layers,
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            kv_bytes=kv_head_bytes(kv_dtype, model.head_dim) / model.head_dim,
            dtype=dtype,
        )

    @property
    def weight_bytes(self) -> float:
        """What a decode step reads of weights: the body and the head, once."""
        return sum(product.num_bytes for product in (*self.body, self.head))

    def decode(self, ceilings: Ceilings, batch: float, context: float) -> Phase:
        """One step of `batch` sequences, each with `context` tokens in the cache."""
        tally = _Tally(ceilings)
        for product in (*self.body, self.head):
            tally.product(product, batch)
        seen = self._seen(context)
        kv_bytes = batch * seen * 2 * self.num_kv_heads * self.head_dim * self.kv_bytes
        tally.add(kv_bytes, 4.0 * batch * seen * self.num_q_heads * self.head_dim, ceilings.rate(self.dtype))
        return tally.phase()

    def prefill(self, ceilings: Ceilings, num_new: float, num_cached: float = 0.0) -> Phase:
        """One prompt of `num_new` tokens after `num_cached` that need no computing, and its first output token."""
        tally = _Tally(ceilings)
        for product in self.body:
            tally.product(product, num_new)
        tally.product(self.head, 1)
        pairs = self._pairs(num_new, num_cached)
        kv_bytes = self._seen(num_cached) * 2 * self.num_kv_heads * self.head_dim * self.kv_bytes
        rate = ceilings.attention_flops or ceilings.rate(self.dtype)
        tally.add(kv_bytes, 4.0 * pairs * self.num_q_heads * self.head_dim, rate)
        return tally.phase()

    def closed_loop(
        self, ceilings: Ceilings, concurrency: float, input_len: float, output_len: float, num_cached: float = 0.0
    ) -> float:
        """Output tokens per second of `concurrency` users, one phase after the other: prefills, then decode steps."""
        prefill = self.prefill(ceilings, max(input_len - num_cached, 1.0), num_cached).seconds
        step = self.decode(ceilings, concurrency, input_len + output_len / 2).seconds
        return concurrency * output_len / (concurrency * prefill + output_len * step)

    def _seen(self, context: float) -> float:
        """Keys that the query of the next token sees, summed over the layers."""
        return sum(context if window is None else min(context, window) for window in self.layer_windows)

    def _pairs(self, num_new: float, num_cached: float) -> float:
        """(query, key) pairs of a causal prompt, summed over the layers: token i sees min(i, window) keys."""
        end = num_cached + num_new
        total = 0.0
        for window in self.layer_windows:
            total += _triangle(end, window) - _triangle(num_cached, window)
        return total


class _Tally:
    """Sums of one phase."""

    def __init__(self, ceilings: Ceilings) -> None:
        self._ceilings = ceilings
        self._seconds = self._bytes = self._flops = self._bytes_s = 0.0

    def product(self, product: Product, num_rows: float) -> None:
        self.add(product.num_bytes, product.flops(num_rows), self._ceilings.rate(product.dtype))

    def add(self, num_bytes: float, flops: float, rate: float) -> None:
        reading, computing = num_bytes / self._ceilings.read_bytes_per_s, flops / rate
        self._seconds += max(reading, computing)
        self._bytes_s += reading if reading >= computing else 0.0
        self._bytes += num_bytes
        self._flops += flops

    def phase(self) -> Phase:
        bound = "bytes" if self._bytes_s * 2 >= self._seconds else "operations"
        return Phase(self._seconds, self._bytes, self._flops, bound)


def _triangle(length: float, window: int | None) -> float:
    """Pairs of the first `length` tokens of a sequence."""
    if window is None or length <= window:
        return length * length / 2
    return window * window / 2 + (length - window) * window
