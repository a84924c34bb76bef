# SPDX-License-Identifier: Apache-2.0
"""What front ends and the core say to each other, and how it is framed.

Two channels. Requests and results go over ZMQ: the core binds a ROUTER, every front end connects a DEALER, a frame is
a msgpack list of the structs below. The life of the core goes over one end of a socket pair that the process which
started it keeps: `StartCore` down, then progress, `Ready` or `Failed` up; its end of file tells either side that the
other is gone. Nothing is ever unpickled.
"""

import socket
import struct
from typing import Any

import msgspec

from headrace.core.kv_events import EventPage
from headrace.core.output import RequestDelta
from headrace.core.request import SamplingSpec
from headrace.core.retention import Retention


class EngineRequest(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to run: a request with n choices is n of these."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingSpec
    priority: int = 50
    """0 to 100, larger first."""
    cache_salt: str | None = None
    cache_marks: tuple[str, ...] = ()
    """What else must be equal for two requests to share KV of equal tokens."""
    retention: Retention | None = None
    """How long its blocks should stay cached; None: as usual."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine settled on at start-up."""

    model_name: str
    """The name clients use."""
    model_path: str
    architecture: str
    vocab_size: int
    """Rows of the embedding: ids from 0 to this, exclusive, are valid prompt tokens."""
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    tokens_per_block: int
    num_blocks: int
    kv_bytes_per_token: int
    device: str
    dtype: str
    attn_backend: str
    num_plans_in_flight: int
    num_threads: int
    load_seconds: float
    """From the start of the worker to the first request it could take."""
    core_pid: int
    address: str
    """Where further front ends connect."""
    ledger: list[str] = []
    """The memory ledger, a line each."""
    startup: dict[str, float] = {}
    """Seconds of each phase of the start, in order; the front end puts its own before and after the core's."""
    default_sampling: dict[str, Any] = {}
    """What the model's generation_config.json sets, by the names of `SamplingParams`. Filled in by the front end."""
    front_end: int = 0
    """Number of the front end that is told this: 0 started the core, those that joined it count from 1."""


# Front end to core.


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end introduces itself; answered by `Ready`."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests; nothing is answered."""

    request_ids: list[str]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """The front end saw the end of a request in its text (a stop string); nothing is answered."""

    request_id: str
    num_output_tokens: int
    """Output tokens that belong to the answer."""


class GetStats(msgspec.Struct, frozen=True, tag=True):
    call_id: int


class ReadEvents(msgspec.Struct, frozen=True, tag=True):
    """Read KV cache events; answered by `KvEvents`."""

    call_id: int
    since: int
    """Id of the first one wanted."""
    limit: int


class Trace(msgspec.Struct, frozen=True, tag=True):
    """Trace the device over the next steps; answered by `Stats`, whose values are the summary."""

    call_id: int
    num_steps: int


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front end leaves; what it still runs is aborted."""


# Core to front end.


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """What one step gave to the requests of one front end."""

    deltas: list[RequestDelta]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The answer to `GetStats` or `Trace`."""

    call_id: int
    values: dict[str, Any]


class KvEvents(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadEvents`."""

    call_id: int
    page: EventPage | None = None
    error: str = ""
    """Why there is no page: what is wrong with the request."""
    param: str | None = None


class Dying(msgspec.Struct, frozen=True, tag=True):
    """The core stops; every request that still runs is lost."""

    reason: str


# The life of the core.


class StartCore(msgspec.Struct, frozen=True, tag=True):
    """All that a core process is told."""

    address: str
    args_json: bytes
    """`LlmArgs` as JSON."""
    source_kind: str
    source_path: str
    source_name: str
    source_original: str
    executor: str
    """The executor's class, as `module:Class`."""
    worker: str
    """The worker's class, as `module:Class`."""
    device_facts: str
    """The function that says what the device is, as `module:name`."""
    parent_pid: int
    began: float
    """When the core was started, in `time.monotonic`'s seconds."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    label: str
    done: int
    total: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The core's last words."""

    kind: str
    """Class name in `headrace.errors`."""
    message: str
    param: str | None = None
    traceback: str = ""
    """Where it happened; empty for mistakes of the user."""


ToCore = Hello | Submit | Abort | Finish | GetStats | ReadEvents | Trace | Goodbye
FromCore = Ready | Outputs | Stats | KvEvents | Dying
Life = StartCore | Progress | Ready | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(list[ToCore]).decode
decode_from_core = msgspec.msgpack.Decoder(list[FromCore]).decode
_decode_life = msgspec.msgpack.Decoder(Life).decode

_LENGTH = struct.Struct("!I")


def send_life(channel: socket.socket, message: Life) -> None:
    """Write one message to the life channel (blocking).

    Raises:
        OSError: the other side is gone.
    """
    data = encode(message)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive_life(channel: socket.socket) -> Life | None:
    """Read one message from the life channel (blocking); None at its end."""
    header = _read(channel, _LENGTH.size)
    if header is None:
        return None
    data = _read(channel, _LENGTH.unpack(header)[0])
    return None if data is None else _decode_life(data)


def _read(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = channel.recv(size - len(parts))
        except OSError:
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
