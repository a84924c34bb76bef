# SPDX-License-Identifier: Apache-2.0
"""The core as a process: it starts, says why it cannot, dies with its parent, and leaves nothing behind."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.config.llm_args import LlmArgs
from headrace.engine.async_llm import AsyncLLM
from headrace.engine.core_client import CoreOptions
from headrace.errors import EngineDeadError, ModelLoadError
from headrace.sampling_params import SamplingParams

Engine = Callable[..., Any]
Run = Callable[..., None]
Options = Callable[..., CoreOptions]


def is_gone(pid: int, within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # A zombie is gone but for its parent's attention.
        if Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1] == "Z":
            return True
        time.sleep(0.02)
    return False


def folder_of(llm: AsyncLLM) -> Path:
    return Path(llm.info.address.removeprefix("ipc://")).parent


def test_it_answers_and_leaves_nothing_behind(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine(in_process=False) as llm:
            assert llm.info.core_pid != os.getpid()
            assert (await llm.generate("abc", SamplingParams(max_tokens=7)).final()).outputs[0].text == "abcabca"
            pid, folder = llm.info.core_pid, folder_of(llm)
            assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
            start = time.monotonic()
            llm.shutdown()
            assert time.monotonic() - start < 2
            assert is_gone(pid, 1) and not folder.exists()

    run(go())


def test_kill_9_fails_what_is_pending_with_the_signal_s_name(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker", in_process=False) as llm:
            told: list[str] = []
            llm.on_death(told.append)
            pending = [asyncio.ensure_future(llm.generate("abc").final()) for _ in range(3)]
            await asyncio.sleep(0.2)
            os.kill(llm.info.core_pid, signal.SIGKILL)
            await asyncio.wait_for(llm.dead.wait(), 5)
            for one in pending:
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await one
            assert len(told) == 1 and not llm.is_alive and "SIGKILL" in (llm.dead_reason or "")
            with pytest.raises(EngineDeadError):
                await llm.get_stats()
            assert not folder_of(llm).exists()

    run(go())


def test_other_front_ends_learn_that_the_core_was_killed(engine: Engine, args: LlmArgs, run: Run) -> None:
    async def go() -> None:
        async with engine("SlowWorker", in_process=False) as llm:
            other = AsyncLLM(args)
            await other.start(connect_to=llm.info.address)
            pending = asyncio.ensure_future(other.generate("abc").final())
            await asyncio.sleep(0.2)
            os.kill(llm.info.core_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="closed its connection"):
                await asyncio.wait_for(pending, 5)
            other.shutdown()

    run(go())


def test_a_crash_while_serving_says_why(engine: Engine, run: Run) -> None:
    async def go() -> None:
        async with engine("CrashesServing", in_process=False) as llm:
            with pytest.raises(EngineDeadError, match="fell off the bus"):
                await llm.generate("abc", SamplingParams(max_tokens=100)).final()
            await asyncio.wait_for(llm.dead.wait(), 5)
            assert is_gone(llm.info.core_pid)

    run(go())


@pytest.mark.parametrize(
    ("worker", "in_process", "error", "message"),
    [
        ("CannotLoad", False, ModelLoadError, r"^/\S*/model0: tensor model.norm.weight is missing"),
        ("CannotLoad", True, ModelLoadError, r"^/\S*/model0: tensor model.norm.weight is missing"),
        ("CrashesLoading", False, EngineDeadError, "a bug in the loader"),
        ("CrashesLoading", True, EngineDeadError, "a bug in the loader"),
        ("ExitsLoading", False, EngineDeadError, "exited with code 7"),
    ],
)
def test_what_goes_wrong_at_the_start_is_one_error(
    args: LlmArgs, core_options: Options, run: Run, worker: str, in_process: bool, error: type, message: str
) -> None:
    async def go() -> None:
        llm = AsyncLLM(args, core=core_options(worker, in_process))
        with pytest.raises(error, match=message):
            await llm.start()
        llm.shutdown()

    run(go())


def test_progress_of_loading_reaches_the_front_end(args: LlmArgs, core_options: Options, run: Run) -> None:
    async def go() -> None:
        told: list[tuple[str, int, int]] = []
        llm = AsyncLLM(args, core=core_options())
        await llm.start(on_progress=lambda *report: told.append(report))
        llm.shutdown()
        assert told[-1] == ("loading weights", 3, 3)

    run(go())


def test_giving_up_while_it_loads_kills_the_core(args: LlmArgs, core_options: Options, run: Run) -> None:
    async def go() -> None:
        llm = AsyncLLM(args, core=core_options("SlowToLoad"))
        loading = asyncio.Event()
        loop = asyncio.get_running_loop()
        start = asyncio.ensure_future(llm.start(on_progress=lambda *_: loop.call_soon_threadsafe(loading.set)))
        await asyncio.wait_for(loading.wait(), 30)
        began = time.monotonic()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert time.monotonic() - began < 2
        llm.shutdown()

    run(go())
    assert not children_of(os.getpid())


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z" and int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


SCRIPT = """
import sys
from headrace.config.llm_args import LlmArgs
from headrace.engine import async_llm, llm
from headrace.engine.core_client import CoreOptions

