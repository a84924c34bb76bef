# SPDX-License-Identifier: Apache-2.0
"""Dataset files: TensorRT-LLM's lines, what comes back, and one sentence for each bad one."""

import json
from pathlib import Path

import pytest

from headrace.bench.dataset import (
    BenchRequest,
    apart,
    as_line,
    check_lengths,
    read_dataset,
    with_ids,
    with_text,
    write_dataset,
)
from headrace.errors import ConfigError

REQUESTS = [
    BenchRequest(0, 4, (1, 2, 3)),
    BenchRequest("b", 1, prompt="Grüße\n世界"),
    BenchRequest(2, 2, (5,), conversation="7"),
    BenchRequest(3, 9, (5, 6), shares_prefix=True),
]


def written(folder: Path, *lines: str) -> str:
    path = folder / "set.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = str(tmp_path / "set.jsonl")
    write_dataset(REQUESTS, path)
    assert read_dataset(path) == REQUESTS
    assert [request.is_warm for request in REQUESTS] == [False, False, True, True]


def test_a_line_is_tensorrt_llms() -> None:
    assert json.loads(as_line(REQUESTS[0])) == {"task_id": 0, "input_ids": [1, 2, 3], "output_tokens": 4}
    assert json.loads(as_line(REQUESTS[1])) == {"task_id": "b", "prompt": "Grüße\n世界", "output_tokens": 1}


def test_blank_lines_and_foreign_keys_are_passed_over(tmp_path: Path) -> None:
    path = written(tmp_path, "", '{"input_ids": [3], "prompt": "x", "output_tokens": 2, "lora_request": null}', "  ")
    assert read_dataset(path) == [BenchRequest("2", 2, (3,))]
    assert read_dataset(written(tmp_path, '{"task_id": 1, "logits": [8, 9], "output_tokens": 2}'))[0].input_ids == (
        8,
        9,
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"task_id": 1, "output_tokens": 4}', "line 2 has no tokens: give input_ids, or prompt as text."),
        ('{"prompt": "", "output_tokens": 4}', "line 2 has no tokens"),
        ('{"input_ids": [], "output_tokens": 4}', "line 2: input_ids must be a list of token ids with at least one."),
        ('{"input_ids": [1, -2], "output_tokens": 4}', "line 2: input_ids must be"),
        ('{"input_ids": [true], "output_tokens": 4}', "line 2: input_ids must be"),
        ('{"input_ids": [1]}', "line 2 has no output_tokens; it must be a whole number from 1."),
        ('{"input_ids": [1], "output_tokens": 0}', "line 2 has output_tokens 0; it must be"),
        ('{"input_ids": [1], "output_tokens": "8"}', "line 2 has output_tokens '8'; it must be"),
        ("[1, 2]", "line 2 must be a JSON object"),
        ("{", "line 2 is not JSON"),
        (
            '{"input_ids": [1], "output_tokens": 1, "lora_request": {"lora_name": "a"}}',
            "line 2 has lora_request, which is not supported yet",
        ),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(line: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, as_line(REQUESTS[0]), line)
    with pytest.raises(ConfigError) as caught:
        read_dataset(path)
    assert caught.value.message.startswith(f"dataset {path}, {said}")
    assert "\n" not in caught.value.message


def test_a_file_that_is_missing_or_empty_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^dataset /no/such cannot be read: No such file or directory\.$"):
        read_dataset("/no/such")
    with pytest.raises(ConfigError, match="holds no request"):
        read_dataset(written(tmp_path, "", ""))
    with pytest.raises(ConfigError, match="cannot be written: No such file or directory"):
        write_dataset(REQUESTS, "/no/such/folder/x")


def test_what_the_engine_would_refuse_is_refused_before() -> None:
    check_lengths([BenchRequest(0, 4, (1, 2, 3))], 7, 4)
    with pytest.raises(
        ConfigError, match="Request 0 has 3 prompt and 5 output tokens: 8 are over max_seq_len, which is 7"
    ):
        check_lengths([BenchRequest(0, 5, (1, 2, 3))], 7, 4)
    with pytest.raises(ConfigError, match="holds the token id 4; this model's vocabulary goes from 0 to 3"):
        check_lengths([BenchRequest(0, 1, (1, 4))], 7, 4)


def test_text_becomes_ids_and_ids_text_and_nothing_else_changes() -> None:
    encoded = with_ids(REQUESTS, lambda text: list(text.encode()))
    assert encoded[0] is REQUESTS[0]
    assert encoded[1] == BenchRequest("b", 1, tuple("Grüße\n世界".encode()))
    decoded = with_text(encoded, lambda ids: bytes(ids).decode())
    assert decoded[1] == REQUESTS[1]
    assert decoded[2].conversation == "7"


def test_levels_have_no_first_token_in_common_and_keep_what_is_shared_within() -> None:
    base = [BenchRequest(i, 1, (first, 50, 60 + i)) for i, first in enumerate((1, 1, 2, 3))]
    seen = [tuple(request.input_ids or () for request in apart(base, level)) for level in range(4)]
    for level, ids in enumerate(seen):
        assert [len(one) for one in ids] == [3, 3, 3, 3]
        assert (ids[0][0] == ids[1][0]) and len({one[0] for one in ids}) == 3, level
    firsts = [[one[0] for one in ids] for ids in seen]
    assert all(len({level[i] for level in firsts}) == 4 for i in range(4))
    assert apart([REQUESTS[1]], 3)[0].prompt == "(3) Grüße\n世界"
