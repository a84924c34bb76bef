# SPDX-License-Identifier: Apache-2.0
"""Plans become the tokens that a cache-less run gives, whatever the batch, chunking, depth and reuse."""

import math
import random
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch
from stand_in import VOCAB, Bench, StandIn

from headrace.core.output import CachePlan, RequestDelta
from headrace.worker.launch_queue import ThreadQueue


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def prompts(count: int, longest: int = 40) -> dict[str, list[int]]:
    """Different lengths, some that share their beginning."""
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB) for _ in range(longest)]
    made = {}
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))]
        made[f"r{i}"] = shared[: rng.randrange(longest)] + own[:5] if i % 3 == 0 else own
    return made


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_chunked_batched_requests_get_the_tokens_of_a_run_alone(depth: int, is_padded: bool) -> None:
    bench = Bench(max_prefill_tokens=5, max_num_tokens=12, is_padded=is_padded)
    wanted = {}
    for name, prompt in prompts(11).items():
        bench.add(name, prompt, max_tokens=9)
        wanted[name] = bench.model.greedy(prompt, 9)
    assert bench.run(depth) == wanted
    bench.close()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_requests_resume_with_the_same_tokens(depth: int, is_padded: bool) -> None:
    bench = Bench(num_blocks=25, max_batch_size=4, is_padded=is_padded)
    wanted = {}
    for name, prompt in prompts(6, 20).items():
        bench.add(name, prompt, max_tokens=40)
        wanted[name] = bench.model.greedy(prompt, 40)
    assert bench.run(depth) == wanted
    assert bench.scheduler.counters.num_preemptions > 0
    bench.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_padded_steps_give_every_kind_of_row_what_plain_ones_do(depth: int) -> None:
    kinds = [
        {},
        {"temperature": 0.8, "seed": 3, "top_k": 20},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"repetition_penalty": 1.3, "logit_bias": {3: 1.5}},
        {"min_tokens": 6, "eos_token_ids": list(range(0, VOCAB, 2))},
    ]
    deltas = []
    for is_padded in (False, True):
        bench = Bench(max_prefill_tokens=9, max_num_tokens=20, is_padded=is_padded)
        for index, (name, prompt) in enumerate(prompts(12).items()):
            bench.add(name, prompt, **kinds[index % len(kinds)])
        bench.run(depth)
        deltas.append({name: [_apart(delta) for delta in each] for name, each in bench.deltas.items()})
        bench.close()
    plain, padded = deltas
    assert plain.keys() == padded.keys()
    for name, expected in plain.items():
        for (delta, scores), (other, others) in zip(expected, padded[name], strict=True):
            assert delta == other
            # Not to the bit: a product of more rows may sum in another order.
            assert scores == pytest.approx(others, rel=1e-5, abs=1e-5)


def _apart(delta: RequestDelta) -> tuple[RequestDelta, list[float]]:
    """A delta without its log-probabilities' values, and these."""
    scores = [score for each in (*(delta.logprobs or ()), *(delta.prompt_logprobs or ())) for score in each.logprobs]
    bare = {
        name: None if each is None else [msgspec.structs.replace(one, logprobs=[]) for one in each]
        for name, each in (("logprobs", delta.logprobs), ("prompt_logprobs", delta.prompt_logprobs))
    }
    return msgspec.structs.replace(delta, **bare), scores


def test_reused_prefixes_give_the_same_tokens(bench: Bench) -> None:
    prompt = [i * 7 % VOCAB for i in range(30)]
    for name in ("cold", "warm"):
        bench.add(name, prompt)
        bench.run()
    assert bench.deltas["warm"][-1].num_cached_tokens > 0
    tokens = {name: [t for d in bench.deltas[name] for t in d.new_token_ids] for name in ("cold", "warm")}
    assert tokens["warm"] == tokens["cold"] == bench.model.greedy(prompt, 8)


def test_a_row_given_back_serves_the_next_request_at_once() -> None:
    bench = Bench(max_batch_size=1)
    wanted = {}
    for name, prompt in prompts(5).items():
        bench.add(name, prompt, max_tokens=3, min_tokens=2, eos_token_ids=[1], logit_bias={5: 0.1})
        wanted[name] = 3
    assert {name: len(tokens) for name, tokens in bench.run().items()} == wanted
    bench.close()


def test_the_host_is_ahead_of_a_slow_device() -> None:
    gate = threading.Event()
    queue = ThreadQueue(1)
    queue.submit(gate.wait)
    bench = Bench(queue=queue)
    bench.add("a", [1, 2, 3], max_tokens=4)
    plans = [bench.scheduler.schedule() for _ in range(3)]
    pending = [bench.launch(plan) for plan in plans if plan is not None]
    assert len(pending) == 3
    gate.set()
    tokens = [output.wait().token_ids[0] for output in pending]
    assert tokens == bench.model.greedy([1, 2, 3], 3)
    bench.close()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_with_nan_logits_fails_alone(depth: int, is_padded: bool) -> None:
    model = StandIn()
    good = {"a": [1, 2, 3], "c": [4, 5]}
    seen = {t for prompt in good.values() for t in prompt + model.greedy(prompt, 8)}
    model.broken_token = next(t for t in range(VOCAB) if t not in seen)
    bench = Bench(model, is_padded=is_padded)
    bench.add("a", good["a"])
    bench.add("b", [9, model.broken_token])
    bench.add("c", good["c"])
    tokens = bench.run(depth)
    assert bench.deltas["b"][-1].finish_reason == "error"
    assert "NaN" in bench.deltas["b"][-1].error
    assert tokens["a"] == model.greedy(good["a"], 8)
    assert tokens["c"] == model.greedy(good["c"], 8)
    bench.close()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_exception_ends_its_steps_requests_and_the_worker_goes_on(depth: int, is_padded: bool) -> None:
    bench = Bench(is_padded=is_padded)
    bench.add("a", [1, 2, 3])
    bench.model.raises = ValueError("no such luck")
    bench.run(depth)
    assert bench.deltas["a"][-1].finish_reason == "error"
    assert "no such luck" in bench.deltas["a"][-1].error
    bench.add("b", [1, 2, 3])
    assert bench.run(depth)["b"] == bench.model.greedy([1, 2, 3], 8)
    bench.close()


