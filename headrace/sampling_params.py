# SPDX-License-Identifier: Apache-2.0
"""`SamplingParams`: what a request asks for beyond its prompt."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from headrace.errors import RequestError
from headrace.utils.spelling import nearest

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 100
MAX_LOGIT_BIAS = 1024

# Known fields without an implementation, each with the values that ask for nothing (None always does).
NOT_YET: dict[str, tuple[Any, ...]] = {
    "end_id": (),
    "pad_id": (),
    "bad": ([],),
    "bad_words": ([],),
    "bad_token_ids": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "beam_width_array": (),
    "beam_search_diversity_rate": (0.0,),
    "length_penalty": (0.0, 1.0),
    "early_stopping": (0, 1, False),
    "no_repeat_ngram_size": (0,),
    "prompt_ignore_length": (0,),
    "top_p_min": (),
    "top_p_reset_ids": (),
    "top_p_decay": (1.0,),
    "embedding_bias": (),
    "logits_processor": (),
    "logits_processors": (),
    "apply_batched_logits_processor": (False,),
    "logprobs_mode": ("raw",),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_encoder_output": (False,),
    "return_perf_metrics": (False,),
    "exclude_input_from_output": (True,),
    "additional_model_outputs": ([],),
    "lookahead_config": (),
    "guided_decoding": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
}

# field: lowest, highest, and the range in words. Both ends belong to it.
RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_N, f"from 1 to {MAX_N}"),
    "temperature": (0.0, 1e4, "from 0 (greedy) to 10000"),
    "top_k": (-1, 2**31 - 1, "1 or more, or 0 or -1 for off"),
    "top_p": (0.0, 1.0, "from 0 to 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "seed": (-(2**63), 2**64 - 1, "a 64-bit number"),
    "repetition_penalty": (1e-3, 1e3, "from 0.001 to 1000"),
    "presence_penalty": (-2.0, 2.0, "from -2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "from -2 to 2"),
    "min_tokens": (0, 2**31 - 1, "0 or more"),
    "max_tokens": (1, 2**31 - 1, "from 1 to 2147483647"),
    "logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}"),
    "truncate_prompt_tokens": (1, 2**31 - 1, "1 or more"),
    "priority": (0, 100, "from 0 to 100"),
}


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, set, frozenset)) else value


def _integer_keys(value: Any) -> Any:
    """JSON has no integer keys: `{"42": -100}` means token 42."""
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and k.removeprefix("-").isdecimal() else k: v for k, v in value.items()}


class SamplingParams(BaseModel):
    """Settings of one request. Frozen; a bad value is a `RequestError` whose `param` is the field at fault.

    None for temperature, top_k, top_p, min_p and repetition_penalty means the model's own default
    (generation_config.json), and where it has none, the built-in one of the API in use.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, defer_build=True)

    n: int = 1
    """Answers to one prompt, 1 to 128."""
    best_of: int | None = None
    """For callers that send it: must equal n."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """Draw from the k most probable tokens; 0 or -1 is off."""
    top_p: float | None = None
    """Draw from the most probable tokens that together reach this probability; 1 is off."""
    min_p: float | None = None
    """Draw from tokens with at least this share of the best one's probability; 0 is off."""
    seed: int | None = None
    """Fixes the random numbers, whatever else runs; None: a random seed."""
    repetition_penalty: float | None = None
    """Over 1 makes tokens of the prompt and the output less likely; 1 is off."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it stands in the output, -2 to 2."""
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_integer_keys)] = None
    """Token id -> what is added to its logit, -100 to 100; at most 1,024 tokens."""
    min_tokens: int = 0
    """No end before this many output tokens."""
    max_tokens: int | None = None
    """Most output tokens; None: up to max_seq_len."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    stop: Annotated[str | list[str] | None, BeforeValidator(_as_list)] = None
    """Text that ends the answer: at most 64 strings of 1,000 characters."""
    stop_token_ids: Annotated[list[int] | None, BeforeValidator(_as_list)] = None
    """Token ids that end the answer, at most 128."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""
    logprobs: int | None = None
    """Log-probabilities of each output token and of this many most probable ones, 0 to 100."""
    prompt_logprobs: int | None = None
    """The same for each prompt token."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """For callers that send it: special tokens that are kept stand as the tokenizer has them, whatever this says."""
    detokenize: bool = True
    """False: token ids only, no text; stop strings cannot be used."""
    add_special_tokens: bool = True
    """Let the tokenizer add its special tokens (such as BOS) to a text prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last so many prompt tokens."""
    priority: int = 50
    """0 to 100, larger first; used under the `priority` waiting queue policy."""

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _explain(error) from None

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_built(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # An explicit null means what leaving the field out means.
        data = {name: value for name, value in data.items() if value is not None}
        if data.keys() <= cls.model_fields.keys():
            return data
        for name, value in data.items():
            if name in NOT_YET and value not in NOT_YET[name]:
                raise RequestError(f"{name} = {value!r} is not supported yet; leave it out.", param=name)
        return {name: value for name, value in data.items() if name not in NOT_YET}

    @model_validator(mode="after")
    def _check(self) -> "SamplingParams":
        for name, (lowest, highest, words) in RANGES.items():
            value = self.__dict__[name]
            # Written so that NaN, which no comparison holds for, is refused too.
            if value is not None and not lowest <= value <= highest:
                raise RequestError(f"{name} must be {words}, but is {value}.", param=name)
        if self.best_of is not None and self.best_of != self.n:
            raise RequestError(
                f"best_of ({self.best_of}) must equal n ({self.n}): ask for the n you want.", param="best_of"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not be above max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        if self.stop_strings:
            _check_stop(self.stop_strings, self.detokenize)
        if self.stop_token_ids:
            _check_stop_token_ids(self.stop_token_ids)
        if self.logit_bias:
            _check_logit_bias(self.logit_bias)
        return self

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


def _check_stop(stop: list[str], detokenize: bool) -> None:
    if not detokenize:
        raise RequestError("stop needs detokenize: stop strings are looked for in the text.", param="stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop")
    for text in stop:
        if not text:
            raise RequestError(
                "stop has an empty string, which would end every answer at once; leave it out.", param="stop"
            )
        if len(text) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop has a string of {len(text)} characters; at most {MAX_STOP_CHARACTERS} are allowed.", param="stop"
            )


def _check_stop_token_ids(token_ids: list[int]) -> None:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed.",
            param="stop_token_ids",
        )
    if min(token_ids) < 0:
        raise RequestError(f"stop_token_ids has {min(token_ids)}; token ids are 0 or more.", param="stop_token_ids")


def _check_logit_bias(bias: dict[int, float]) -> None:
    if len(bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(bias)} tokens; at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias"
        )
    for token, value in bias.items():
        if token < 0:
            raise RequestError(f"logit_bias has the token id {token}; token ids are 0 or more.", param="logit_bias")
        if math.isnan(value) or not -100.0 <= value <= 100.0:
            raise RequestError(
                f"logit_bias for token {token} must be from -100 to 100, but is {value}.", param="logit_bias"
            )


WORDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of token ids to numbers",
}


def _explain(error: ValidationError) -> RequestError:
    """One sentence on the first field at fault."""
    details = error.errors(include_url=False)
    first = details[0]
    name = str(first["loc"][0]) if first["loc"] else "sampling_params"
    if first["type"] == "extra_forbidden":
        near = nearest(name, SamplingParams.model_fields)
        hint = f"; the nearest is {near}." if near else "."
        return RequestError(f"Unknown sampling parameter {name}{hint}", param=name)
    wanted = " or ".join(dict.fromkeys(WORDS.get(d["type"], d["msg"]) for d in details if d["loc"][:1] == (name,)))
    value = repr(first["input"])
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return RequestError(f"{name} must be {wanted or 'valid'}, but holds {shown}.", param=name)
