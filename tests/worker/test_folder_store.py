# SPDX-License-Identifier: Apache-2.0
"""A folder of blocks gives back what was put there or nothing: whatever happens to its files, and whoever shares it."""

import errno
import hashlib
import os
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transfers import Rig, outside

from headrace.config.llm_args import LlmArgs
from headrace.config.model import ModelConfig
from headrace.config.resolve import ResolvedConfig, resolve
from headrace.core.kv_cache_spec import KvSpec, group_layers
from headrace.errors import ConfigError
from headrace.kernels.block_checksum import checksum_of
from headrace.utils.hub import ModelSource
from headrace.worker import folder_store
from headrace.worker.device import device_facts
from headrace.worker.folder_store import HEADER_BYTES, FolderStore
from headrace.worker.kv_store import BlockKey, fingerprint
from headrace.worker.weights_digest import weights_digest

MINE, ANOTHER = bytes(range(32)), bytes(range(1, 33))
SIZE = 4096


def block_of(index: int) -> bytes:
    return hashlib.sha256(bytes([index])).digest() * (SIZE // 32)


def key_of(index: int, group: int = 0) -> BlockKey:
    return BlockKey(hashlib.sha256(bytes([index])).digest(), group)


def save(store: FolderStore, index: int, group: int = 0) -> Path:
    block = block_of(index)
    store.save(key_of(index, group), memoryview(block), checksum_of(block))
    return store.path(key_of(index, group))


def load(store: FolderStore, index: int, group: int = 0) -> bytes | None:
    into = bytearray(SIZE)
    checksum = store.load(key_of(index, group), memoryview(into))
    assert checksum in (None, checksum_of(into))
    return None if checksum is None else bytes(into)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "kv", MINE, 1 << 30)


def test_blocks_survive_a_restart(store: FolderStore, tmp_path: Path) -> None:
    for index in range(20):
        save(store, index, index % 3)
    store.close()
    again = FolderStore(tmp_path / "kv", MINE, 1 << 30)
    assert again.lookup([key_of(index, index % 3) for index in range(25)]) == [True] * 20 + [False] * 5
    assert [load(again, index, index % 3) for index in range(20)] == [block_of(index) for index in range(20)]
    assert load(again, 0, group=1) is None and load(again, 30) is None
    assert all(path.name.endswith(".kv") for path in files(tmp_path))


def test_every_flipped_bit_of_a_file_is_a_miss_and_the_file_is_deleted(store: FolderStore) -> None:
    path = save(store, 1)
    right = path.read_bytes()
    for place in [*range(HEADER_BYTES), HEADER_BYTES, HEADER_BYTES + 1000, len(right) - 1]:
        wrong = bytearray(right)
        wrong[place] ^= 1 << place % 8
        path.write_bytes(wrong)
        assert load(store, 1) is None, place
        assert not path.exists()
    path.write_bytes(right)
    assert load(store, 1) == block_of(1)


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -1, 1])
def test_a_file_cut_short_or_too_long_is_a_miss_and_is_deleted(store: FolderStore, size: int) -> None:
    path = save(store, 1)
    right = path.read_bytes()
    for wrong in (right[:size], right + bytes(abs(size) + 1)):
        path.write_bytes(wrong)
        assert load(store, 1) is None
        assert not path.exists()


def test_a_file_under_another_blocks_name_is_a_miss(store: FolderStore, tmp_path: Path) -> None:
    others = FolderStore(tmp_path / "kv", ANOTHER, 1 << 30)
    for source in (save(store, 2), save(store, 1, group=1), save(others, 1)):
        target = store.path(key_of(1))
        target.parent.mkdir(parents=True, exist_ok=True)
        source.rename(target)
        assert load(store, 1) is None
        assert not target.exists()


def test_another_models_blocks_are_never_seen(store: FolderStore, tmp_path: Path) -> None:
    save(store, 1)
    others = FolderStore(tmp_path / "kv", ANOTHER, 1 << 30)
    assert others.lookup([key_of(1)]) == [False]
    assert load(others, 1) is None
    assert load(store, 1) == block_of(1)


def test_an_older_version_of_the_format_is_a_miss(store: FolderStore) -> None:
    path = save(store, 1)
    path.write_bytes(path.read_bytes()[:8] + struct.pack("<I", 99) + path.read_bytes()[12:])
    assert load(store, 1) is None


def test_a_vanished_file_is_a_miss(store: FolderStore) -> None:
    path = save(store, 1)
    assert store.lookup([key_of(1)]) == [True]
    path.unlink()
    assert load(store, 1) is None
    assert not store.lookup([key_of(1)])[0]
    save(store, 1)
    assert load(store, 1) == block_of(1)