def test_too_many_bias_entries_fail_that_request_alone(bench: Bench) -> None:
    bench.add("a", [1, 2, 3], logit_bias=dict.fromkeys(range(2000), 1.0))
    bench.add("b", [1, 2, 3])
    bench.run()
    assert "logit_bias" in bench.deltas["a"][-1].error
    assert [t for d in bench.deltas["b"] for t in d.new_token_ids] == bench.model.greedy([1, 2, 3], 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_log_probabilities_are_those_of_the_raw_logits(depth: int) -> None:
    bench = Bench(max_prefill_tokens=3, max_num_tokens=7)
    prompt = [5, 9, 2, 2, 40, 17, 3, 8, 11, 1]
    bench.add("a", prompt, logprobs=2, prompt_logprobs=3, temperature=0.7, seed=3, logit_bias={4: 2.0})
    bench.add("b", prompt[:4], logprobs=0, max_tokens=5, frequency_penalty=0.5)
    bench.add("c", [1])
    bench.run(depth)
    tokens = prompt + [t for d in bench.deltas["a"] for t in d.new_token_ids]
    asked = [e for d in bench.deltas["a"] for e in d.prompt_logprobs or []]
    sampled = [e for d in bench.deltas["a"] for e in d.logprobs or []]
    assert len(asked) == len(prompt) - 1
    assert len(sampled) == 8
    for index, entry in enumerate(asked + sampled, start=1):
        scores = bench.model.logits(tokens[:index]).log_softmax(0)
        num_top = 3 if index < len(prompt) else 2
        assert entry.token_ids == [tokens[index], *scores.topk(num_top).indices.tolist()]
        assert entry.logprobs == pytest.approx([float(scores[t]) for t in entry.token_ids], abs=1e-4)
        assert entry.ranks == [int((scores > scores[tokens[index]]).sum()) + 1, *range(1, num_top + 1)]
    plain = [e for d in bench.deltas["b"] for e in d.logprobs]
    assert all(len(e.token_ids) == 1 and not math.isnan(e.logprobs[0]) for e in plain)
    assert all(d.logprobs is None for d in bench.deltas["c"])


def test_a_seed_gives_the_same_tokens_whatever_the_row_batch_and_step() -> None:
    def tokens(others: int, depth: int, max_num_tokens: int) -> list[int]:
        bench = Bench(StandIn(0.15), max_num_tokens=max_num_tokens, max_prefill_tokens=4)
        rng = random.Random(others)
        for i in range(others):
            bench.add(f"o{i}", [rng.randrange(VOCAB)] * (i + 1), temperature=1.0, seed=i, top_k=i, max_tokens=6 + i)
        bench.add("a", [3, 1, 4, 1, 5, 9, 2, 6], temperature=0.9, top_p=0.95, seed=2**64 - 5, max_tokens=20)
        got = bench.run(depth)["a"]
        bench.close()
        return got

    alone = tokens(0, 1, 64)
    assert len(set(alone)) > 5
    assert tokens(3, 2, 64) == tokens(6, 1, 9) == alone


def test_choices_of_one_seed_differ() -> None:
    bench = Bench(StandIn(0.2))
    for choice in range(3):
        bench.add(f"c{choice}", [1, 2, 3], temperature=1.0, seed=11, choice=choice, max_tokens=12)
    assert len({tuple(t) for t in bench.run().values()}) == 3
    bench.close()


def test_block_copies_of_a_plan_come_before_its_step(bench: Bench) -> None:
    arena = bench.runner.arenas.groups[0]
    arena[3], arena[4] = 7.0, 8.0
    bench.add("a", [1])
    plan = bench.scheduler.schedule()
    assert plan is not None
    plan = msgspec.structs.replace(plan, cache_plan=CachePlan([(0, 3, 9), (0, 4, 11)]))
    bench.execute(plan)
    assert torch.equal(arena[9], arena[3])
    assert torch.equal(arena[11], arena[4])


def test_a_new_block_that_is_copied_into_keeps_the_copy(bench: Bench) -> None:
    arena = bench.runner.arenas.groups[0]
    arena[:] = torch.arange(len(arena)).view(-1, 1, 1, 1, 1)
    bench.add("a", [1, 2, 3, 4, 5])
    plan = bench.scheduler.schedule()
    assert plan is not None
    first, second = plan.admitted[0].block_ids[0]
    others = [block for block in range(20, 30) if block not in (first, second)]
    # Into its second block, of which the row writes one token, a copy of a copy comes.
    copies = [(0, others[0], others[1]), (0, others[1], second)]
    bench.execute(msgspec.structs.replace(plan, cache_plan=CachePlan(copies)))
    assert arena[others[1]].eq(others[0]).all()
    layer = bench.runner.arenas.layers[1]
    assert layer[second, :, :, 1:].eq(others[0]).all() and not layer[second, 1, :, 0].eq(others[0]).any()
    assert layer[first, 1, 0, :, 0].tolist() == [0, 1, 2, 3]
