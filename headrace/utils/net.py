# SPDX-License-Identifier: Apache-2.0
"""Addresses and ports."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens on now; another process may take it before the caller does."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
