# SPDX-License-Identifier: Apache-2.0
"""`headrace chat` and `generate` as a person at a terminal meets them, with the real model."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
LOAD_S = 240.0


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *argv: str) -> None:
        self.fd, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *argv],
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(there)
        self.seen = ""

    def until(self, text: str, timeout_s: float = 60.0) -> str:
        """Read until `text` has come; returns all that came before it, and forgets both."""
        end = time.monotonic() + timeout_s
        while text not in self.seen:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                try:
                    piece = os.read(self.fd, 4096)
                except OSError:
                    piece = b""
                assert piece, f"ended with {self.exit_code()} before {text!r}: {self.seen!r}"
                self.seen += piece.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def exit_code(self, timeout_s: float = 30.0) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.fd)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C becomes a signal to the whole group."""
    os.close(os.open(os.ttyname(0), os.O_RDWR))


@pytest.fixture
def chat(demo_model: str) -> Iterator[Terminal]:
    terminal = Terminal("chat", demo_model, "--temperature", "0", "--ignore_eos")
    yield terminal
    terminal.close()


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def test_ctrl_c_stops_the_answer_and_not_the_chat(chat: Terminal) -> None:
    chat.until("> ", LOAD_S)
    core = children(chat.process.pid)
    chat.type("Tell me a very long story.\n")
    chat.until("story.")
    chat.until(" ", LOAD_S)
    chat.type("\x03")
    chat.until("[stopped]")
    chat.until("> ")
    chat.type("\x03")
    chat.until("/exit leaves")
    chat.until("> ")
    chat.type("/reset\n")
    chat.until("Forgotten.")
    chat.until("> ")
    assert children(chat.process.pid) == core, "the engine lives through both"
    chat.type("\x04")
    assert chat.exit_code() == 0
    for pid in core:
        assert not Path(f"/proc/{pid}").exists(), "nothing is left behind"


def test_generate_streams_an_answer_and_says_how_fast(demo_model: str) -> None:
    terminal = Terminal("generate", demo_model, "--prompt", "Say hello.", "--max_tokens", "4", "--temperature", "0")
    try:
        terminal.until(" output tokens, ", LOAD_S)
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
