# SPDX-License-Identifier: Apache-2.0
"""Text to token ids and back, on the `tokenizers` library alone: no torch, and loaded in a fraction of a second."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headrace.config.checkpoint import read_json
from headrace.config.llm_args import LlmArgs
from headrace.engine.chat_template import ChatTemplate
from headrace.engine.detokenizer import Detokenizer, TokenTable
from headrace.engine.tokenizer_build import add_ends, from_gguf, from_sentencepiece
from headrace.errors import ContextLengthError, ModelLoadError, RequestError
from headrace.utils.gguf_meta import read_gguf_meta
from headrace.utils.hub import ModelSource, resolve_model

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
NO_TEMPLATE = (
    "This model has no chat template; send a plain prompt (completions), or start with chat_template set to a file."
)


class Tokenizer:
    """A model's tokenizer and chat template. Methods may be called from any thread."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            special_tokens: bos_token, eos_token, ... -> the token's text.
            templates: chat templates by name; empty: none.
        """
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self._table = TokenTable(backend)
        self._template = ChatTemplate(templates, self.special_tokens) if templates else None
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self._max_text_len: int | None = None
        self._max_seq_len = 0

    def limit_text(self, max_seq_len: int) -> None:
        """From now on refuse texts that must have over `max_seq_len` tokens before the work of tokenizing them.

        No token stands for more characters than the longest one.
        """
        longest = max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)
        self._max_seq_len, self._max_text_len = max_seq_len, longest * max_seq_len

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included. The model may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None where the model has none."""
        return None if self._template is None else self._template.source

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A text that already starts with the BOS token's text gets it once.

        Special tokens that the text spells out become those tokens.

        Raises:
            RequestError: what Python takes for a string and Unicode does not (half a surrogate pair).
            ContextLengthError: a text far too long for the model; see `limit_text`.
        """
        if self._max_text_len is not None and len(text) > self._max_text_len:
            raise ContextLengthError(
                f"The text has {len(text)} characters, which are more than {self._max_seq_len} tokens (max_seq_len) "
                f"can hold; shorten it to {self._max_text_len} characters at most.",
                param="prompt",
            )
        try:
            ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise RequestError("The text holds half of a surrogate pair, which is no character.") from None
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids: what a stream of them adds up to. Ids without a token are left out."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one stream of tokens."""
        return self._table.detokenizer(skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (part of a character, maybe); empty where it has no text."""
        return self._table.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a marker (such as the end of a turn) and not text."""
        return self._table.is_special(token_id)

    def token_text(self, token_id: int) -> str:
        """One token on its own, as log-probabilities show it; U+FFFD for a part of a character."""
        return self._table.token_bytes(token_id).decode("utf-8", errors="replace")

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a chat under the model's template. See `ChatTemplate.render`.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(NO_TEMPLATE, param="messages")
        return self._template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """The token ids of a chat under the model's template, which writes all special tokens itself.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        text = self.render_chat_text(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        return self.encode(text, add_special_tokens=False)


def load_tokenizer(source: ModelSource, args: LlmArgs) -> Tokenizer:
    """The tokenizer of a model, or the one that `args.tokenizer` names.

    Raises:
        ModelLoadError: there is none, or it is of a kind that is not known; names the folder and what it lacks.
    """
    if args.tokenizer is not None:
        source = resolve_model(args.tokenizer, need_weights=False)
    override = _template_override(args.chat_template)
    if source.kind == "gguf":
        meta = read_gguf_meta(source.path).tokenizer
        backend, special_tokens = from_gguf(meta)
        templates = {"default": meta.chat_template} if meta.chat_template else {}
    else:
        backend, special_tokens, templates = _from_folder(source.path)
    return Tokenizer(backend, special_tokens, override or templates)


def _from_folder(folder: Path) -> tuple[Backend, dict[str, str], dict[str, str]]:
    config = _optional(folder / "tokenizer_config.json")
    if "auto_map" in config and not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"{folder} has a tokenizer that is Python code of its own, and no tokenizer.json; save a fast one there."
        )
    special_tokens = _special_tokens(config) or _special_tokens(_optional(folder / "special_tokens_map.json"))
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    elif (folder / "tokenizer.model").is_file():
        backend = from_sentencepiece(folder / "tokenizer.model", special_tokens)
    else:
        raise ModelLoadError(
            f"{folder} has neither tokenizer.json nor tokenizer.model; save its tokenizer there with Transformers' "
            "save_pretrained, or name another with tokenizer."
        )
    _add_missing_tokens(backend, config)
    if config.get("add_bos_token") is not None or config.get("add_eos_token") is not None:
        add_ends(
            backend,
            special_tokens.get("bos_token") if config.get("add_bos_token") else None,
            special_tokens.get("eos_token") if config.get("add_eos_token") else None,
        )
    return backend, special_tokens, _templates(folder, config)


def _read_backend(path: Path) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    # The library raises bare Exception for a file that it cannot make sense of.
    except Exception as error:
        raise ModelLoadError(f"{path} is not a tokenizer that the tokenizers library can read: {error}.") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """Tokens that only tokenizer_config.json names; ids follow the vocabulary in the order of theirs."""
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    for _, spec in listed:
        if backend.token_to_id(spec["content"]) is None:
            token = AddedToken(
                spec["content"],
                single_word=spec.get("single_word", False),
                lstrip=spec.get("lstrip", False),
                rstrip=spec.get("rstrip", False),
                normalized=spec.get("normalized", False),
                special=spec.get("special", False),
            )
            backend.add_tokens([token])


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder, newest way of storing them first."""
    alone = folder / "chat_template.jinja"
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if alone.is_file():
        return {"default": alone.read_text(encoding="utf-8")} | {p.stem: p.read_text(encoding="utf-8") for p in more}
    value = _optional(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, str):
        return {"default": value}
    return {entry["name"]: entry["template"] for entry in _entries(value)}


def _entries(value: Any) -> Iterable[Mapping[str, str]]:
    return value if isinstance(value, list) else []


def _template_override(setting: str | None) -> dict[str, str]:
    """`chat_template` of the settings: a file's name, or a template (which has a brace somewhere)."""
    if setting is None:
        return {}
    if "{" in setting:
        return {"default": setting}
    try:
        return {"default": Path(setting).expanduser().read_text(encoding="utf-8")}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"chat_template is {setting!r}, neither a template nor a file that can be read: {error}.",
            param="chat_template",
        ) from None


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
