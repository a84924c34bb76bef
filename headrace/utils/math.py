# SPDX-License-Identifier: Apache-2.0
"""Whole-number arithmetic."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple that is at least a."""
    return cdiv(a, multiple) * multiple


def round_down(a: int, multiple: int) -> int:
    """The largest multiple that is at most a."""
    return a // multiple * multiple
