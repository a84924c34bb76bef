# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from files that are not the `tokenizers` library's own: .gguf metadata and SentencePiece models.

Two kinds cover what is served: byte-level BPE, told apart by how text is split before it, and SentencePiece's BPE with
byte fallback. Built from the lists as they are, without going through another library's conversion.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from headrace.engine.detokenizer import BYTE_OF, LETTER_OF
from headrace.errors import ModelLoadError
from headrace.utils.gguf_meta import GgufTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BPE_MODEL = 2
"""SentencePiece's model_type for BPE (1 is unigram)."""

# How text is cut before byte-level BPE, by the name that .gguf files give it; from the models' own tokenizer.json.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3}
SPLITS |= {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
DIGITS_ALONE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Each digit a piece of its own, then GPT-2's rule."""
GPT2 = frozenset({"default", "gpt-2", "gpt2"})
NORMALIZED = frozenset({"qwen2", "deepseek-r1-qwen"})
"""Text is brought into Unicode's form NFC first."""
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
"""A piece that is itself a token is taken whole, whatever the merges say."""


def from_gguf(meta: GgufTokenizer) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer that a .gguf file describes, and its special tokens by name (bos_token, ...).

    Raises:
        ModelLoadError: a kind, or a rule for splitting text, that is not known.
    """
    if meta.model == "gpt2":
        backend = _byte_level(meta)
    elif meta.model == "llama":
        backend = _sentencepiece_from_gguf(meta)
    else:
        raise ModelLoadError(f"The .gguf file's tokenizer is of kind {meta.model!r}; known are 'gpt2' and 'llama'.")
    ids = {
        "bos_token": meta.bos_token_id,
        "eos_token": meta.eos_token_id,
        "unk_token": meta.unk_token_id,
        "pad_token": meta.pad_token_id,
    }
    special = {name: meta.tokens[i] for name, i in ids.items() if i is not None and 0 <= i < len(meta.tokens)}
    add_ends(
        backend,
        special.get("bos_token") if meta.add_bos else None,
        special.get("eos_token") if meta.add_eos else None,
    )
    return backend, special


def add_ends(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let `encode` put these tokens at the ends of a text, in place of what it did before."""
    known = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    if any(token_id is None for _, token_id in known):
        missing = next(token for token, token_id in known if token_id is None)
        raise ModelLoadError(f"The tokenizer is told to add {missing!r} to every prompt and has no such token.")
    pieces = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    backend.post_processor = TemplateProcessing(single=pieces, pair=None, special_tokens=known)


def _byte_level(meta: GgufTokenizer) -> Tokenizer:
    alphabet = BYTE_OF.keys()
    vocab = {}
    for index, token in enumerate(meta.tokens):
        # A few files spell added tokens as text; the others are in the byte alphabet.
        known = token if alphabet >= set(token) else "".join(LETTER_OF[b] for b in token.encode())
        vocab[known if meta.token_types[index] not in (CONTROL, USER_DEFINED) else token] = index
    merges = [_pair(merge) for merge in meta.merges]
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=meta.pre in WHOLE_WORDS_FIRST))
    if meta.pre in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _split(meta.pre)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, meta.tokens, meta.token_types)
    return backend


