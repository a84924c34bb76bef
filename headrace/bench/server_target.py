# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible server as a target, ours or another's: completions or chat, streamed."""

import json
from typing import Any, Literal

import msgspec

from headrace.bench.dataset import BenchRequest
from headrace.bench.http_client import HttpClient, HttpError
from headrace.bench.load import Record, TargetGoneError, now
from headrace.errors import EngineDeadError, EngineError, ModelNotFoundError, RequestError, UserError

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
MAX_SAID = 200
"""Characters of a server's own message that are shown."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    def is_piece(self, has_ids: bool) -> bool:
        """Whether a token or more came with it. has_ids: the server names the ids of every piece."""
        if has_ids or self.token_ids:
            return bool(self.token_ids)
        if self.delta is not None:
            delta = self.delta
            return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        # Servers stream a piece for a token whose text is not whole yet, too.
        return bool(self.text) or self.finish_reason is None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Stream:
    """Server-sent events of one answer, read into its record as they come."""

    def __init__(self, record: Record, has_ids: bool) -> None:
        self._record = record
        self._has_ids = has_ids
        self._rest = b""
        self.is_done = False
        self.is_engine_dead = False
        self._num_tokens = 0
        self._usage: _Usage | None = None

    def feed(self, data: bytes) -> None:
        """A piece of the body."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip())

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        record = self._record
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            record.error = f"the server sent what is no event: {error}"
            return
        if event.error is not None:
            record.error = _said(event.error) or "the server failed"
            self.is_engine_dead = _is_engine_dead({"error": event.error})
        if any(choice.is_piece(self._has_ids) for choice in event.choices):
            record.arrivals.append(now())
            self._num_tokens += sum(len(choice.token_ids or ()) for choice in event.choices)
        if event.usage is not None:
            self._usage = event.usage

    def finish(self) -> None:
        """The body has ended: fill in what the usage says."""
        record, usage = self._record, self._usage
        told = usage.completion_tokens if usage is not None else None
        record.num_output = told if told is not None else self._num_tokens or len(record.arrivals)
        if usage is not None:
            record.num_prompt = usage.prompt_tokens or record.num_prompt
            details = usage.prompt_tokens_details
            record.num_cached = None if details is None else details.cached_tokens
        if record.error is None and not self.is_done:
            record.error = "the answer ended without [DONE]"
        if record.error is None and not record.num_output:
            record.error = "the answer holds no token"


class ServerTarget:
    """Sends requests to a server; `connect` first."""

    def __init__(
        self,
        base: str,
        endpoint: Endpoint,
        api_key: str | None,
        *,
        model: str | None,
        temperature: float,
        ignore_eos: bool,
        extra: dict[str, Any],
    ) -> None:
        """
        Args:
            base: `http://host:8000/v1`.
            model: None: the server's first.
            extra: more fields for every request.
        """
        self.base = base
        self._http = HttpClient(base, {"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._endpoint = endpoint
        self.model = model
        self._fields = {
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }
        self._extra = extra

    async def connect(self) -> dict[str, Any] | None:
        """Find the model, and what a Headrace server says of its engine (None: another server).

        Raises:
            UserError: the server cannot be reached, or lists no model.
            EngineError, RequestError, ModelNotFoundError: it refuses.
        """
        try:
            status, body = await self.get("/models")
        except HttpError as error:
            raise UserError(f"Cannot reach {self.base}: {error}.", param="url") from None
        if status != 200:
            raise _refusal(self.base, status, body)
        if self.model is None:
            self.model = _first_model(body)
        if self.model is None:
            raise UserError(f"{self.base}/models lists no model; name one with --model.", param="model")
        try:
            status, info = await self.get("//server_info")
        except HttpError:
            return None
        if status == 200 and isinstance(info, dict) and isinstance(info.get("engine"), dict):
            # It then streams a piece for every token, text or not.
            self._fields.setdefault("return_token_ids", True)
            return info
        return None

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a route; None where it is no JSON. Raises HttpError."""
        parts: list[bytes] = []
        status = await self._http.request("GET", path, None, parts.append)
        return status, _parse(b"".join(parts))

    async def run(self, record: Record) -> None:
        body = self._body(record.request)
        stream = _Stream(record, bool({**self._fields, **self._extra}.get("return_token_ids")))
        parts: list[bytes] = []
        record.started = now()

        def on_body(data: bytes) -> None:
            parts.append(data) if not record.arrivals and len(parts) < 64 else None
            stream.feed(data)

        try:
            status = await self._http.request("POST", PATHS[self._endpoint], body, on_body)
        except HttpError as error:
            record.ended = now()
            if not await self._is_alive():
                raise TargetGoneError(f"{self.base} cannot be reached any more: {error}") from None
            record.error = f"the connection broke: {error}"
            return
        record.ended = now()
        if status == 200:
            stream.finish()
        else:
            answer = _parse(b"".join(parts))
            record.error = f"{status}: {_said(answer) or 'no reason given'}"
            stream.is_engine_dead = _is_engine_dead(answer)
        if stream.is_engine_dead:
            raise TargetGoneError(f"the server's engine is dead: {record.error}")

    def close(self) -> None:
        self._http.close()

    def _body(self, request: BenchRequest) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output_tokens, **self._fields}
        if self._endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt if request.input_ids is None else request.input_ids
        return msgspec.json.encode({**body, **self._extra})

    async def _is_alive(self) -> bool:
        try:
            await self.get("/models")
        except HttpError:
            return False
        return True


def _first_model(body: Any) -> str | None:
    try:
        return str(body["data"][0]["id"])
    except (LookupError, TypeError):
        return None


def _refusal(base: str, status: int, body: Any) -> UserError | EngineError:
    message = f"{base} answered {status}: {_said(body) or 'no reason given'}."
    if status == 404:
        return ModelNotFoundError(f"{message[:-1]}; is it an OpenAI-compatible server?")
    return RequestError(message) if status < 500 else EngineError(message)


def _is_engine_dead(body: Any) -> bool:
    """Whether a Headrace server says that nothing more will be answered."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == EngineDeadError.code


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _said(body: Any) -> str:
    """What an error says, in the shapes that servers use."""
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or ""
        body = inner
    return str(body or "").strip().rstrip(".")[:MAX_SAID]
