# SPDX-License-Identifier: Apache-2.0
"""Streamed text is the text: whatever the tokenizer, whatever the steps, whatever the stop strings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from headrace.engine.detokenizer import LETTER_OF, StopMatcher, TokenTable
from headrace.engine.tokenizer_build import BYTE, CONTROL, NORMAL, UNKNOWN, build_sentencepiece


def byte_level() -> Tokenizer:
    backend = Tokenizer(BPE(vocab={LETTER_OF[byte]: byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<|end|>", special=True), AddedToken("→世", special=False)])
    return backend


def sentencepiece(add_space_prefix: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlo", "▁a", "▁▁", "世"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) - 259)]
    scores = [-float(i) for i in range(len(pieces))]
    return build_sentencepiece(pieces, types, scores, "<unk>", add_space_prefix)


def word_piece() -> Tokenizer:
    backend = Tokenizer(WordPiece(vocab={"[UNK]": 0, "he": 1, "##llo": 2, "world": 3, ",": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return backend


BACKENDS = {
    "byte-level": byte_level(),
    "sentencepiece with prefix": sentencepiece(True),
    "sentencepiece without": sentencepiece(False),
    "word pieces": word_piece(),
}


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_decoding_of_all(name: str, data: st.DataObject) -> None:
    backend = BACKENDS[name]
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=20))
    skips = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    detokenizer = TokenTable(backend).detokenizer(skips)
    edges = [0, *cuts, len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    whole = backend.decode(ids, skip_special_tokens=skips)
    if name.startswith("sentencepiece") and "\ufffd" in whole:
        # A run of byte tokens with a bad byte in it: the library shows none of its characters, a stream has shown some.
        return
    assert "".join([*pieces, detokenizer.flush()]) == whole


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece with prefix", "sentencepiece without"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_no_character_is_shown_in_part(name: str, text: str) -> None:
    backend = BACKENDS[name]
    detokenizer = TokenTable(backend).detokenizer(True)
    pieces = [detokenizer.push([token_id]) for token_id in backend.encode(text, add_special_tokens=False).ids]
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert detokenizer.flush() == ""


def test_a_broken_end_shows_as_one_replacement() -> None:
    detokenizer = TokenTable(BACKENDS["byte-level"]).detokenizer(True)
    assert detokenizer.push([0x61, 0xF0, 0x9F]) == "a"
    assert detokenizer.flush() == "\ufffd"


def test_the_first_space_stays_or_goes_as_the_tokenizer_has_it() -> None:
    for name, expected in (("byte-level", " a"), ("sentencepiece with prefix", "a"), ("sentencepiece without", " a")):
        table = TokenTable(BACKENDS[name])
        ids = [0x20, 0x61] if name == "byte-level" else [BACKENDS[name].token_to_id("▁a")]
        detokenizer = table.detokenizer(True)
        assert "".join(detokenizer.push([i]) for i in ids) == expected, name


def test_a_token_s_bytes_are_its_own() -> None:
    table = TokenTable(BACKENDS["byte-level"])
    assert (table.token_bytes(0xE4), table.token_bytes(257), table.token_bytes(9999)) == (b"\xe4", "→世".encode(), b"")
    table = TokenTable(BACKENDS["sentencepiece with prefix"])
    assert table.token_bytes(3 + 0xE4) == b"\xe4"
    assert table.token_bytes(BACKENDS["sentencepiece with prefix"].token_to_id("▁a")) == b" a"


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_a_stop_string_is_found_wherever_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = None
    seen = 0
    for a, b in pairwise(edges):
        hit = matcher.feed(text[a:b])
        if hit is not None:
            found = (seen + hit[0], hit[1])
            break
        seen += b - a
        # What may be shown holds no beginning of a stop string at its end, and not a character less than that.
        held = max(k for k in range(6) if k == 0 or any(s.startswith(text[:seen][-k:]) for s in stops if k < len(s)))
        assert matcher.num_held == min(held, seen)
    assert found == first_stop(text, stops)


def test_a_stop_string_completed_too_early_is_passed_over() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.feed("xab", is_armed=False) is None
    assert matcher.feed("aab") == (3, "ab")
