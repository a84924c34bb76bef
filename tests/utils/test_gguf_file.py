# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import random_weights, write_gguf

from headrace.errors import ModelLoadError
from headrace.utils.gguf_file import read_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", random_weights(), kind="Q4_1")


def test_keys_and_tensors_are_those_the_gguf_package_reads(file: Path) -> None:
    ours, theirs = read_gguf(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.kind == tensor.tensor_type.name
        np.testing.assert_array_equal(ours.read(entry).reshape(-1), tensor.data.reshape(-1).view(np.uint8))


def test_a_truncated_file_is_refused_by_name_with_the_tensor_that_is_cut(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is truncated: tensor blk\.\S+ ends"):
        read_gguf(file)


@pytest.mark.parametrize("size", [10, 30, 200, 1500])
def test_a_file_cut_within_its_header_is_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf is truncated: its header"):
        read_gguf(file)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(100), b"GGUF" + (1).to_bytes(4, "little") + bytes(64)])
def test_what_is_no_gguf_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        read_gguf(path)


def test_a_big_endian_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(64))
    with pytest.raises(ModelLoadError, match="big-endian"):
        read_gguf(path)


@pytest.mark.parametrize("value", [0, "thirty-two", -1])
def test_an_impossible_alignment_is_refused(file: Path, value: int | str) -> None:
    key = b"general.alignment"
    kind, data = (5, value.to_bytes(4, "little", signed=True)) if isinstance(value, int) else (8, None)
    if data is None:
        data = len(value).to_bytes(8, "little") + str(value).encode()
    whole = file.read_bytes()
    num_keys = int.from_bytes(whole[16:24], "little")
    entry = len(key).to_bytes(8, "little") + key + kind.to_bytes(4, "little") + data
    file.write_bytes(whole[:16] + (num_keys + 1).to_bytes(8, "little") + entry + whole[24:])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf has general.alignment = "):
        read_gguf(file)
