# SPDX-License-Identifier: Apache-2.0
"""KV cache events of a whole engine: what the cache really does, as a reader of `LLM.get_kv_cache_events` sees it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.core.block_hash import as_int, chain
from headrace.engine.core_client import CoreOptions
from headrace.engine.llm import LLM

SIZE = 32


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in events if event["data"]["type"] == kind]


def stored(events: list[dict[str, Any]]) -> list[int]:
    return [block["block_hash"] for data in of_kind(events, "stored") for block in data["blocks"]]


def removed(events: list[dict[str, Any]]) -> list[int]:
    return [block_hash for data in of_kind(events, "removed") for block_hash in data["block_hashes"]]


def hashes(prompt: list[int], salt: str | None = None) -> list[int]:
    return [as_int(each) for each in chain((salt,), prompt, SIZE)]


@pytest.fixture
def llm(model_folder: Path, core_options: Callable[..., CoreOptions], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The fake worker has 64 blocks."""
    monkeypatch.setattr(CoreOptions, "from_environment", lambda: core_options(in_process=True))
    with LLM(str(model_folder), load_format="dummy", kv_cache_config={"event_buffer_max_size": 10_000}) as made:
        yield made


def test_what_is_stored_once_is_found_and_not_stored_again(llm: LLM) -> None:
    (first,) = llm.get_kv_cache_events()
    assert (first["event_id"], first["data"]["type"]) == (0, "created")
    assert first["data"]["num_blocks_per_cache_level"][0] == llm.info.num_blocks
    prompt = [(7 * i) % 250 for i in range(3 * SIZE + 1)]
    params = {"max_tokens": SIZE}
    output = llm.generate(prompt, params).outputs[0]
    events = llm.get_kv_cache_events()
    # Generated tokens too; the last one's KV is never computed.
    known = (prompt + output.token_ids)[:-1]
    assert stored(events) == hashes(known) and len(stored(events)) == 4
    assert of_kind(events, "stored")[0]["parent_hash"] is None
    tokens = [t["token_id"] for d in of_kind(events, "stored") for b in d["blocks"] for t in b["tokens"]]
    assert tokens == known[: 4 * SIZE]
    again = llm.generate(prompt, params)
    assert again.num_cached_tokens == 3 * SIZE
    assert llm.get_kv_cache_events() == []
    llm.generate(prompt, params, cache_salt="s")
    salted = llm.get_kv_cache_events()
    assert stored(salted) == hashes(known, "s") and not set(stored(salted)) & set(stored(events))
    assert {block["cache_salt"] for data in of_kind(salted, "stored") for block in data["blocks"]} == {"s"}


def test_what_is_evicted_is_removed_once_and_the_rest_is_there(llm: LLM) -> None:
    prompts = [[(i * j) % 251 for j in range(1, 5 * SIZE + 2)] for i in range(1, 41)]
    there: set[int] = set()
    for prompt in prompts:
        llm.generate(prompt, {"max_tokens": 1})
        for event in llm.get_kv_cache_events():
            new, gone = stored([event]), removed([event])
            assert not there & set(new) and set(gone) <= there
            there = (there | set(new)) - set(gone)
        assert set(hashes(prompt)) <= there and len(there) <= llm.info.num_blocks
    for prompt in prompts[::-1]:
        known = hashes(prompt)
        found = next((i for i, each in enumerate(known) if each not in there), len(known))
        if found:
            # The whole of a hit, and no more, is what the events say is there.
            assert llm.generate(prompt, {"max_tokens": 1}).num_cached_tokens == found * SIZE
            break


def test_retention_shows_as_the_priority_of_the_blocks(llm: LLM) -> None:
    prompt = [(3 * i) % 250 for i in range(4 * SIZE)]
    keep = {
        "token_range_retention_configs": [{"token_start": SIZE, "token_end": 2 * SIZE + 1, "priority": 90}],
        "decode_retention_priority": 10,
    }
    llm.generate(prompt, {"max_tokens": SIZE + 1}, kv_cache_retention_config=keep)
    found = [b["priority"] for d in of_kind(llm.get_kv_cache_events(), "stored") for b in d["blocks"]]
    assert found == [35, 90, 90, 35, 10]
