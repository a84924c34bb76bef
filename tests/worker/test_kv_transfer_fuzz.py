# SPDX-License-Identifier: Apache-2.0
"""Whatever is moved where, and whatever flips, breaks or vanishes on the way: a block is right, or its copy fails."""

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from transfers import NUM_BLOCKS, Rig, outside

from headrace.worker.folder_store import HEADER_BYTES, FolderStore
from headrace.worker.kv_store import BlockKey

NUM_HOST, NUM_NAMES = 6, 5
OPS = ("to_host", "to_device", "store", "fetch", "write", "flip_host", "flip_file", "cut_file", "lose_file", "swap")


class Model:
    """One group's blocks on the device, the host and in a folder, beside what they should be."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder, bytes(32), 1 << 30)
        self.rig = Rig(self.store, num_host_blocks=NUM_HOST)
        self.device = self.rig.blocks[0]
        self.host: dict[int, bytes] = {}
        """What the block was, whose checksum a host block has."""
        self.files: dict[int, bytes] = {}
        """What a file must be for its block to be right."""

    def path(self, name: int) -> Path:
        return self.store.path(BlockKey(outside(name, 0), 0))

    def apply(self, op: str, block: int, host: int, name: int, rng: random.Random) -> None:
        if op == "write":
            self.device[block] = rng.randrange(256)
            self.device[block, rng.randrange(self.device.shape[1])] = rng.randrange(256)
        elif op == "to_host":
            assert self.rig.run(op, [(0, block, host)]) == []
            self.host[host] = self.bytes_of(block)
        elif op == "to_device":
            self.to_device(block, host)
        elif op == "store" and host in self.host:
            assert self.rig.run(op, [(0, -1, host)], [outside(name, 0)]) == []
            if name not in self.files:
                # One that is there is not written again.
                self.files[name] = self.path(name).read_bytes()[:HEADER_BYTES] + self.host[host]
        elif op == "fetch":
            self.fetch(host, name)
        elif op == "flip_host" and host in self.host:
            memory = self.rig.host.memory(0, host)
            memory[rng.randrange(memory.nbytes)] ^= 1 << rng.randrange(8)
        elif name in self.files:
            self.damage(op, name, rng)

    def to_device(self, block: int, host: int) -> None:
        failed = self.rig.run("to_device", [(0, block, host)])
        is_right = self.host.get(host) == bytes(self.rig.host.memory(0, host))
        assert failed == ([] if is_right else [0])
        assert self.bytes_of(block) == (self.host[host] if is_right else bytes(self.device.shape[1])), "a wrong byte"

    def fetch(self, host: int, name: int) -> None:
        is_right = name in self.files and self.files[name] == self.path(name).read_bytes()
        failed = self.rig.run("fetch", [(0, -1, host)], [outside(name, 0)])
        assert failed == ([] if is_right else [0])
        if is_right:
            self.host[host] = self.files[name][HEADER_BYTES:]
        else:
            assert not self.path(name).exists()
            self.files.pop(name, None)

    def damage(self, op: str, name: int, rng: random.Random) -> None:
        path = self.path(name)
        content = bytearray(path.read_bytes())
        if op == "flip_file":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        elif op == "cut_file":
            path.write_bytes(content[: rng.randrange(len(content))])
        elif op == "lose_file":
            path.unlink()
            del self.files[name]
        elif op == "swap":
            path.write_bytes(self.path(rng.choice(sorted(self.files))).read_bytes())

    def bytes_of(self, block: int) -> bytes:
        return self.device[block].numpy().tobytes()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(OPS),
        st.integers(0, NUM_BLOCKS - 1),
        st.integers(0, NUM_HOST - 1),
        st.integers(0, NUM_NAMES - 1),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_a_block_comes_back_right_or_its_copy_fails(steps: list[tuple[str, int, int, int]], rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Model(Path(folder))
        for op, block, host, name in steps:
            model.apply(op, block, host, name, rng)
        model.rig.transfers.close()
