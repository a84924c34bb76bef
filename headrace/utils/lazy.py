# SPDX-License-Identifier: Apache-2.0
"""The one door to optional and slow dependencies."""

import importlib
from types import ModuleType

from headrace.errors import ConfigError


def require(module: str, *, extra: str | None = None, purpose: str | None = None) -> ModuleType:
    """Import a module when it is first needed.

    extra: the extra of Headrace that brings it (`pip install 'headrace[extra]'`). purpose: what needs it. Raises
    ConfigError, which names the remedy, where it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        what = f"headrace[{extra}]" if extra else module
        raise ConfigError(
            f"{purpose or 'This'} needs {module}, which is not installed: pip install '{what}'."
        ) from None
