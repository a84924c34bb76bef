# SPDX-License-Identifier: Apache-2.0
"""In which order a plan's block copies can run side by side."""

from collections.abc import Iterable


def rounds_of_copies(copies: Iterable[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
    """Copies (group, source, destination) as if one after the other, in launches of copies that can run at once.

    Per launch its group, and source and destination of each copy in turn. A copy comes a round after those before it
    that write what it reads or writes, or read what it writes; most plans have one round.
    """
    rounds: dict[tuple[int, int], list[int]] = {}
    free_to_read: dict[tuple[int, int], int] = {}
    free_to_write: dict[tuple[int, int], int] = {}
    for group, source, destination in copies:
        read, written = (group, source), (group, destination)
        if read == written:
            continue
        turn = max(free_to_read.get(read, 0), free_to_write.get(written, 0))
        rounds.setdefault((turn, group), []).extend((source, destination))
        free_to_write[read] = max(free_to_write.get(read, 0), turn + 1)
        free_to_read[written] = free_to_write[written] = turn + 1
    return [(group, rounds[turn, group]) for turn, group in sorted(rounds)]
