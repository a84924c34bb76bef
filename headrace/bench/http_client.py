# SPDX-License-Identifier: Apache-2.0
"""A lean HTTP/1.1 client: kept-alive connections, the body handed on as it arrives.

Thousands of small pieces a second must cost the measuring side little, or it measures itself; what libraries spend on
each is several times a server's own. Parsing is httptools', which uvicorn brings.
"""

import asyncio
import os
import ssl
import urllib.parse
from collections.abc import Callable, Mapping

import httptools

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 1800.0
"""From a request to the end of its answer."""
READ_BYTES = 1 << 16

OnBody = Callable[[bytes], None]


class HttpError(Exception):
    """The connection could not be made, or broke."""


class _Answer:
    """What httptools reports of one answer."""

    def __init__(self, on_body: OnBody) -> None:
        self.is_complete = False
        self.on_body = on_body

    def on_message_complete(self) -> None:
        self.is_complete = True


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.has_answered = False


class HttpClient:
    """Talks to one server. Belongs to one event loop."""

    def __init__(self, base: str, headers: Mapping[str, str]) -> None:
        """base: the address that paths are added to: `http://host:8000/v1`."""
        parts = urllib.parse.urlsplit(base)
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(self, method: str, path: str, body: bytes | None, on_body: OnBody) -> int:
        """Send a request, hand its answer's body on piece by piece, and return the status.

        path: added to the base; with a leading `//`, from the server's root.

        Raises:
            HttpError: no connection, or one that broke before the end.
        """
        full = path[1:] if path.startswith("//") else self._path + path
        length = f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n" if body is not None else ""
        data = f"{method} {full} HTTP/1.1\r\n{self._head}{length}\r\n".encode() + (body or b"")
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                return await self._exchange(connection, data, on_body)
            except _Stale:
                # The server closed an idle connection: the request never reached it.
                continue
            except BaseException:
                connection.writer.transport.abort()
                raise

    async def _exchange(self, connection: _Connection, data: bytes, on_body: OnBody) -> int:
        is_reused, connection.has_answered = connection.has_answered, False
        answer = _Answer(on_body)
        parser = httptools.HttpResponseParser(answer)
        timer = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT_S, connection.writer.transport.abort)
        try:
            connection.writer.write(data)
            while not answer.is_complete:
                piece = await connection.reader.read(READ_BYTES)
                if not piece:
                    # Without a length, the end of the connection is the end of the body; not so for our servers.
                    raise ConnectionResetError("the server closed the connection")
                connection.has_answered = True
                parser.feed_data(piece)
        except (OSError, httptools.HttpParserError) as error:
            connection.writer.transport.abort()
            if is_reused and not connection.has_answered:
                raise _Stale from None
            raise HttpError(str(error) or type(error).__name__) from None
        finally:
            timer.cancel()
        if parser.should_keep_alive():
            self._idle.append(connection)
        else:
            connection.writer.close()
        return int(parser.get_status_code())

    async def _connect(self) -> _Connection:
        opening = asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            return _Connection(*await asyncio.wait_for(opening, CONNECT_TIMEOUT_S))
        except asyncio.TimeoutError:
            raise HttpError(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            # asyncio says which call failed; the system says why. A name that is not found has a number below 0.
            number = error.errno or 0
            raise HttpError(os.strerror(number) if number > 0 else error.strerror or str(error)) from None

    def close(self) -> None:
        """Drop the idle connections."""
        for connection in self._idle:
            connection.writer.transport.abort()
        self._idle.clear()


class _Stale(Exception):
    """A kept-alive connection had been closed."""
