# SPDX-License-Identifier: Apache-2.0
"""Environment variables that are not settings: debug switches and a folder. At most twelve.

Every setting has a variable of its own, HEADRACE_ and its name in capitals, generated from the config tree.
"""

import os

SWITCHES = {
    "HEADRACE_CACHE": "folder where the demo model, compiled kernels and what was measured of this machine are kept",
    "HEADRACE_INPROC": "1: run the core and the worker in the caller's process, for a debugger",
    "HEADRACE_TRACEBACK": "1: show the traceback of an error on the command line",
    "HEADRACE_REQUIRE_DEMO": "1: tests fail, rather than skip, without the demo model",
}


def is_on(name: str) -> bool:
    """Whether a switch is set to anything but empty, 0, false, no or off."""
    if name not in SWITCHES:
        raise KeyError(name)
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false", "no", "off")
