# SPDX-License-Identifier: Apache-2.0
"""From what a user asks to what the core runs: text to ids, every default resolved, everything wrong refused here.

Nothing a client sends may fail later, in the middle of other people's steps.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config.model import ModelConfig
from headrace.core.request import SamplingSpec
from headrace.core.retention import Retention
from headrace.engine.ipc import EngineRequest
from headrace.engine.tokenizer import Tokenizer
from headrace.errors import ContextLengthError, RequestError
from headrace.kv_cache_retention import NAME as RETENTION
from headrace.kv_cache_retention import KvCacheRetentionConfig, shown
from headrace.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids, "prompt": text that outputs show}."""

DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""What generation_config.json may set for requests that do not."""
GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: logits divided by them would overflow."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that is valid and ready to be sent."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    choices: list[EngineRequest]
    """One sequence for each of the n choices; their ids begin with a name of this front end, so they are unique."""


class InputProcessor:
    """Validates and resolves requests against one model. Methods may be called from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        max_seq_len: int,
        tokenizer: Tokenizer | None,
        generation_config: Mapping[str, Any],
        seed: int | None,
        name: str,
        number: int = 0,
    ) -> None:
        """
        Args:
            tokenizer: None: token ids only.
            generation_config: the model's own sampling defaults; empty where they are not wanted.
            seed: of the seeds given to requests that bring none; None: these are random.
            name: of this front end, unique among those of the core.
            number: of this front end, the same after each start, so that two of them do not give the same seeds.
        """
        self._model = model
        self._max_seq_len = max_seq_len
        self._tokenizer = tokenizer
        self.default_sampling = default_sampling(generation_config)
        self._eos_token_ids = list(model.eos_token_ids)
        own_end = None if tokenizer is None else tokenizer.eos_token_id
        if own_end is not None and own_end not in self._eos_token_ids:
            self._eos_token_ids.append(own_end)
        self._random = random.Random() if seed is None else random.Random(f"{seed} {number}")
        self._name = name
        # One step, so that two threads never get the same number.
        self._numbers = itertools.count(1)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        retention: KvCacheRetentionConfig | None = None,
    ) -> PreparedRequest:
        """Check a request and fill in every default.

        Raises:
            RequestError: an empty prompt, ids out of the vocabulary, a setting that cannot work with this model.
            ContextLengthError: prompt, or prompt and max_tokens, over `max_seq_len`.
        """
        text, ids = self._tokenize(prompt, params)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        self._check_prompt(ids)
        self._check_ids("logit_bias", params.logit_bias or ())
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        if params.stop_strings and self._tokenizer is None:
            raise RequestError("stop needs a tokenizer, and skip_tokenizer_init is set.", param="stop")
        spec = self._spec(params, len(ids))
        if priority is not None and not 0 <= priority <= 100:
            raise RequestError(f"priority must be from 0 to 100, but is {priority}.", param="priority")
        resolved_retention = None if retention is None else resolve_retention(retention, len(ids))
        unique = f"{self._name}-{next(self._numbers)}"
        choices = [
            EngineRequest(
                request_id=f"{unique}-{choice}",
                prompt_token_ids=ids,
                sampling=spec(choice),
                priority=params.priority if priority is None else priority,
                cache_salt=cache_salt,
                cache_marks=self._cache_marks(ids),
                retention=resolved_retention,
            )
            for choice in range(params.n)
        ]
        return PreparedRequest(request_id or unique, text, ids, params, choices)

    def _tokenize(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            text, given = prompt.get("prompt"), prompt.get("prompt_token_ids")
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if unknown:
                raise RequestError(
                    f"A prompt given as a dict has 'prompt' or 'prompt_token_ids', and not {min(unknown)!r}.",
                    param="prompt",
                )
            if given is not None:
                return text, self._tokenize(given, params)[1]
            return self._tokenize("" if text is None else text, params)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("A text prompt needs a tokenizer, and skip_tokenizer_init is set.", param="prompt")
            return prompt, self._tokenizer.encode(prompt, params.add_special_tokens)
        if not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise RequestError(f"A prompt is text or a list of token ids, but this one is a {kind}.", param="prompt")
        ids = [i for i in prompt if isinstance(i, int)]
        wrong = next((i for i in prompt if type(i) is not int), None)
        if wrong is not None:
            kind = type(wrong).__name__
            raise RequestError(f"A prompt of token ids holds integers, but this one has a {kind}.", param="prompt")
        return None, ids

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise RequestError("The prompt is empty: it has no tokens.", param="prompt")
        self._check_ids("prompt", (min(ids), max(ids)))
        if len(ids) >= self._max_seq_len:
            raise ContextLengthError(
                f"The prompt has {len(ids)} tokens, and max_seq_len is {self._max_seq_len}: with at least 1 output "
                f"token it may have {self._max_seq_len - 1}.",
                param="prompt",
            )

    def _check_ids(self, name: str, ids: "Sequence[int] | Mapping[int, float]") -> None:
        size = self._model.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise RequestError(
                    f"{name} holds the token id {token_id}; this model's vocabulary goes from 0 to {size - 1}.",
                    param=name,
                )

    def _spec(self, params: SamplingParams, num_prompt_tokens: int) -> "_SpecMaker":
        left = self._max_seq_len - num_prompt_tokens
        if params.max_tokens is not None and params.max_tokens > left:
            raise ContextLengthError(
                f"The prompt has {num_prompt_tokens} tokens and max_tokens asks for {params.max_tokens} more: "
                f"{num_prompt_tokens + params.max_tokens} are over max_seq_len, which is {self._max_seq_len}; "
                f"max_tokens may be {left}.",
                param="max_tokens",
            )
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        return _SpecMaker(
            params=params,
            defaults=self.default_sampling,
            seed=seed % 2**64,
            max_tokens=left if params.max_tokens is None else params.max_tokens,
            eos_token_ids=[] if params.ignore_eos else self._eos_token_ids,
        )

    def _cache_marks(self, ids: list[int]) -> tuple[str, ...]:
        """What besides tokens and salt changes a request's KV."""
        rope = self._model.rope
        # Long RoPE's factors for long prompts hold for a whole request: its blocks differ from a short one's.
        limit = rope.original_max_position_embeddings or self._model.max_position_embeddings
        return ("longrope",) if rope.kind == "longrope" and len(ids) > limit else ()


@dataclass(frozen=True, slots=True)
class _SpecMaker:
    """Makes the specs of a request's choices, which differ in `choice` alone."""

    params: SamplingParams
    defaults: Mapping[str, Any]
    seed: int
    max_tokens: int
    eos_token_ids: list[int]

    def __call__(self, choice: int) -> SamplingSpec:
        params = self.params
        asked = {name: value for name in DEFAULTED if (value := params.__dict__[name]) is not None}
        chosen = {**self.defaults, **asked}
        # TensorRT-LLM's rule: greedy where nobody, neither the request nor the model, asks for anything else.
        is_greedy_by_default = not chosen.keys() & {"top_k", "top_p", "min_p"}
        temperature = float(chosen.get("temperature", 0.0 if is_greedy_by_default else 1.0))
        return SamplingSpec(
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_k=max(0, int(chosen.get("top_k", 0))),
            top_p=float(chosen.get("top_p", 1.0)),
            min_p=float(chosen.get("min_p", 0.0)),
            seed=self.seed,
            choice=choice,
            repetition_penalty=float(chosen.get("repetition_penalty", 1.0)),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias or {},
            min_tokens=params.min_tokens,
            max_tokens=self.max_tokens,
            stop_token_ids=params.stop_token_ids or [],
            eos_token_ids=self.eos_token_ids,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )


def resolve_retention(config: KvCacheRetentionConfig, num_prompt_tokens: int) -> Retention:
    """A prompt's retention in plain numbers.

    Raises:
        RequestError: a range outside the prompt.
    """
    ranges = []
    for each in config.ordered:
        end = num_prompt_tokens if each.token_end is None else each.token_end
        if end > num_prompt_tokens or each.token_start >= end:
            raise RequestError(
                f"{RETENTION} has the range {shown(each)}, and the prompt has {num_prompt_tokens} tokens: token_start "
                f"may be up to {num_prompt_tokens - 1}, token_end up to {num_prompt_tokens} (none: its end).",
                param=RETENTION,
            )
        ranges.append((each.token_start, end, each.priority, each.duration_ms))
    return Retention(ranges, config.decode_retention_priority, config.decode_duration_ms)


def default_sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of a generation_config.json that say something.

    A file with `do_sample: false` and sampling numbers is greedy, as it is to Transformers.
    """
    found = {name: generation_config[name] for name in DEFAULTED if generation_config.get(name) is not None}
    if generation_config.get("do_sample") is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    return found
