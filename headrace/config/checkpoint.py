# SPDX-License-Identifier: Apache-2.0
"""The json files of a checkpoint, read from disk."""

import json
from pathlib import Path
from typing import Any

from headrace.config.model import ModelConfig
from headrace.errors import ModelLoadError
from headrace.utils.gguf_meta import read_gguf_meta
from headrace.utils.hub import ModelSource


def read_json(path: Path) -> dict[str, Any]:
    """A json file that holds an object. Raises ModelLoadError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a json object.")
    return value


def load_generation_config(source: ModelSource) -> dict[str, Any]:
    """What generation_config.json says; empty where there is none, and for a .gguf file."""
    path = source.path / "generation_config.json"
    return read_json(path) if source.kind == "hf" and path.is_file() else {}


def _modelopt_quantization(folder: Path) -> dict[str, Any]:
    """quantization_config out of ModelOpt's own file, for a config.json that has none."""
    path = folder / "hf_quant_config.json"
    said = read_json(path).get("quantization") if path.is_file() else None
    return {"quantization_config": {"quant_method": "modelopt", **said}} if isinstance(said, dict) else {}


def load_model_config(source: ModelSource) -> ModelConfig:
    """The config of a Hugging Face folder or a .gguf file. Raises ModelLoadError naming the file."""
    if source.kind == "gguf":
        file, values, generation = source.path, read_gguf_meta(source.path).config, {}
    else:
        file = source.path / "config.json"
        values, generation = read_json(file), load_generation_config(source)
        values = {**_modelopt_quantization(source.path), **values}
    try:
        return ModelConfig.from_hf(values, generation)
    except ModelLoadError as error:
        said = error.message.removeprefix("config.json ")
        where = f"{file} " if said != error.message else f"{file}: "
        raise ModelLoadError(where + said, param=error.param) from None
