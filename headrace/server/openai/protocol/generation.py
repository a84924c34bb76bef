# SPDX-License-Identifier: Apache-2.0
"""What chat completions and completions share: request fields, usage, stream options.

Rules of every request model: null is the same as absent; types are strict ("10" is not 10); a field of OpenAI's, vLLM's
or TensorRT-LLM's that cannot be honoured is refused by name; an unknown field is refused as OpenAI does
(`unknown_parameter`, with the nearest name). Ranges are OpenAI's where it states one.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, JsonValue, Tag, ValidationInfo

from headrace.kv_cache_retention import KvCacheRetentionConfig
from headrace.server.openai.protocol.errors import UnsupportedParameterError

MAX_CHOICES = 128
MAX_LOGPROBS = 20


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class ResponseModel(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


def _refuse(value: object, info: ValidationInfo) -> None:
    # An empty list or object, and false, ask for nothing.
    if value is not None and value is not False and value != [] and value != {}:
        raise UnsupportedParameterError(
            f"'{info.field_name}' is not supported by this server yet; leave it out.", param=info.field_name
        )


def _shape(value: object) -> str:
    if not isinstance(value, list):
        return "~one"
    return "~batch" if value and isinstance(value[0], list) else "~ids" if value and _is_id(value[0]) else "~many"


def _is_id(value: object) -> bool:
    return isinstance(value, int | float)


def is_none(value: object) -> bool:
    return value is None


Unsupported = Annotated[Any, AfterValidator(_refuse)]
"""A field of the API that is not built: null passes, anything else is a 400 that says so."""

Hint = JsonValue | None
"""A field that asks for nothing a local server could do otherwise (a label, a hint): accepted."""

TokenId = int
TextOrTexts = Annotated[
    Annotated[str, Tag("~one")] | Annotated[list[str], Tag("~many")],
    Discriminator(lambda value: "~many" if isinstance(value, list) else "~one"),
]
Prompts = Annotated[
    Annotated[str, Tag("~one")]
    | Annotated[list[str], Tag("~many")]
    | Annotated[list[TokenId], Tag("~ids")]
    | Annotated[list[list[TokenId]], Tag("~batch")],
    Discriminator(_shape),
]

Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Count = Annotated[int, Field(ge=0)]


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    """One more chunk before [DONE], without choices, that holds the usage."""
    continuous_usage_stats: bool | None = None
    """vLLM: with `include_usage`, every chunk holds the usage so far."""
    include_obfuscation: bool | None = None
    """OpenAI's padding against traffic analysis; none is ever sent, so false is a no-op and true is refused."""


class GenerationRequest(RequestModel):
    """Fields that mean the same on both routes."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: TextOrTexts | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None

    user: Hint = None
    metadata: Hint = None
    store: Hint = None
    service_tier: Hint = None
    safety_identifier: Hint = None
    prompt_cache_key: Hint = None
    prompt_cache_retention: Hint = None
    prompt_cache_options: Hint = None

    # vLLM's and TensorRT-LLM's own.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    priority: Annotated[int, Field(ge=0, le=100)] | None = None
    request_id: Annotated[str, Field(max_length=128)] | None = None
    """A label of the client's; ids inside are always this server's own, so a repeated one harms nobody."""

    guided_json: Unsupported = None
    guided_regex: Unsupported = None
    guided_choice: Unsupported = None
    guided_grammar: Unsupported = None
    guided_decoding_backend: Unsupported = None
    guided_whitespace_pattern: Unsupported = None
    structured_outputs: Unsupported = None
    structural_tag: Unsupported = None
    logits_processors: Unsupported = None
    use_beam_search: Unsupported = None
    length_penalty: Unsupported = None
    early_stopping: Unsupported = None
    bad_words: Unsupported = None
    allowed_token_ids: Unsupported = None
    lora_request: Unsupported = None
    kv_transfer_params: Unsupported = None
    disaggregated_params: Unsupported = None
    vllm_xargs: Unsupported = None
    moderation: Unsupported = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )


class PromptTokensDetails(ResponseModel):
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""


class Usage(ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length"]


class PromptLogprob(ResponseModel):
    """vLLM's shape: one per candidate of a prompt position, keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str | None
