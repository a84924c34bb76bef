# SPDX-License-Identifier: Apache-2.0
"""What somebody who misspelled a name most likely meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None where nothing is near."""
    by_plain = {k.lower().replace("-", "_"): k for k in known}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), by_plain, n=1, cutoff=0.6)
    return by_plain[found[0]] if found else None
