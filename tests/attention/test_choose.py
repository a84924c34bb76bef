# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a need, and what is said when none does."""

import importlib.util
from dataclasses import replace

import pytest

from headrace.attention.base import CAPABILITIES, AttentionNeed
from headrace.attention.choose import BACKENDS, BackendChooser, choose_backend, refusals
from headrace.errors import ConfigError
from headrace.kernels.op import bind

NEED = AttentionNeed(num_q_heads=8, num_kv_heads=2, head_dim=64, scale=0.125, kv_dtype="float32")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_auto_takes_vanilla_on_the_cpu() -> None:
    assert choose_backend(NEED, "cpu").name == "VANILLA"


@needs_triton
def test_auto_takes_triton_on_a_gpu() -> None:
    assert choose_backend(NEED, "cuda").name == "TRITON"


@needs_triton
def test_auto_passes_over_what_cannot_serve() -> None:
    assert choose_backend(replace(NEED, head_dim=512), "cuda").name == "VANILLA"


def test_a_named_backend_that_cannot_serve_gives_every_reason() -> None:
    need = replace(NEED, head_dim=512, kv_dtype="fp4")
    with pytest.raises(ConfigError) as raised:
        choose_backend(need, "cpu", "TRITON")
    for reason in ("TRITON: runs on cuda, not on cpu", "head_dim 512 is over 256", "kv_cache_config.dtype fp4"):
        assert reason in raised.value.message


def test_auto_that_finds_none_names_each_backend() -> None:
    with pytest.raises(ConfigError, match=r"TRITON: .*VANILLA: .*7 query heads"):
        choose_backend(replace(NEED, num_q_heads=7), "cuda")


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="attn_backend FLASH is unknown"):
        choose_backend(NEED, "cuda", "FLASH")


@needs_triton
def test_an_old_gpu_is_served_by_what_can_and_a_named_backend_says_what_it_needs() -> None:
    assert BackendChooser("cuda", "AUTO", (8, 0))(NEED).name == "TRITON"
    assert BackendChooser("cuda", "AUTO", (7, 5))(NEED).name == "VANILLA"
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.0, this GPU has 7\.5\): use AUTO\."):
        BackendChooser("cuda", "TRITON", (7, 5))(NEED)


def test_a_missing_package_is_passed_over_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "TRITON", ("no_such_package", BACKENDS["TRITON"][1]))
    chooser = BackendChooser("cuda")
    assert chooser(NEED).name == "VANILLA"
    assert chooser.describe() == "VANILLA (TRITON: the package no_such_package is not installed)"


@needs_triton
def test_a_models_choices_are_described_once_each_with_every_refusal() -> None:
    chooser = BackendChooser("cuda", compute_capability=(9, 0))
    chooser(NEED)
    assert chooser.describe() == "TRITON"
    assert not chooser.reads_unused_slots
    for window in (None, 100, None):
        chooser(replace(NEED, head_dim=512, window=window))
    assert chooser.chosen == ("TRITON", "VANILLA")
    assert chooser.describe() == "TRITON, VANILLA (TRITON: head_dim 512 is over 256)"
    assert chooser.reads_unused_slots


def test_a_window_and_a_softcap_are_refused_only_by_who_lacks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(CAPABILITIES["VANILLA"], window=False, softcap=False)
    monkeypatch.setitem(CAPABILITIES, "VANILLA", lacking)
    assert refusals("VANILLA", NEED, "cpu") == []
    need = replace(NEED, window=10, softcap=5.0)
    assert refusals("VANILLA", need, "cpu") == ["no logit softcap", "no sliding window"]


@needs_triton
def test_the_table_of_backends_is_the_backends() -> None:
    assert list(BACKENDS) == list(CAPABILITIES)
    for name, (_, target) in BACKENDS.items():
        backend = bind(target)
        assert backend.name == name
        assert backend.capability is CAPABILITIES[name]
