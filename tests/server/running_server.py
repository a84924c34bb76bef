# SPDX-License-Identifier: Apache-2.0
"""A real uvicorn on a free port over a fake engine, in a thread of this process."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeLLM
from openai import OpenAI

from headrace.config.server import ServerConfig
from headrace.server.app import create_app
from headrace.server.context import Lifecycle


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return as soon as the condition holds; fail if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


class RunningServer:
    """Serves from construction to `close()`."""

    def __init__(self, llm: FakeLLM | None = None, lifecycle: Lifecycle | None = None, **settings: Any) -> None:
        self.llm = llm or FakeLLM()
        self.lifecycle = lifecycle or Lifecycle()
        app = create_app(self.llm, ServerConfig(**settings), self.lifecycle)  # type: ignore[arg-type]
        config = uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off", ws="none")
        config.timeout_graceful_shutdown = 1
        self._uvicorn = uvicorn.Server(config)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=20)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._uvicorn.started)

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self._uvicorn.serve(sockets=[self._listener])

        asyncio.run(main())

    def on_loop(self, call: Callable[..., Any], *args: Any) -> None:
        self.loop.call_soon_threadsafe(call, *args)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, content: str = "Hi", **fields: Any) -> httpx.Response:
        return self.post(
            "/v1/chat/completions",
            {"model": "fake", "messages": [{"role": "user", "content": content}], **fields},
        )

    def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "fake", "prompt": prompt, **fields})

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self._uvicorn.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
