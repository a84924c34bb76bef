# SPDX-License-Identifier: Apache-2.0
"""A model behind an OpenAI-compatible server, ours or another's."""

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any

from headrace.cli.local import Answer, Message, Write
from headrace.errors import EngineError, ModelNotFoundError, RequestError, UserError
from headrace.utils.url import base_url

LOOPBACK = ("localhost", "127.0.0.1", "::1")
TIMEOUT_S = 600.0


class RemoteModel:
    """A chat over HTTP. While an answer runs, Ctrl-C ends the answer and nothing else."""

    def __init__(self, url: str, model: str | None, api_key: str | None) -> None:
        self._base = base_url(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        host = urllib.parse.urlsplit(self._base).hostname
        # A proxy of the environment is for the outside world.
        handlers = [urllib.request.ProxyHandler({})] if host in LOOPBACK else []
        self._opener = urllib.request.build_opener(*handlers)
        self.name = model or self._first_model()

    def __enter__(self) -> "RemoteModel":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def chat(self, messages: Sequence[Message], settings: Mapping[str, Any], write: Write) -> Answer:
        """Answer a chat, writing the text as it comes. settings: fields of the request beside the messages."""
        body = {"model": self.name, "messages": list(messages), "stream": True, **settings}
        text, reason = "", None
        try:
            with self._open("/chat/completions", body) as response:
                for event in events(response):
                    if "error" in event:
                        raise EngineError(f"The server failed: {_reason(event)}.")
                    for choice in event.get("choices") or []:
                        piece = (choice.get("delta") or {}).get("content") or ""
                        text += piece
                        write(piece)
                        reason = choice.get("finish_reason") or reason
        except KeyboardInterrupt:
            # Leaving the `with` closes the connection, which ends the request at the server.
            return Answer(text, True, finish_reason="cancelled")
        except (OSError, HTTPException) as error:
            raise EngineError(f"The connection to {self._base} broke: {error}.") from None
        if reason is None:
            raise EngineError(f"{self._base} ended the answer without saying why.")
        return Answer(text, False, finish_reason=reason)

    def _first_model(self) -> str:
        with self._open("/models", None) as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self._base}/models lists no model; name one with --model.") from None

    def _open(self, path: str, body: dict[str, Any] | None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)
        try:
            response: HTTPResponse = self._opener.open(request, timeout=TIMEOUT_S)
            return response
        except urllib.error.HTTPError as error:
            with error:
                said = _reason(_parse(error.read()))
            message = f"{self._base} answered {error.code}: {said or error.reason}"
            if error.code == 404:
                raise ModelNotFoundError(message) from None
            if error.code < 500:
                raise RequestError(message) from None
            raise EngineError(message) from None
        except (urllib.error.URLError, OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UserError(f"Cannot reach {self._base}: {reason}.", param="url") from None


def events(lines: Iterator[bytes] | HTTPResponse) -> Iterator[dict[str, Any]]:
    """The json objects of a stream of server-sent events, up to `[DONE]`."""
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = _parse(data)
        if event:
            yield event


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _reason(body: Mapping[str, Any]) -> str:
    """What an error body says, in the shapes that servers use."""
    error = body.get("error", body)
    if isinstance(error, Mapping):
        return str(error.get("message") or error.get("detail") or "").rstrip(".")
    return str(error).rstrip(".")
