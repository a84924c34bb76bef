# SPDX-License-Identifier: Apache-2.0
"""Set before anything imports torch: OpenMP threads that sleep when idle, and no network.

The demo model is the real SmolLM2-135M-Instruct; tests that need it are skipped, and say so, only where it cannot be
obtained and HEADRACE_REQUIRE_DEMO is not set (CI sets it).
"""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from headrace.errors import HeadraceError
from headrace.utils.hub import resolve_model


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The path of the demo model's GGUF file."""
    try:
        return str(resolve_model("demo").path)
    except HeadraceError as error:
        if os.environ.get("HEADRACE_REQUIRE_DEMO"):
            raise
        pytest.skip(f"no demo model: {error}")


@pytest.fixture(autouse=True)
def log_level_stays_in_its_test() -> Iterator[None]:
    """A command run inside a test sets the log level for the processes it starts; later tests start theirs anew."""
    before = os.environ.get("HEADRACE_LOG_LEVEL")
    yield
    if before is None:
        os.environ.pop("HEADRACE_LOG_LEVEL", None)
    else:
        os.environ["HEADRACE_LOG_LEVEL"] = before


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip themselves where there is no GPU."""
    if os.path.exists("/dev/nvidia0"):
        return
    for item in items:
        if "gpu" in item.keywords or "multi_gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
