# SPDX-License-Identifier: Apache-2.0
"""The address of an OpenAI-compatible server, as people write it."""

import urllib.parse

from headrace.errors import UserError


def base_url(url: str) -> str:
    """`host:8000`, `http://host:8000/` and `http://host:8000/v1` are the same: `http://host:8000/v1`."""
    full = url if "://" in url else f"http://{url}"
    parts = urllib.parse.urlsplit(full)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            f"--url {url} is not the address of a server; it looks like http://127.0.0.1:8000.", param="url"
        )
    full = full.rstrip("/")
    return full if full.endswith("/v1") else f"{full}/v1"
