# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels outlive a start where they can, and where they cannot the start says so and goes on."""

import errno
import importlib.metadata
import os
import stat
from pathlib import Path

import pytest

from headrace.utils import cache
from headrace.utils.cache import CUDA, TRITON, cache_dir, kernel_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_kernels_go_into_our_cache_by_version_and_for_this_user_alone(home: Path) -> None:
    found = kernel_cache({}, home / "instead")
    folder = cache_dir() / "kernels" / f"triton-{importlib.metadata.version('triton')}"
    assert found.environment == {TRITON: str(folder), CUDA: str(folder / "driver")}
    assert found.is_kept and str(folder) in found.note
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not list(folder.iterdir()), "the probe is gone"
    # Another start finds the same place.
    assert kernel_cache({}, home / "instead") == found


def test_the_users_own_folders_win(home: Path) -> None:
    mine = kernel_cache({TRITON: "/mine"}, home / "instead")
    assert mine.environment == {} and "/mine" in mine.note and TRITON in mine.note
    assert not cache_dir().exists()
    assert set(kernel_cache({CUDA: "/drivers", TRITON: ""}, home / "instead").environment) == {TRITON}


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EROFS, "Read-only file system"), (errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full")],
)
def test_a_folder_that_cannot_be_written_is_a_warning_and_another_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def fails(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(cache.tempfile, "TemporaryFile", fails)
    found = kernel_cache({}, home / "instead")
    assert not found.is_kept
    assert found.environment[TRITON] == str(home / "instead" / "kernels")
    assert f"{cache_dir() / 'kernels'}" in found.note and said in found.note and "HEADRACE_CACHE" in found.note


def test_a_file_in_the_way_is_no_crash_either(home: Path) -> None:
    (home / "cache").write_text("not a folder")
    found = kernel_cache({}, home / "instead")
    assert not found.is_kept and "Not a directory" in found.note
