# SPDX-License-Identifier: Apache-2.0
"""When requests arrive: all at once, or at random with a given rate."""

import random

from headrace.errors import ConfigError


def check_arrivals(rate: float | None, burstiness: float) -> None:
    """Raises ConfigError for a rate or burstiness that no arrivals can have."""
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(
            f"request_rate must be over 0, but is {rate:g}; leave it out for each as soon as it may.",
            param="request_rate",
        )
    if not 0 < burstiness < float("inf"):
        raise ConfigError(f"burstiness must be over 0, but is {burstiness:g}; 1 is Poisson.", param="burstiness")


def arrival_times(count: int, rate: float | None, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start at which `count` requests arrive.

    The times between follow a gamma distribution of mean 1/rate and shape `burstiness`: 1 is a Poisson process; below,
    requests come in bursts; above, more evenly. rate: per second; None: all at 0.
    """
    if rate is None:
        return [0.0] * count
    source = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
