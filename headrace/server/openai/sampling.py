# SPDX-License-Identifier: Apache-2.0
"""From a request to `SamplingParams`: the request's value, else the generation_config's, else OpenAI's default."""

from collections.abc import Mapping
from typing import Any

from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.server.openai.protocol.errors import UnsupportedParameterError
from headrace.server.openai.protocol.generation import GenerationRequest

OPENAI_TEMPERATURE = 1.0

SAME_NAME = (
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "priority",
)
"""Fields that `SamplingParams` has under the same name; null leaves them at its default."""


def to_sampling_params(
    request: GenerationRequest,
    defaults: Mapping[str, Any],
    *,
    n: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """
    Args:
        defaults: what the model's generation_config.json sets.
        n: sequences to run, more than the request's own n where it asks for the best of several.
        max_tokens: None is up to `max_seq_len`.

    Raises:
        RequestError: a value that is out of range, with `param` set.
    """
    fields = {name: value for name in SAME_NAME if (value := vars(request)[name]) is not None}
    fields["temperature"] = _first(request.temperature, defaults.get("temperature"), OPENAI_TEMPERATURE)
    if request.logit_bias:
        fields["logit_bias"] = token_bias(request.logit_bias)
    return SamplingParams(n=n, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **fields)


def token_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """`{"50256": -100}` with its keys as the numbers they spell.

    Raises:
        RequestError: a key that is not a token id.
    """
    for key in bias:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10:
            raise RequestError(f"logit_bias has the key '{key[:40]}', which is not a token id.", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def check_stream_options(request: GenerationRequest) -> None:
    """
    Raises:
        RequestError: options of a stream where there is none, or fields that a stream cannot carry.
    """
    if request.stream_options is not None:
        if not request.stream:
            raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
        if request.stream_options.include_obfuscation:
            raise UnsupportedParameterError(
                "'stream_options.include_obfuscation' is not supported by this server.", param="stream_options"
            )
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not available in a stream.", param="prompt_logprobs")
