# SPDX-License-Identifier: Apache-2.0
"""Reading an exception of another library for the one sentence we say about it."""

import errno


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, is a full disk or an exceeded quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: object) -> str:
    """An error's first line, without its full stop and short enough for a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160].rstrip(".")
