# SPDX-License-Identifier: Apache-2.0
"""Tokens to text as they arrive: no character is shown before all its bytes are there, no stop string ever.

The pieces of a stream add up to the decoding of all its tokens, however they fall into steps.
"""

import codecs
import json
from collections.abc import Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "�"


class Detokenizer(Protocol):
    """One stream's decoder."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        ...

    def flush(self) -> str:
        """The end of the stream: what was held back, U+FFFD for an unfinished character."""
        ...


class TokenTable:
    """The bytes of each token, where the tokenizer's decoder works token by token; filled as tokens are met.

    Byte-level BPE writes each byte as a letter of its own; SentencePiece writes a space as U+2581 and a byte without a
    token as <0x00>. Any other decoder is run on a window of tokens.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        kinds = _kinds(_part(backend.decoder))
        self._is_byte_level = kinds == ["ByteLevel"]
        self._is_sentencepiece = kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"])
        self._strips = self._is_sentencepiece and kinds[3:] == ["Strip"]
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; empty where the id has none."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            known = self._bytes[token_id] = b"" if token is None else self._spell(token_id, token)
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether decoding may leave this token out."""
        return token_id in self._special

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A decoder for one stream."""
        if self._is_byte_level or self._is_sentencepiece:
            return _ByTable(self, self._special if skip_special_tokens else frozenset(), self._strips)
        return _ByWindow(self._backend, skip_special_tokens)

    def _spell(self, token_id: int, token: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(BYTE_OF[letter] for letter in token)
            except KeyError:
                return token.encode()
        if self._is_sentencepiece:
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                try:
                    return bytes([int(token[3:5], 16)])
                except ValueError:
                    return token.encode()
            return token.replace("▁", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


class _ByTable:
    """Decodes by each token's bytes: a lookup a token."""

    def __init__(self, table: TokenTable, skipped: frozenset[int], strips: bool) -> None:
        self._table = table
        self._skipped = skipped
        self._strips = strips
        """Whether the first character, if a space, is left out."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of, skipped = self._table.token_bytes, self._skipped
        data = b"".join([bytes_of(i) for i in token_ids if i not in skipped])
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", True))

    def _stripped(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class _ByWindow:
    """Decodes the last few tokens together, twice: with and without what is new, for the difference."""

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        """Tokens of the last piece given out, then those not yet given out."""
        self._num_old = 0

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push(i) for i in token_ids])

    def _push(self, token_id: int) -> str:
        if self._backend.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        new = self._new()
        return "" if not new or new.endswith(REPLACEMENT) else self._give(new)

    def flush(self) -> str:
        return self._give(self._new())

    def _new(self) -> str:
        old = self._backend.decode(self._ids[: self._num_old], skip_special_tokens=self._skip)
        return self._backend.decode(self._ids, skip_special_tokens=self._skip)[len(old) :]

    def _give(self, text: str) -> str:
        self._ids = self._ids[self._num_old :]
        self._num_old = len(self._ids)
        return text


class StopMatcher:
    """Finds the first of several strings to be completed in a text that comes in pieces.

    One pass over the text, whatever the pieces: for each string it keeps how much of it the text ends with.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, _failure_links(string)) for string in dict.fromkeys(strings)]
        self._matched = [0] * len(self._strings)

    @property
    def num_held(self) -> int:
        """Characters at the end of the text that may be the beginning of a string."""
        return max(self._matched, default=0)

    def feed(self, text: str, is_armed: bool = True) -> tuple[int, str] | None:
        """Go on with `text`.

        Args:
            is_armed: False: a string completed here is passed over.

        Returns:
            How many of these characters come before the end of the first string completed, and that string (the
            longest, where several end there); None where there is none.
        """
        for position, letter in enumerate(text, 1):
            completed = ""
            for index, (string, links) in enumerate(self._strings):
                count = self._matched[index]
                while count and string[count] != letter:
                    count = links[count - 1]
                if string[count] == letter:
                    count += 1
                if count == len(string):
                    completed = max(completed, string, key=len)
                    count = links[count - 1]
                self._matched[index] = count
            if completed and is_armed:
                return position, completed
        return None


def _failure_links(string: str) -> list[int]:
    """For each prefix, the length of the longest shorter prefix that it ends with."""
    links = [0] * len(string)
    count = 0
    for position in range(1, len(string)):
        while count and string[position] != string[count]:
            count = links[count - 1]
        if string[position] == string[count]:
            count += 1
        links[position] = count
    return links


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_letters()
LETTER_OF = {byte: letter for letter, byte in BYTE_OF.items()}


def _part(component: Any) -> dict[str, Any]:
    """A component of a tokenizer as the JSON it is stored as; empty for None."""
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _kinds(decoder: dict[str, Any]) -> list[str]:
    inner = decoder.get("decoders")
    if inner is not None:
        return [kind for part in inner for kind in _kinds(part)]
    if decoder.get("type") == "Strip" and (decoder["content"], decoder["start"], decoder["stop"]) != (" ", 1, 0):
        return ["Strip other"]
    if decoder.get("type") == "Replace" and decoder["pattern"] != {"String": "▁"}:
        return ["Replace other"]
    return [decoder.get("type", "none")]
