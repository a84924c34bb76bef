# SPDX-License-Identifier: Apache-2.0
"""`KvCacheRetentionConfig`: what is taken, and the sentence for what is not."""

from datetime import timedelta
from typing import Any

import pytest

from headrace.errors import RequestError
from headrace.kv_cache_retention import KvCacheRetentionConfig

Range = KvCacheRetentionConfig.TokenRangeRetentionConfig
RANGE = {"token_start": 0, "token_end": 10, "priority": 80}


def test_it_is_made_as_tensorrt_llms_is() -> None:
    by_place = KvCacheRetentionConfig([Range(0, 10, 80, timedelta(seconds=2)), Range(10, None, 5)], 90, 500)
    by_name = KvCacheRetentionConfig(
        token_range_retention_configs=[{**RANGE, "duration_ms": 2000}, {"token_start": 10, "priority": 5}],
        decode_retention_priority=90,
        decode_duration_ms=500,
        transfer_mode="DRAM",
        directory="",
    )
    assert by_place == by_name
    assert by_place.token_range_retention_configs[0].duration_ms == 2000
    nothing = KvCacheRetentionConfig()
    assert (nothing.token_range_retention_configs, nothing.decode_retention_priority) == ([], 35)
    with pytest.raises(TypeError, match="takes 3 values, not 4"):
        KvCacheRetentionConfig([], 1, 2, 3)


def test_ranges_come_in_any_order_and_may_touch() -> None:
    config = KvCacheRetentionConfig([Range(20, None, 1), Range(0, 10, 2), Range(10, 20, 3)])
    assert [each.priority for each in config.ordered] == [2, 3, 1]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"token_range_retention_configs": [RANGE, {**RANGE, "token_start": 5, "priority": 101}]},
            "token_range_retention_configs[1]: priority must be from 0 to 100, but is 101.",
        ),
        (
            {"token_range_retention_configs": [{**RANGE, "duration_ms": -1}]},
            "token_range_retention_configs[0]: duration_ms must be from 0 to 9007199254740992 milliseconds, but is -1.",
        ),
        (
            {"token_range_retention_configs": [{**RANGE, "token_start": -1}]},
            "token_range_retention_configs[0]: token_start must be 0 or more, but is -1.",
        ),
        (
            {"token_range_retention_configs": [{**RANGE, "token_end": 0}]},
            "token_range_retention_configs[0]: token_end (0) must be above token_start (0).",
        ),
        (
            {"token_range_retention_configs": [{**RANGE, "token_start": 9, "token_end": 20}, RANGE]},
            "token_range_retention_configs overlap: 0 to 10 and 9 to 20; a token may be in one range.",
        ),
        (
            {"token_range_retention_configs": [{"token_start": 3, "priority": 1}, {**RANGE, "token_start": 5}]},
            "token_range_retention_configs overlap: 3 to the end and 5 to 10; a token may be in one range.",
        ),
        (
            {"token_range_retention_configs": [{"token_start": 0}]},
            "token_range_retention_configs[0].priority is missing.",
        ),
        ({"token_range_retention_configs": 3}, "token_range_retention_configs must be a list, but holds 3."),
        (
            {"token_range_retention_configs": [3]},
            "token_range_retention_configs[0] must be a mapping of its fields, but holds 3.",
        ),
        ({"decode_retention_priority": -1}, "decode_retention_priority must be from 0 to 100, but is -1."),
        ({"decode_retention_priority": True}, "decode_retention_priority must be a whole number, but holds True."),
        (
            {"decode_duration_ms": 2**60},
            f"decode_duration_ms must be from 0 to 9007199254740992 milliseconds, but is {2**60}.",
        ),
        ({"transfer_mode": "GDS"}, "transfer_mode = 'GDS' is not supported yet; leave it out."),
    ],
)
def test_what_is_wrong_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as caught:
        KvCacheRetentionConfig(**fields)
    assert caught.value.message == f"kv_cache_retention_config: {sentence}"
    assert caught.value.param == "kv_cache_retention_config"


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"no field decode_priority; the nearest is decode_retention_priority\.$"):
        KvCacheRetentionConfig(decode_priority=3)
    with pytest.raises(RequestError, match=r"no field token_range_retention_configs\[0\]\.token_stop"):
        KvCacheRetentionConfig(token_range_retention_configs=[{**RANGE, "token_stop": 3}])