def test_the_least_recently_used_make_room_whichever_models_they_are(tmp_path: Path) -> None:
    room = 20 * (SIZE + HEADER_BYTES)
    old = FolderStore(tmp_path, ANOTHER, room)
    for index in range(5):
        os.utime(save(old, index), (1000 + index, 1000 + index))
    store = FolderStore(tmp_path, MINE, room)
    for index in range(14):
        os.utime(save(store, index), (2000 + index, 2000 + index))
    assert load(store, 0) == block_of(0)
    for index in range(14, 24):
        save(store, index)
        total = sum(path.stat().st_size for path in files(tmp_path))
        assert total <= room
    assert old.lookup([key_of(index) for index in range(5)]) == [False] * 5
    assert load(store, 0) == block_of(0) and load(store, 1) is None
    assert [load(store, index) for index in range(14, 24)] == [block_of(index) for index in range(14, 24)]


def test_what_others_write_counts(tmp_path: Path) -> None:
    room = 100 * (SIZE + HEADER_BYTES)
    stores = [FolderStore(tmp_path, MINE, room) for _ in range(3)]
    for index in range(250):
        block = bytes([index]) * SIZE
        key = BlockKey(hashlib.sha256(block).digest(), 0)
        stores[index % 3].save(key, memoryview(block), checksum_of(block))
        # Each may write a twentieth between two looks at the folder.
        assert len(files(tmp_path)) <= 100 + 3 * 5
    assert len(files(tmp_path)) >= 85


def test_a_full_disk_is_a_failed_save_that_leaves_nothing_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(FolderStore(tmp_path, MINE, 1 << 30))
    rig.run("to_host", [(0, 0, 0), (0, 1, 1)])
    written = os.write
    disk = {"left": HEADER_BYTES + 100}

    def write(file: int, data: memoryview) -> int:
        if disk["left"] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = written(file, data[: disk["left"]])
        disk["left"] -= count
        return count

    monkeypatch.setattr(folder_store.os, "write", write)
    names = [outside(1, 0), outside(2, 0)]
    for _ in range(3):
        assert rig.run("store", [(0, -1, 0), (0, -1, 1)], names) == [0, 1]
    assert files(tmp_path) == []
    assert caplog.text.count("No space left on device") == 1
    disk["left"] = 1 << 30
    assert rig.run("store", [(0, -1, 0), (0, -1, 1)], names) == []
    assert rig.run("fetch", [(0, -1, 5), (0, -1, 6)], names) == []
    assert rig.run("to_device", [(0, 6, 5), (0, 7, 6)]) == []
    assert torch.equal(rig.blocks[0][6], rig.blocks[0][0]) and torch.equal(rig.blocks[0][7], rig.blocks[0][1])
    rig.transfers.close()


def test_a_file_that_cannot_be_read_is_a_failed_fetch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = FolderStore(tmp_path, MINE, 1 << 30)
    rig = Rig(store)
    store.path(BlockKey(outside(1, 0), 0)).mkdir(parents=True)
    assert rig.run("fetch", [(0, -1, 0)], [outside(1, 0)]) == [0]
    assert "IsADirectoryError" in caplog.text
    rig.transfers.close()


def test_a_flipped_file_costs_one_fetch_through_transfers(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, MINE, 1 << 30)
    rig = Rig(store)
    rig.run("to_host", [(1, 0, 0)])
    rig.run("store", [(1, -1, 0)], [outside(1, 1)])
    path = store.path(BlockKey(outside(1, 1), 1))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert rig.run("fetch", [(1, -1, 1)], [outside(1, 1)]) == [0]
    assert rig.run("lookup", [(1, -1, -1)], [outside(1, 1)]) == [0]
    assert rig.run("to_device", [(1, 5, 1)]) == [0]
    rig.transfers.close()


def test_a_bit_that_flipped_on_the_host_is_found_in_the_file(tmp_path: Path) -> None:
    """The checksum is of the block as it left the device, so damage before the save shows too."""
    rig = Rig(FolderStore(tmp_path, MINE, 1 << 30))
    rig.run("to_host", [(0, 0, 0)])
    rig.host.memory(0, 0)[100] ^= 8
    assert rig.run("store", [(0, -1, 0)], [outside(1, 0)]) == []
    assert rig.run("fetch", [(0, -1, 1)], [outside(1, 0)]) == [0]
    assert files(tmp_path) == []
    rig.transfers.close()


def test_writers_and_readers_at_once_see_whole_blocks_only(tmp_path: Path) -> None:
    room = 12 * (SIZE + HEADER_BYTES)
    stores = [FolderStore(tmp_path, MINE, room) for _ in range(4)]
    wrong: list[object] = []
    num_found = [0] * 4

    def work(which: int) -> None:
        for turn in range(150):
            index = (turn * 7 + which * 3) % 16
            try:
                save(stores[which], index)
                found = load(stores[which], (index + 1) % 16)
            except Exception as error:
                wrong.append(error)
                return
            num_found[which] += found is not None
            if found not in (None, block_of((index + 1) % 16)):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sum(num_found) > 20
    assert all(path.name.endswith(".kv") for path in files(tmp_path))


