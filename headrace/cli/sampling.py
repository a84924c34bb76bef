# SPDX-License-Identifier: Apache-2.0
"""The sampling flags of `generate` and `chat`."""

from typing import Any

from headrace.cli.commands import SAMPLING
from headrace.sampling_params import SamplingParams


def given_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """The sampling settings that the command line gives, by name."""
    return {option.name: options[option.name] for option in SAMPLING if options[option.name] is not None}


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """The same as `SamplingParams`. Raises RequestError for a bad value."""
    return SamplingParams(**given_sampling(options))
