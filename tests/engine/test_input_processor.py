# SPDX-License-Identifier: Apache-2.0
"""What a request resolves to, and what is refused before the core sees it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import CONFIG, EOS

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.core.retention import Retention
from headrace.engine.input_processor import InputProcessor, default_sampling
from headrace.engine.tokenizer import Tokenizer, load_tokenizer
from headrace.errors import ContextLengthError, RequestError
from headrace.kv_cache_retention import KvCacheRetentionConfig
from headrace.sampling_params import SamplingParams
from headrace.utils.hub import ModelSource

Make = Callable[..., InputProcessor]


@pytest.fixture
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(ModelSource("hf", model_folder, "m", "m"), LlmArgs(model="m"))


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def processor(generation_config: dict[str, Any] | None = None, with_tokenizer: bool = True, **model: Any) -> Any:
        config = ModelConfig.from_hf({**CONFIG, **model})
        return InputProcessor(config, 256, tokenizer if with_tokenizer else None, generation_config or {}, 0, "fe")

    return processor


def spec(processor: InputProcessor, **params: Any) -> Any:
    return processor.prepare("abc", SamplingParams(**params)).choices[0].sampling


def test_what_nobody_asks_for_is_greedy_and_as_long_as_fits(make: Make) -> None:
    resolved = spec(make())
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.min_p) == (0.0, 0, 1.0, 0.0)
    assert resolved.max_tokens == 253 and resolved.eos_token_ids == [EOS]
    assert spec(make(), top_p=0.9).temperature == 1.0


def test_request_over_model_file_over_built_in(make: Make) -> None:
    processor = make({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "do_sample": True})
    assert processor.default_sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    resolved = spec(processor, top_k=-1)
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.max_tokens) == (0.6, 0, 0.95, 253)
    assert spec(processor, temperature=0.0).temperature == 0.0
    assert default_sampling({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}


def test_a_tiny_temperature_is_greedy(make: Make) -> None:
    assert spec(make(), temperature=1e-12).temperature == 0.0
    assert spec(make(), temperature=0.01).temperature == 0.01


def test_every_end_token_ends_and_ignore_eos_ignores_all(make: Make) -> None:
    assert spec(make(eos_token_id=[2, 7])).eos_token_ids == [2, 7, EOS], "the model's, then the tokenizer's"
    assert spec(make(eos_token_id=[2, 7]), ignore_eos=True).eos_token_ids == []


def test_seeds_are_drawn_for_requests_without_one(make: Make) -> None:
    processor = make()
    seeds = [spec(processor).seed for _ in range(20)]
    assert len(set(seeds)) == 20
    assert spec(processor, seed=7).seed == 7


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [((3, 0), (3, 0), True), ((3, 0), (3, 1), False), ((3, 0), (4, 0), False), ((None, 0), (None, 0), False)],
)
def test_the_engines_seed_fixes_them_for_each_front_end(
    one: tuple[int | None, int], other: tuple[int | None, int], same: bool
) -> None:
    def drawn(seed: int | None, number: int) -> list[int]:
        processor = InputProcessor(ModelConfig.from_hf(CONFIG), 256, None, {}, seed, "fe", number)
        prepared = [processor.prepare([1], SamplingParams()) for _ in range(5)]
        return [p.choices[0].sampling.seed for p in prepared]

    assert (drawn(*one) == drawn(*other)) == same


def test_choices_share_a_seed_and_differ_in_number_and_id(make: Make) -> None:
    prepared = make().prepare("abc", SamplingParams(n=3, seed=5))
    assert [(c.sampling.seed, c.sampling.choice) for c in prepared.choices] == [(5, 0), (5, 1), (5, 2)]
    assert len({c.request_id for c in prepared.choices}) == 3


def test_ids_are_unique_whatever_the_client_calls_them(make: Make) -> None:
    processor = make()
    ids = {processor.prepare("a", SamplingParams(), request_id="same").choices[0].request_id for _ in range(5)}
    assert len(ids) == 5


def test_the_context_length_error_names_limit_and_counts(make: Make) -> None:
    processor = make()
    assert len(processor.prepare("x" * 255, SamplingParams()).prompt_token_ids) == 255
    with pytest.raises(ContextLengthError, match=r"256 tokens.*max_seq_len is 256.*255"):
        processor.prepare("x" * 256, SamplingParams())
    processor.prepare("x" * 200, SamplingParams(max_tokens=56))
    with pytest.raises(ContextLengthError, match=r"200 tokens.*57 more: 257.*256; max_tokens may be 56"):
        processor.prepare("x" * 200, SamplingParams(max_tokens=57))


def test_ids_up_to_the_model_s_vocabulary_are_good(make: Make) -> None:
    processor = make()
    assert processor.prepare([299], SamplingParams()).prompt_token_ids == [299], "the tokenizer ends at 258"
    for bad in ([300], [-1], [1, 2**40]):
        with pytest.raises(RequestError, match=r"vocabulary goes from 0 to 299"):
            processor.prepare(bad, SamplingParams())
    with pytest.raises(RequestError, match="logit_bias holds the token id 300"):
        processor.prepare("a", SamplingParams(logit_bias={300: 1.0}))


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {}, {"prompt_token_ids": []}])
def test_an_empty_prompt_is_refused(make: Make, prompt: Any) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        make().prepare(prompt, SamplingParams())
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 3, [1, "a"], [True], [1.0], {"text": "a"}, "half \ud83d"])
def test_what_is_no_prompt_is_refused(make: Make, prompt: Any) -> None:
    with pytest.raises(RequestError):
        make().prepare(prompt, SamplingParams())


def test_a_prompt_of_ids_may_bring_its_text(make: Make) -> None:
    prepared = make().prepare({"prompt_token_ids": [97], "prompt": "shown"}, SamplingParams())
    assert (prepared.prompt, prepared.prompt_token_ids) == ("shown", [97])


def test_truncation_keeps_the_end_where_it_is_asked_for(make: Make) -> None:
    prepared = make().prepare("x" * 400 + "abc", SamplingParams(truncate_prompt_tokens=3))
    assert prepared.prompt_token_ids == [97, 98, 99]


def test_without_a_tokenizer_ids_work_and_text_does_not(make: Make) -> None:
    processor = make(with_tokenizer=False)
    assert processor.prepare([1, 2], SamplingParams()).prompt_token_ids == [1, 2]
    for prompt, params in (("text", {}), ([1], {"stop": "x"})):
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            processor.prepare(prompt, SamplingParams(**params))


def test_long_rope_keeps_long_prompts_apart_in_the_cache(make: Make) -> None:
    factors = [1.0] * 4
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    processor = make(rope_scaling=rope, original_max_position_embeddings=16)
    assert processor.prepare("x" * 16, SamplingParams()).choices[0].cache_marks == ()
    assert processor.prepare("x" * 17, SamplingParams()).choices[0].cache_marks == ("longrope",)


def retention_of(processor: InputProcessor, *ranges: Any, **fields: Any) -> Any:
    """Of a prompt of six tokens."""
    config = KvCacheRetentionConfig([{"priority": 80, **each} for each in ranges], **fields)
    prepared = processor.prepare([1, 2, 3, 4, 5, 6], SamplingParams(n=2), retention=config)
    first, second = (choice.retention for choice in prepared.choices)
    assert first == second
    return first


def test_retention_is_plain_numbers_in_the_order_of_the_prompt(make: Make) -> None:
    open_end, first = {"token_start": 4, "duration_ms": 9}, {"token_start": 0, "token_end": 4, "priority": 7}
    found = retention_of(make(), open_end, first, decode_retention_priority=3, decode_duration_ms=8)
    assert found == Retention([(0, 4, 7, None), (4, 6, 80, 9)], 3, 8)
    assert retention_of(make(), {"token_start": 0, "token_end": 6}).ranges == [(0, 6, 80, None)]
    assert make().prepare("abc", SamplingParams()).choices[0].retention is None


@pytest.mark.parametrize(
    ("outside", "words"),
    [
        ({"token_start": 0, "token_end": 7}, "the range 0 to 7, and the prompt has 6 tokens"),
        ({"token_start": 6}, "the range 6 to the end, and the prompt has 6 tokens: token_start may be up to 5"),
        ({"token_start": 2**60}, "and the prompt has 6 tokens"),
    ],
)
def test_a_range_outside_the_prompt_is_refused(make: Make, outside: dict[str, int], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        retention_of(make(), outside)
    assert caught.value.param == "kv_cache_retention_config"
