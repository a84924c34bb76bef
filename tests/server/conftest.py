# SPDX-License-Identifier: Apache-2.0
"""`server`: one with the default answers. `serve(...)`: one with an engine or settings of the test's own."""

from collections.abc import Callable, Iterator

import pytest
from running_server import RunningServer


@pytest.fixture
def serve() -> Iterator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(*args: object, **settings: object) -> RunningServer:
        started.append(RunningServer(*args, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer()
    yield running
    running.close()