def test_a_writer_killed_in_the_middle_leaves_no_block(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from headrace.worker import folder_store\n"
        "from headrace.worker.kv_store import BlockKey\n"
        "write = folder_store._write\n"
        "def dies(file, data):\n"
        "    write(file, data[:50])\n"
        "    os._exit(9)\n"
        "store = folder_store.FolderStore(sys.argv[1], bytes(range(32)), 1 << 30)\n"
        "folder_store._write = dies\n"
        "store.save(BlockKey(bytes(32), 0), memoryview(bytes(64)), 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False, timeout=120)
    assert done.returncode == 9
    left = files(tmp_path)
    assert [path.suffix for path in left] == [".unfinished"]
    store = FolderStore(tmp_path, MINE, 1 << 30)
    assert store.lookup([BlockKey(bytes(32), 0)]) == [False]
    save(store, 1)
    assert left[0].exists(), "it may be somebody's who still writes"
    os.utime(left[0], (time.time() - 7200,) * 2)
    save(FolderStore(tmp_path, MINE, 1 << 30), 2)
    assert not left[0].exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_of_somebody_elses_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written to"):
        FolderStore(tmp_path / "kv", MINE, 1 << 30)


def test_a_path_that_is_no_folder_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(ConfigError) as caught:
            FolderStore(path, MINE, 1 << 30)
        assert caught.value.message.startswith(f"kv_cache_config.disk_cache_path = {path} cannot be written to (")


HF = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 151, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def test_a_fingerprint_tells_weights_shapes_and_dtypes_apart_and_nothing_else() -> None:
    def print_of(weights: str = "a", config: ResolvedConfig | None = None, heads: int = 2, **changes: object) -> bytes:
        specs = [KvSpec(heads, 8, dtype="float32")] * 3
        return fingerprint(replace(config or usual, **changes), group_layers(specs), weights)

    model = ModelConfig.from_hf(HF)
    usual = resolve(LlmArgs(model="a", device="cpu", num_threads=1), model, device_facts("cpu"))
    larger = resolve(LlmArgs(model="b", device="cpu", num_threads=1, max_batch_size=8), model, device_facts("cpu"))
    right = print_of()
    assert len(right) == 32
    assert print_of(config=larger) == right
    different = [
        print_of("b"), print_of(heads=4), print_of(tokens_per_block=16), print_of(kv_dtype="float16"),
        print_of(dtype="bfloat16"), print_of(model=replace(model, rms_norm_eps=1e-6)),
    ]  # fmt: skip
    assert len({right, *different}) == 7


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_folder_store import *\n"
        "model = ModelConfig.from_hf(HF)\n"
        "config = resolve(LlmArgs(model='a', device='cpu', num_threads=1), model, device_facts('cpu'))\n"
        "print(fingerprint(config, group_layers([KvSpec(2, 8)] * 3), 'weights').hex())\n"
    )
    here = str(Path(__file__).parent)
    outputs = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, here],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


class Weights(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 100_001) -> None:
        super().__init__()
        values = torch.arange(size, dtype=torch.float32).to(dtype)
        self.first = nn.Parameter(values.clone(), requires_grad=False)
        self.second = nn.Parameter(values[:6].view(2, 3).clone(), requires_grad=False)
        self.register_buffer("kv_scale", torch.ones(2, 2))


def test_a_digest_sees_every_change_of_weights_and_scales(tmp_path: Path) -> None:
    source = ModelSource("hf", tmp_path, "m", "m")
    right = weights_digest(Weights(), source)
    assert weights_digest(Weights(), source) == right
    changed = [Weights(torch.float16), Weights(size=100_002)]
    for place in (0, 50_000, 100_000):
        changed.append(Weights())
        changed[-1].first.view(torch.int16)[place] ^= 1
    changed.append(Weights())
    changed[-1].second[1, 2] = -1
    changed.append(Weights())
    changed[-1].kv_scale[0, 1] = 0.5
    swapped = Weights()
    swapped.first, swapped.second = swapped.second, swapped.first
    digests = {weights_digest(weights, source) for weights in [*changed, swapped]}
    assert len(digests) == len(changed) + 1 and right not in digests


def test_a_digest_sees_every_change_of_a_packed_file(tmp_path: Path) -> None:
    source = ModelSource("gguf", tmp_path / "m.gguf", "m", "m")
    content = bytearray(range(256)) * 1000 + b"end"
    digests = set()
    for place in (None, 0, 100_000, len(content) - 1):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 16
        source.path.write_bytes(changed)
        digests.add(weights_digest(Weights(), source))
    assert len(digests) == 4
