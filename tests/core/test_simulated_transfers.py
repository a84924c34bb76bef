# SPDX-License-Identifier: Apache-2.0
"""The tiers that the core is tested with do what the real ones promise, and find out who does not wait for them."""

import random

import pytest
from simulated_transfers import GARBAGE, SimulatedTransfers

from headrace.core.transfer import BlockCopy, Transfer, TransferResult


class Device:
    def __init__(self) -> None:
        self.num_launched = self.num_carried_out = 0
        self.blocks = [[[group, block] for block in range(8)] for group in range(2)]

    def read_block(self, group: int, block_id: int) -> list[int]:
        return self.blocks[group][block_id]

    def write_block(self, group: int, block_id: int, content: list[int]) -> None:
        self.blocks[group][block_id] = content


@pytest.fixture
def device() -> Device:
    return Device()


def move(kind: str, *copies: tuple[int, int, int], number: int = 1, names: tuple[bytes, ...] = ()) -> Transfer:
    return Transfer(number, kind, [BlockCopy(*copy) for copy in copies], list(names))


def test_blocks_come_back_through_all_tiers(device: Device) -> None:
    tiers = SimulatedTransfers(device, 10)
    names = (b"a" * 32, b"b" * 32)
    for number, (kind, copies) in enumerate(
        [
            ("to_host", [(0, 3, 5), (1, 4, 5)]),
            ("store", [(0, -1, 5), (1, -1, 5)]),
            ("fetch", [(0, -1, 7), (1, -1, 8)]),
            ("to_device", [(0, 0, 7), (1, 1, 8)]),
        ]
    ):
        tiers.submit(move(kind, *copies, number=number, names=names))
        assert tiers.poll() == [TransferResult(number, [])]
    assert (device.blocks[0][0], device.blocks[1][1]) == ([0, 3], [1, 4])
    tiers.submit(move("lookup", (0, -1, -1), (1, -1, -1), names=names[::-1]))
    assert tiers.poll() == [TransferResult(1, [0, 1])]
    tiers.submit(move("fetch", (0, -1, 9), names=(b"c" * 32,)))
    assert tiers.poll() == [TransferResult(1, [0])]
    tiers.submit(move("to_device", (0, 6, 9)))
    assert tiers.poll() == [TransferResult(1, [0])]
    assert tiers.is_idle


def test_a_transfer_waits_for_the_steps_before_it(device: Device) -> None:
    tiers = SimulatedTransfers(device, 10)
    device.num_launched = 1
    tiers.submit(move("to_host", (0, 3, 5)))
    assert tiers.poll() == []
    device.blocks[0][3] = [9, 9]
    device.num_carried_out = 1
    assert tiers.poll() == [TransferResult(1, [])]
    assert tiers.host[0, 5] == [9, 9]


class Never(random.Random):
    def random(self) -> float:
        return 1.0


def test_a_block_that_changes_under_way_is_found_out(device: Device) -> None:
    late = Never()
    tiers = SimulatedTransfers(device, 10, late)
    tiers.submit(move("store", (0, -1, 5), names=(b"a" * 32,)))
    assert tiers.poll() == []
    tiers.host[0, 5] = [9, 9]
    late.random = lambda: 0.0  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="was changed during store"):
        tiers.poll()


def test_a_device_block_that_changes_on_its_way_to_the_host_arrives_changed(device: Device) -> None:
    late = Never()
    tiers = SimulatedTransfers(device, 10, late)
    tiers.submit(move("to_host", (0, 3, 5)))
    assert tiers.poll() == []
    device.blocks[0][3] = [9, 9]
    late.random = lambda: 0.0  # type: ignore[method-assign]
    assert tiers.poll() == [TransferResult(1, [])]
    assert tiers.host[0, 5] == [9, 9]


def test_a_block_that_is_read_too_early_holds_garbage_and_one_written_too_early_is_found_out(device: Device) -> None:
    late = Never()
    tiers = SimulatedTransfers(device, 10, late)
    tiers.host[0, 5] = [4, 4]
    tiers.submit(move("to_device", (0, 3, 5)))
    tiers.poll()
    assert device.blocks[0][3] == [GARBAGE, GARBAGE]
    for transfer in (move("to_host", (0, 3, 6)), move("to_device", (0, 3, 7)), move("fetch", (0, -1, 5), names=(b"",))):
        with pytest.raises(AssertionError, match="is being"):
            tiers.submit(transfer)
    device.blocks[0][3] = [1, 1]
    late.random = lambda: 0.0  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="was written during to_device"):
        tiers.poll()


def test_a_failed_copy_leaves_garbage(device: Device) -> None:
    tiers = SimulatedTransfers(device, 10, fails=lambda transfer, index: index == 1)
    tiers.submit(move("to_host", (0, 1, 1), (0, 2, 2), (0, 3, 3)))
    assert tiers.poll() == [TransferResult(1, [1])]
    assert [tiers.host[0, block] for block in (1, 2, 3)] == [[0, 1], [GARBAGE, GARBAGE], [0, 3]]
