# SPDX-License-Identifier: Apache-2.0
"""`headrace serve MODEL`: an OpenAI-compatible server."""

from headrace.cli.flags import Invocation
from headrace.cli.settings import log_settings, read_settings, set_log_level
from headrace.server.launch import run_server


def run(invocation: Invocation) -> int:
    """Serve until stopped; the exit code of the server."""
    settings = read_settings(invocation)
    set_log_level(settings.server.log_level)
    log_settings(invocation, settings)
    return run_server(settings.args, settings.server.with_key_files())
