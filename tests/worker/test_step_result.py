# SPDX-License-Identifier: Apache-2.0
"""Results wait for as long as nobody reads them."""

import torch

from headrace.worker.step_result import HostTokens, TokenBuffers


def test_a_buffer_goes_back_when_it_is_read_and_not_before() -> None:
    home: list[torch.Tensor] = []
    buffer = torch.tensor([4, 5, 0])
    tokens = HostTokens(buffer[:2], buffer, home)
    assert not home
    assert tokens.read() == [4, 5]
    assert len(home) == 1 and home[0] is buffer


def test_on_a_cpu_the_tokens_are_read_where_they_lie() -> None:
    tokens = TokenBuffers(4).to_host(torch.tensor([7, 8]))
    assert tokens.read() == [7, 8]