async_llm.CoreOptions.from_environment = classmethod(
    lambda cls: CoreOptions(worker="fake_worker:%s", device_facts="fake_worker:device_facts")
)
engine = llm.LLM(sys.argv[1], load_format="dummy", max_batch_size=8, max_num_tokens=64)
print(engine.info.core_pid, engine.info.address, flush=True)
"""


def script(tmp_path: Path, model_folder: Path, worker: str, rest: str) -> "subprocess.Popen[str]":
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % worker + textwrap.dedent(rest))
    root = str(Path(headrace.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(Path(__file__).parent)])}
    return subprocess.Popen(
        [sys.executable, str(path), str(model_folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def test_a_plain_script_needs_no_main_guard(tmp_path: Path, model_folder: Path) -> None:
    rest = """
    print(engine.generate("abc", {"max_tokens": 6}).outputs[0].text)
    """
    done = script(tmp_path, model_folder, "FakeWorker", rest)
    out, err = done.communicate(timeout=60)
    assert done.returncode == 0, err
    head, text = out.splitlines()
    assert text == "abcabc"
    # Nobody called shutdown: the interpreter's end did.
    pid, address = head.split()
    assert is_gone(int(pid), 2) and not Path(address.removeprefix("ipc://")).parent.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_core_dies_with_the_process_that_started_it(tmp_path: Path, model_folder: Path, how: int) -> None:
    rest = """
    import time
    handle = engine.generate_async("abc")
    time.sleep(60)
    """
    parent = script(tmp_path, model_folder, "SlowWorker", rest)
    assert parent.stdout is not None
    pid, address = parent.stdout.readline().split()
    time.sleep(0.1)
    parent.send_signal(how)
    parent.communicate(timeout=10)
    assert parent.returncode != 0
    assert is_gone(int(pid), 5)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_ctrl_c_while_loading_leaves_no_process(tmp_path: Path, model_folder: Path) -> None:
    parent = script(tmp_path, model_folder, "SlowToLoad", "")
    end = time.monotonic() + 30
    while not children_of(parent.pid) and time.monotonic() < end:
        time.sleep(0.02)
    (child,) = children_of(parent.pid)
    time.sleep(1)
    os.killpg(parent.pid, signal.SIGINT)
    _, err = parent.communicate(timeout=10)
    assert parent.returncode != 0 and "KeyboardInterrupt" in err
    assert is_gone(child, 2)


def test_ctrl_c_while_downloading_does_not_wait_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import sys, time\n"
        "from headrace.engine import async_llm, llm\n"
        "async_llm.resolve_model = lambda *a, **k: [sys.stdout.write('.'), sys.stdout.flush(), time.sleep(60)]\n"
        "llm.LLM('far/away')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(headrace.__file__).parent.parent)}
    child = subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None and child.stdout.read(1) == "."
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=10)
    assert child.returncode != 0 and "KeyboardInterrupt" in err


def test_a_front_end_that_is_killed_frees_its_requests(engine: Engine, model_folder: Path, run: Run) -> None:
    code = """
    import asyncio, sys
    from headrace.config.llm_args import LlmArgs
    from headrace.engine.async_llm import AsyncLLM

    async def main():
        llm = AsyncLLM(LlmArgs(model=sys.argv[1], load_format="dummy"))
        await llm.start(connect_to=sys.argv[2])
        async for _ in llm.generate("abc"):
            print("it streams", flush=True)

    asyncio.run(main())
    """

    async def go() -> None:
        async with engine("SlowWorker", in_process=False) as llm:
            other = await asyncio.create_subprocess_exec(
                sys.executable, "-c", textwrap.dedent(code), str(model_folder), llm.info.address,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert other.stdout is not None and await other.stdout.readline() == b"it streams\n"
            assert (await llm.get_stats())["num_running"] == 1
            other.kill()
            await other.wait()
            for _ in range(100):
                stats = await llm.get_stats()
                if stats["num_running"] == 0 and stats["num_front_ends"] == 1:
                    break
                await asyncio.sleep(0.05)
            assert (stats["num_running"], stats["num_used_blocks"], stats["num_front_ends"]) == (0, 0, 1)
            assert (await llm.generate("ab", SamplingParams(max_tokens=2)).final()).outputs[0].text == "ab"

    run(go())


@pytest.mark.parametrize("case", ["kept", "in the way", "the user's"])
def test_a_core_on_a_gpu_keeps_compiled_kernels_or_says_that_it_cannot(
    args: LlmArgs, core_options: Options, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], case: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "info")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if case == "in the way":
        (tmp_path / "cache").write_text("a file")
    if case == "the user's":
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))

    async def go() -> None:
        options = replace(core_options("TellsKernelCache"), device_facts="fake_worker:cuda_facts")
        llm = AsyncLLM(args, core=options)
        await llm.start()
        (used,), folder = llm.info.ledger, folder_of(llm)
        llm.shutdown()
        said = capfd.readouterr().err
        if case == "kept":
            assert used.startswith(str(tmp_path / "cache" / "kernels" / "triton-")) and Path(used).is_dir()
            assert f"Compiled kernels are kept in {used}." in said
        elif case == "in the way":
            # Beside the core's socket: it ends with the core.
            assert used == str(folder / "kernels") and not folder.exists()
            assert "WARNING [core] Compiled kernels are not kept" in said and str(tmp_path / "cache") in said
        else:
            assert used == str(tmp_path / "mine")
            assert f"Compiled kernels are kept in {used} (TRITON_CACHE_DIR is set)." in said

    run(go())
