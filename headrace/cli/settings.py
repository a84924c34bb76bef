# SPDX-License-Identifier: Apache-2.0
"""A parsed command line, the environment and a YAML file -> the settings of a run."""

import os

from headrace.cli.flags import Invocation
from headrace.config.base import value_of
from headrace.config.sources import SECRETS, Settings, environment_layer, every_leaf, load_settings, yaml_layer
from headrace.errors import UserError
from headrace.logger import get_logger, set_level

logger = get_logger(__name__)


def read_settings(invocation: Invocation) -> Settings:
    """Merge the sources of a command. Raises ConfigError, a sentence for each bad value."""
    file = invocation.options.get("config")
    layers = [yaml_layer(file)] if file else []
    layers += [environment_layer(os.environ), invocation.layer]
    if not any("model" in layer.values for layer in layers):
        name = invocation.command.name
        raise UserError(
            f"No model is named: give `headrace {name} MODEL`, where MODEL is a Hugging Face folder, a .gguf file, a "
            "Hub id, or demo.",
            param="model",
        )
    return load_settings(layers)


def set_log_level(level: str | None, otherwise: str = "warning") -> None:
    """For this process and those it starts; None leaves it to the environment, and then to `otherwise`."""
    level = level or os.environ.get("HEADRACE_LOG_LEVEL") or otherwise
    os.environ["HEADRACE_LOG_LEVEL"] = level
    set_level(level)


def log_settings(invocation: Invocation, settings: Settings) -> None:
    """Say what was given and by whom: aliases, overridden values, and every value that is not a default."""
    for sentence in (*invocation.became, *settings.overridden):
        logger.info("%s", sentence)
    for name, leaf in every_leaf().items():
        if name in settings.origin and name != "model":
            tree = settings.args if leaf.path[0] in settings.args.__dict__ else settings.server
            value = "(given)" if name in SECRETS else value_of(tree, leaf.path)
            logger.info("%s = %s (%s)", name, value, settings.origin[name])
