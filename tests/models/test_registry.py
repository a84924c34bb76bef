# SPDX-License-Identifier: Apache-2.0
"""The table of models: every entry loads, and an unknown architecture says so."""

import pytest

from headrace.errors import ModelLoadError
from headrace.models.base import CausalLM
from headrace.models.registry import MODELS, find_model


@pytest.mark.parametrize("architecture", MODELS)
def test_every_entry_names_a_model(architecture: str) -> None:
    assert issubclass(find_model(architecture), CausalLM)


def test_an_unknown_architecture_names_the_nearest() -> None:
    with pytest.raises(ModelLoadError, match=r"LLamaForCasualLM.*LlamaForCausalLM"):
        find_model("LLamaForCasualLM")