def _split(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in DIGITS_ALONE:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in GPT2:
        return gpt2
    known = ", ".join(sorted({*SPLITS, *DIGITS_ALONE, *GPT2}))
    raise ModelLoadError(
        f"The .gguf file splits text by the rule {pre!r}, which is not known (known: {known}); "
        "name a Hugging Face folder with the model's tokenizer in `tokenizer`."
    )


def _sentencepiece_from_gguf(meta: GgufTokenizer) -> Tokenizer:
    # Gemma's files spell runs of spaces as spaces; its pieces are in the order of their merges, its scores are not.
    is_gemma = not meta.add_space_prefix
    tokens = ["▁" * len(t) if t and not t.strip(" ") and t != " " else t for t in meta.tokens]
    scores = [-float(i) for i in range(len(tokens))] if is_gemma else meta.scores
    unk = meta.tokens[meta.unk_token_id] if meta.unk_token_id is not None else "<unk>"
    merges = [_pair(merge) for merge in meta.merges] if meta.merges else None
    return build_sentencepiece(tokens, meta.token_types, scores, unk, meta.add_space_prefix, merges)


def build_sentencepiece(
    tokens: Sequence[str],
    token_types: Sequence[int],
    scores: Sequence[float],
    unk_token: str,
    add_space_prefix: bool,
    merges: list[tuple[str, str]] | None = None,
) -> Tokenizer:
    """SentencePiece's BPE with byte fallback as a `tokenizers` tokenizer.

    Args:
        scores: of each piece; the higher, the sooner it is merged.
        add_space_prefix: whether a text gets a space in front, and the decoded text loses it again.
        merges: where they are known; else they follow from pieces and scores.
    """
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(tokens, token_types, scores, vocab) if merges is None else merges,
            unk_token=unk_token if unk_token in vocab else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        # In front of every piece of text, also after a special token, and where the text has a space itself.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", "▁")
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence(parts)
    _add_tokens(backend, tokens, token_types)
    return backend


def _merges(
    tokens: Sequence[str], token_types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, best piece first."""
    found: list[tuple[float, str, str]] = []
    skipped = {CONTROL, UNUSED, BYTE, UNKNOWN}
    for token, kind, score in zip(tokens, token_types, scores, strict=True):
        if len(token) < 2 or kind in skipped:
            continue
        ways = []
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in vocab and token[cut:] in vocab:
                ways.append((left, token[cut:]))
        if len(ways) > 1:
            ways.sort(key=lambda way: (vocab[way[0]], vocab[way[1]]))
        found.extend((-score, left, right) for left, right in ways)
    # A stable sort: among equals the order of the pieces, then of the ways.
    found.sort(key=itemgetter(0))
    return [(left, right) for _, left, right in found]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], token_types: Sequence[int]) -> None:
    """Tokens that are never cut: control ones, which decoding may leave out, and the user's, which it shows."""
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, token_types, strict=True)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens(added)


def from_sentencepiece(path: Path, special_tokens: Mapping[str, str]) -> Tokenizer:
    """The tokenizer in a SentencePiece `tokenizer.model` file.

    Raises:
        ModelLoadError: the file is broken, or of another kind than BPE.
    """
    try:
        model = _read_sentencepiece(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error) as error:
        raise ModelLoadError(f"{path} is not a SentencePiece model: {error}.") from None
    if model.kind != BPE_MODEL:
        raise ModelLoadError(
            f"{path} is a SentencePiece model of kind {model.kind}; only BPE ({BPE_MODEL}) can be read without "
            "tokenizer.json. Save the tokenizer with Transformers' save_pretrained, which writes one."
        )
    unk = next((t for t, kind in zip(model.tokens, model.token_types, strict=True) if kind == UNKNOWN), "<unk>")
    backend = build_sentencepiece(model.tokens, model.token_types, model.scores, unk, model.add_space_prefix)
    bos = special_tokens.get("bos_token", "<s>")
    add_ends(backend, bos if backend.token_to_id(bos) is not None else None, None)
    return backend


@dataclass(slots=True)
class _SentencePiece:
    tokens: list[str]
    token_types: list[int]
    scores: list[float]
    kind: int = 1
    add_space_prefix: bool = True


def _read_sentencepiece(data: bytes) -> _SentencePiece:
    """What encoding needs of a ModelProto: pieces, trainer_spec.model_type, normalizer_spec.add_dummy_prefix."""
    model = _SentencePiece([], [], [])
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            text, score = piece.get(1, b""), piece.get(2, b"\0\0\0\0")
            if not isinstance(text, bytes) or not isinstance(score, bytes):
                raise ValueError("a piece is malformed")
            model.tokens.append(text.decode())
            model.scores.append(struct.unpack("<f", score)[0])
            model.token_types.append(_integer(piece.get(3, NORMAL)))
        elif number == 2 and isinstance(value, bytes):
            model.kind = _integer(dict(_fields(value)).get(3, 1))
        elif number == 3 and isinstance(value, bytes):
            model.add_space_prefix = _integer(dict(_fields(value)).get(3, 1)) != 0
    if not model.tokens:
        raise ValueError("it holds no pieces")
    return model


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a number is expected where there are bytes")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message: (number, integer, or bytes for all other kinds)."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError("it is cut short")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
