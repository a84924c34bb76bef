# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities in the shapes of the API: a list of objects (chat), four parallel arrays (completions).

They are the model's own: log-softmax before temperature, penalties and filters.
"""

import codecs
from collections.abc import Sequence

from headrace.engine.tokenizer import Tokenizer
from headrace.outputs import Logprob
from headrace.server.openai.protocol.chat import ChoiceLogprobs, TokenLogprob, TopLogprob
from headrace.server.openai.protocol.completions import CompletionLogprobs
from headrace.server.openai.protocol.generation import PromptLogprob

# JSON has no minus infinity; OpenAI sends this for tokens that cannot occur.
FLOOR = -9999.0

Position = dict[int, Logprob]


def finite(value: float) -> float:
    return value if value > FLOOR else FLOOR


def token_text(data: bytes) -> str:
    """A token as text; `bytes:\\xf0\\x9f` where it is a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def top_candidates(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """The `count` most probable tokens of a position, best first; the sampled one is among them only if it is one."""
    ranked = [(token_id, entry) for token_id, entry in position.items() if entry.rank is None or entry.rank <= count]
    return sorted(ranked, key=lambda item: -item[1].logprob)[:count]


def text_bytes(tokenizer: Tokenizer, token_id: int, skip_special_tokens: bool) -> bytes:
    """What a token adds to the answer's text: nothing, where it is a special token that is left out of it."""
    if skip_special_tokens and tokenizer.is_special(token_id):
        return b""
    return tokenizer.token_bytes(token_id)


def chat_logprobs(
    tokenizer: Tokenizer,
    positions: Sequence[Position],
    token_ids: Sequence[int],
    count: int,
    skip_special_tokens: bool,
) -> ChoiceLogprobs:
    """One entry for each generated token, each decoded on its own."""

    def shown(token_id: int, entry: Logprob) -> TopLogprob:
        data = text_bytes(tokenizer, token_id, skip_special_tokens)
        text = token_text(data) if data else entry.decoded_token or ""
        return TopLogprob(token=text, logprob=finite(entry.logprob), bytes=list(data) or None)

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        chosen = shown(token_id, position[token_id])
        top = [shown(*candidate) for candidate in top_candidates(position, count)]
        content.append(TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top))
    return ChoiceLogprobs(content=content)


class LegacyLogprobs:
    """Builds the arrays of one completions choice, piece by piece; keeps where in the text it is."""

    def __init__(self, tokenizer: Tokenizer, count: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._skip_special = skip_special_tokens
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def skip_text(self, text: str) -> None:
        """The choice's text has grown by something that is no token of the answer: the echoed prompt."""
        self._offset += len(text)

    def build(self, token_ids: Sequence[int], positions: Sequence[Position | None]) -> CompletionLogprobs:
        """A position that is None has nothing before it and so no probability."""
        tokens, values, tops, offsets = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = position[token_id] if position is not None else None
            data = text_bytes(self._tokenizer, token_id, self._skip_special)
            tokens.append(token_text(data))
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(data))
            values.append(None if entry is None else finite(entry.logprob))
            tops.append(None if position is None else self._top(position))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=values,
            top_logprobs=tops if self._count else None,
            text_offset=offsets,
        )

    def _top(self, position: Position) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, entry in top_candidates(position, self._count):
            # Two ids may have one text; the first is the more probable.
            text = token_text(self._tokenizer.token_bytes(token_id)) or entry.decoded_token or ""
            top.setdefault(text, finite(entry.logprob))
        return top


def join_logprobs(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """The arrays of both, one after the other."""
    if first is None or second is None:
        return first or second
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[int, PromptLogprob] | None]:
    """vLLM's `prompt_logprobs`: for each prompt token, its candidates by id."""
    return [
        None
        if position is None
        else {
            token_id: PromptLogprob(logprob=finite(e.logprob), rank=e.rank, decoded_token=e.decoded_token)
            for token_id, e in position.items()
        }
        for position in positions
    ]
