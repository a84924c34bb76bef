# SPDX-License-Identifier: Apache-2.0
"""Every bad sampling value is a RequestError that names its field; every usual spelling is taken."""

import math

import pytest

from headrace.errors import RequestError
from headrace.sampling_params import NOT_YET, SamplingParams

BAD = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"top_p": math.nan},
    {"top_p": 1.1},
    {"top_p": -0.1},
    {"min_p": 2.0},
    {"top_k": -2},
    {"top_k": 1.5},
    {"n": 0},
    {"n": 129},
    {"n": True},
    {"best_of": 2},
    {"seed": 2**64},
    {"seed": -(2**63) - 1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.nan},
    {"presence_penalty": 2.5},
    {"frequency_penalty": -2.5},
    {"max_tokens": -1},
    {"max_tokens": 0},
    {"max_tokens": 2**40},
    {"max_tokens": "5"},
    {"min_tokens": -1},
    {"min_tokens": 5, "max_tokens": 3},
    {"stop": ["a"] * 10_000},
    {"stop": "x" * 1001},
    {"stop": ""},
    {"stop": ["a", ""]},
    {"stop": [1]},
    {"stop": "a", "detokenize": False},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": list(range(129))},
    {"stop_token_ids": "5"},
    {"logit_bias": {"5": 100.5}},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {"-1": 1.0}},
    {"logit_bias": {"cat": 1.0}},
    {"logit_bias": {str(i): 1.0 for i in range(1025)}},
    {"logprobs": -1},
    {"logprobs": 101},
    {"prompt_logprobs": 10**6},
    {"truncate_prompt_tokens": 0},
    {"priority": 101},
    {"temprature": 1.0},
    {"use_beam_search": True},
    {"guided_decoding": {"json": "{}"}},
]


@pytest.mark.parametrize("settings", BAD, ids=lambda s: str(s)[:40])
def test_a_bad_value_is_one_short_sentence_about_its_field(settings: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    assert caught.value.param in settings
    assert caught.value.param in caught.value.message
    assert "\n" not in caught.value.message and len(caught.value.message) < 200
    assert caught.value.status == 400


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="the nearest is temperature"):
        SamplingParams(temprature=1.0)


def test_the_edges_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=0.0, top_k=-1, min_p=1, n=128, best_of=128, seed=2**64 - 1, max_tokens=1)
    SamplingParams(
        temperature=1e-9, top_p=1, top_k=0, seed=-(2**63), logprobs=0, priority=0, min_tokens=3, max_tokens=3
    )


def test_json_keys_and_tuples_are_read() -> None:
    params = SamplingParams(logit_bias={"42": -100, 7: 1}, stop=("a", "b"), stop_token_ids=(1, 2))
    assert params.logit_bias == {42: -100.0, 7: 1.0}
    assert params.stop_strings == ["a", "b"]
    assert params.stop_token_ids == [1, 2]
    assert SamplingParams(stop="a").stop_strings == ["a"]
    assert SamplingParams().stop_strings == []


def test_null_means_left_out() -> None:
    assert SamplingParams(**dict.fromkeys(SamplingParams.model_fields)) == SamplingParams()
    assert SamplingParams(**dict.fromkeys(NOT_YET)) == SamplingParams()


def test_a_value_that_asks_for_nothing_is_taken_though_not_built() -> None:
    assert SamplingParams(use_beam_search=False, length_penalty=1.0, bad=[], temperature=0.5).temperature == 0.5
