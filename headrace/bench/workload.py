# SPDX-License-Identifier: Apache-2.0
"""Synthetic requests: random token ids, so that no two prompts share a prefix unless they are meant to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.dataset import BenchRequest
from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens a part has: from a normal distribution, or evenly between two bounds. At least 1."""

    mean: float
    stdev: float = 0.0
    bounds: tuple[int, int] | None = None

    @classmethod
    def between(cls, low: int, high: int) -> "Lengths":
        """Evenly between two bounds, both included."""
        return cls((low + high) / 2, bounds=(low, high))

    def draw(self, source: random.Random) -> int:
        """One length."""
        if self.bounds is not None:
            return source.randint(*self.bounds)
        return max(1, round(source.gauss(self.mean, self.stdev) if self.stdev else self.mean))


class Vocabulary:
    """Draws token ids."""

    def __init__(self, size: int, source: random.Random) -> None:
        self._ids = range(size)
        self.source = source

    def draw(self, count: int) -> tuple[int, ...]:
        """`count` ids, each with the same probability."""
        return tuple(self.source.choices(self._ids, k=count))


def random_requests(
    count: int, input_lens: Lengths, output_lens: Lengths, vocab_size: int, seed: int
) -> list[BenchRequest]:
    """Requests without anything in common."""
    words = Vocabulary(vocab_size, random.Random(seed))
    return [
        BenchRequest(index, output_lens.draw(words.source), words.draw(input_lens.draw(words.source)))
        for index in range(count)
    ]


def shared_prefix(
    count: int,
    num_prefixes: int,
    prefix_len: int,
    input_lens: Lengths,
    output_lens: Lengths,
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Requests in groups, taken in turn; those of a group begin with the same `prefix_len` tokens."""
    words = Vocabulary(vocab_size, random.Random(seed))
    prefixes = [words.draw(prefix_len) for _ in range(num_prefixes)]
    return [
        BenchRequest(
            index,
            output_lens.draw(words.source),
            prefixes[index % num_prefixes] + words.draw(input_lens.draw(words.source)),
            shares_prefix=True,
        )
        for index in range(count)
    ]


def multi_turn(
    num_conversations: int,
    num_turns: int,
    input_lens: Lengths,
    output_lens: Lengths,
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Conversations, all first turns first. A turn's prompt is the one before it, an answer to that, and something new.

    The answers in the prompts are random too, since a file cannot hold what a model will say: of each turn the cache
    can serve what the turn before it sent.
    """
    words = Vocabulary(vocab_size, random.Random(seed))
    said: list[tuple[int, ...]] = [()] * num_conversations
    requests = []
    for turn in range(num_turns):
        for number in range(num_conversations):
            said[number] += words.draw(input_lens.draw(words.source))
            output = output_lens.draw(words.source)
            requests.append(BenchRequest(f"{number}.{turn}", output, said[number], conversation=str(number)))
            said[number] += words.draw(output)
    return requests


def units_of(requests: Sequence[BenchRequest]) -> list[list[BenchRequest]]:
    """What runs one after the other: a conversation's turns, or a request by itself. In order of the first of each."""
    units: dict[Any, list[BenchRequest]] = {}
    for index, request in enumerate(requests):
        key = ("request", index) if request.conversation is None else ("conversation", request.conversation)
        units.setdefault(key, []).append(request)
    return list(units.values())


def take(requests: Sequence[BenchRequest], count: int | None, where: str) -> list[BenchRequest]:
    """The first `count`. Raises ConfigError where there are not so many: a request run twice would be a cached one."""
    if count is not None and count > len(requests):
        raise ConfigError(
            f"num_requests ({count}) is more than {where} holds ({len(requests)}); use at most {len(requests)}.",
            param="num_requests",
        )
    return list(requests[:count])
