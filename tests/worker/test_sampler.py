# SPDX-License-Identifier: Apache-2.0
"""The order of logits processing, the distributions that come out, and that rows do not see each other."""

import math
import random

import pytest
import torch
from torch import Tensor

from headrace.core.output import AdmittedRequest, CachePlan, ScheduledRow, SchedulerOutput
from headrace.core.request import SamplingSpec
from headrace.kernels.sampling import draw, filter_threshold, uniforms
from headrace.worker import sampler
from headrace.worker.input_batch import InputBatch, SamplingRows
from headrace.worker.request_state import RequestState
from headrace.worker.sampler import FAILED, SampledTokens, Sampler
from headrace.worker.upload import StepWords, Uploader

CPU = torch.device("cpu")
# 99.99 % points of chi-square by degrees of freedom.
CHI_SQUARE = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 7: 29.9, 9: 33.7}


def sample(
    logits: Tensor, specs: list[SamplingSpec], tokens: list[list[int]] | None = None, num_prompt: int = 1
) -> SampledTokens:
    """Sample one token for each row of logits, over rows whose tokens so far are given."""
    num_rows, vocab = logits.shape
    tokens = tokens or [[0]] * num_rows
    state = RequestState(num_rows, 32, [4], CPU)
    batch = InputBatch(state, num_rows, 8, vocab)
    admitted = [
        AdmittedRequest(row, tokens[row], num_prompt, len(tokens[row]) - 1, ([0, 1, 2, 3],), specs[row])
        for row in range(num_rows)
    ]
    scheduled = [ScheduledRow(row, 1, True, len(tokens[row]) - 1) for row in range(num_rows)]
    plan = SchedulerOutput(1, [], admitted, [], CachePlan(), scheduled)
    words = StepWords()
    state.stage(plan, words)
    staged = batch.stage(plan, words)
    Uploader(state.words).send(words)
    step = batch.gather(words, staged)
    assert step.sampling is not None
    return Sampler(state)(logits.clone(), step.sampling)


def spec(**settings: object) -> SamplingSpec:
    return SamplingSpec(**{"temperature": 0.0, "max_tokens": 99, **settings})


def tokens_of(logits: list[float], tokens: list[int], num_prompt: int, **settings: object) -> int:
    """The greedy token of one row."""
    return int(sample(torch.tensor([logits]), [spec(**settings)], [tokens], num_prompt).token_ids[0])


def chi_square(counts: Tensor, probs: Tensor) -> float:
    """Of draws against the probabilities of the tokens that can come."""
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


PROBS = torch.tensor([0.35, 0.08, 0.04, 0.12, 0.01, 0.40])


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "allowed"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3, 4, 5]),
        (3, 1.0, 0.0, [0, 3, 5]),
        (0, 0.8, 0.0, [0, 3, 5]),
        (0, 1.0, 0.35, [0, 5]),
        (0, 0.9, 0.15, [0, 3, 5]),
        (3, 0.6, 0.0, [0, 5]),
    ],
)
def test_twenty_thousand_draws_follow_the_filtered_distribution(
    top_k: int, top_p: float, min_p: float, allowed: list[int]
) -> None:
    count = 20_000
    logits = PROBS.log()[None]
    columns = torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p])
    threshold = filter_threshold.choose("cpu")(logits, *columns, 6)
    seeds, zero = torch.arange(count) * 977, torch.zeros(count, dtype=torch.int32)
    got = draw(logits.expand(count, 6), threshold.expand(count), uniforms(seeds, zero, zero))
    counts = torch.bincount(got, minlength=6).float()
    assert counts.nonzero().flatten().tolist() == allowed
    assert chi_square(counts[allowed], PROBS[allowed] / PROBS[allowed].sum()) < CHI_SQUARE[len(allowed) - 1]


def test_the_sampler_draws_what_its_settings_say() -> None:
    count = 3000
    settings = {"temperature": 2.0, "logit_bias": {5: -100.0}, "top_k": 4}
    specs = [spec(seed=i, choice=i % 3, **settings) for i in range(count)]
    counts = torch.bincount(sample(PROBS.log().expand(count, 6), specs).token_ids, minlength=6).float()
    allowed = [0, 1, 2, 3]
    assert counts.nonzero().flatten().tolist() == allowed
    assert chi_square(counts[allowed], (PROBS[allowed].log() / 2.0).softmax(0)) < CHI_SQUARE[3]


def test_uniforms_are_uniform_over_each_of_their_keys() -> None:
    count = 20_000
    zero, up = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    for keys in ((up, zero, zero), (zero, up, zero), (zero, zero, up), (up << 40, zero, zero)):
        numbers = uniforms(*keys)
        assert len(numbers.unique()) > 0.999 * count
        assert chi_square(torch.histc(numbers.float(), 10, 0, 1), torch.full((10,), 0.1)) < CHI_SQUARE[9]
        serial = float(torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1])
        assert abs(serial) < 0.03


def test_a_draw_can_reach_the_last_token_and_never_one_that_is_filtered() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, -math.inf]]).expand(2, 4)
    assert draw(logits, None, torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)).tolist() == [0, 2]


def kept(scores: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What the filters keep, by the book: min_p, then top_k, then top_p of the rest renormalised."""
    weights = [math.exp(s - max(scores)) for s in scores]
    order = sorted(range(len(scores)), key=lambda t: -scores[t])
    order = [t for t in order if weights[t] >= min_p]
    if top_k:
        order = order[:top_k]
    total, before, keep = sum(weights[t] for t in order), 0.0, set()
    for token in order:
        if keep and before >= top_p * total:
            break
        keep.add(token)
        before += weights[token]
    return keep


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_the_filters_keep_what_the_book_says(implementation: str) -> None:
    rng = random.Random(1)
    function = filter_threshold.reference if implementation == "reference" else filter_threshold.choose("cpu")
    for trial in range(60):
        vocab = rng.choice([5, 50, 700])
        spread = rng.choice([0.1, 1.0, 4.0])
        rows = [[rng.gauss(0, spread) for _ in range(vocab)] for _ in range(4)]
        columns = [
            (
                rng.choice([0, 0, 1, 3, vocab, vocab + 5]),
                rng.choice([1.0, 0.1, 0.5, 0.9, 0.999]),
                rng.choice([0.0, 0.0, 0.05, 0.5]),
            )
            for _ in rows
        ]
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*columns, strict=True))
        needs_all = any(p < 1 and not k for k, p, _ in columns)
        candidates = vocab if needs_all else min(max(k for k, _, _ in columns), vocab)
        logits = torch.tensor(rows)
        thresholds = function(logits, top_k.int(), top_p.float(), min_p.float(), candidates)
        for row, (k, p, m) in enumerate(columns):
            got = set((logits[row] >= thresholds[row]).nonzero().flatten().tolist())
            assert got == kept(logits[row].tolist(), k, p, m), (trial, row, k, p, m)


def test_presence_and_frequency_count_output_and_repetition_counts_prompt_too() -> None:
    # Tokens so far: prompt 2, 2, 2; output 1, 1.
    tokens = [2, 2, 2, 1, 1]
    assert tokens_of([0.0, 1.0, 1.05], tokens, 3) == 2
    assert tokens_of([0.9, 1.0, 0.95], tokens, 3, presence_penalty=0.04) == 1
    assert tokens_of([0.9, 1.0, 0.97], tokens, 3, presence_penalty=0.04) == 2
    assert tokens_of([0.9, 1.0, 0.95], tokens, 3, frequency_penalty=0.04) == 2
    assert tokens_of([0.9, 1.0, 1.05], tokens, 3, repetition_penalty=1.2) == 0
    assert tokens_of([-1.3, -1.1, -1.0], tokens, 3, repetition_penalty=1.4) == 0
    # On the first output token nothing but the prompt is there to count.
    assert tokens_of([0.9, 1.0, 1.05], [2, 2, 2], 3, presence_penalty=2.0, frequency_penalty=2.0) == 2


def test_penalties_come_before_the_bias() -> None:
    # (1 / 2) + 1.2 = 1.7 beats 1.65; (1 + 1.2) / 2 = 1.1 would not.
    assert tokens_of([1.65, 1.0], [1], 1, repetition_penalty=2.0, logit_bias={1: 1.2}) == 1


def test_end_and_stop_tokens_cannot_come_before_min_tokens() -> None:
    logits = [1.0, 9.0, 8.0, 2.0]
    wanted = {"eos_token_ids": [1], "stop_token_ids": [2], "logit_bias": {1: 50.0}}
    assert tokens_of(logits, [0, 3], 1, min_tokens=2, **wanted) == 3
    assert tokens_of(logits, [0, 3, 3], 1, min_tokens=2, **wanted) == 1
    assert tokens_of(logits, [0, 3], 1, min_tokens=0, **wanted) == 1


@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-12}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}]
)
def test_settings_that_leave_one_token_are_greedy(settings: dict[str, object]) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(2))
    specs = [spec(**{"temperature": 1.0, "seed": i, **settings}) for i in range(50)]
    assert torch.equal(sample(logits, specs).token_ids, logits.argmax(1))


def mixed_specs() -> list[SamplingSpec]:
    """Rows that differ in every setting."""
    rng = random.Random(5)
    made = []
    for i in range(24):
        settings: dict[str, object] = {"seed": i * 7919, "temperature": rng.choice([0.0, 0.7, 1.3])}
        for name, values in {
            "top_k": [0, 5, 40], "top_p": [1.0, 0.9, 0.3], "min_p": [0.0, 0.1], "presence_penalty": [0.0, 0.8],
            "repetition_penalty": [1.0, 1.3], "logit_bias": [{}, {3: 2.0, 9: -100.0}, {1: 1.0}],
            "min_tokens": [0, 5], "logprobs": [None, 0, 4],
        }.items():  # fmt: skip
            settings[name] = rng.choice(values)
        made.append(spec(eos_token_ids=[2, 7], stop_token_ids=[8, i], **settings))
    return made


def test_a_rows_token_and_logprobs_do_not_depend_on_the_batch() -> None:
    specs = mixed_specs()
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(specs), 200, generator=generator) * 2
    tokens = torch.randint(0, 200, (len(specs), 9), generator=generator).tolist()
    together = sample(logits, specs, tokens, 4)
    assert together.logprobs is not None
    with_logprobs = [i for i, each in enumerate(specs) if each.logprobs is not None]
    for row, each in enumerate(specs):
        alone = sample(logits[row : row + 1], [each], [tokens[row]], 4)
        assert alone.token_ids[0] == together.token_ids[row]
        if alone.logprobs is not None:
            own = with_logprobs.index(row)
            width = 1 + (each.logprobs or 0)
            for mine, theirs in zip(alone.logprobs[:2], together.logprobs[:2], strict=True):
                torch.testing.assert_close(mine[0, :width], theirs[own, :width])


@pytest.mark.parametrize("rows_at_once", [1, 5, 23])
def test_rows_in_pieces_get_what_they_get_together(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    specs = mixed_specs()
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(specs), 200, generator=generator) * 2
    tokens = torch.randint(0, 200, (len(specs), 9), generator=generator).tolist()
    together = sample(logits, specs, tokens, 4)
    pieces: list[int] = []
    whole = Sampler._sample

    def noted(self: Sampler, logits: Tensor, sampling: SamplingRows) -> SampledTokens:
        pieces.append(len(logits))
        return whole(self, logits, sampling)

    monkeypatch.setattr(Sampler, "_sample", noted)
    monkeypatch.setattr(sampler, "SAMPLER_PIECE_BYTES", rows_at_once * 200 * 4)
    apart = sample(logits, specs, tokens, 4)
    assert max(pieces) == rows_at_once and sum(pieces) == len(specs)
    assert torch.equal(apart.token_ids, together.token_ids)
    assert apart.logprobs is not None and together.logprobs is not None
    for mine, theirs in zip(apart.logprobs, together.logprobs, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_log_probabilities_are_taken_before_every_edit() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    edits = spec(temperature=0.5, logit_bias={1: -100.0}, top_k=1, repetition_penalty=1.5, logprobs=3)
    got = sample(logits, [edits], [[2, 2]])
    assert got.token_ids.tolist() == [2]
    assert got.logprobs is not None
    ids, scores, ranks = got.logprobs
    assert ids.tolist() == [[2, 1, 2, 0]]
    torch.testing.assert_close(scores[0], logits[0].log_softmax(0)[[2, 1, 2, 0]])
    assert ranks.tolist() == [2]


def test_rows_without_a_finite_maximum_fail_alone() -> None:
    logits = torch.zeros(5, 9)
    logits[:, 4] = 1.0
    logits[1, 3] = math.nan
    logits[2] = -math.inf
    logits[3, 0] = math.inf
    for temperature in (0.0, 1e-3):
        got = sample(logits, [spec(temperature=temperature, seed=i, top_p=0.9, logprobs=2) for i in range(5)])
        assert got.token_ids.tolist() == [4, FAILED, FAILED, FAILED, 4]


def test_a_greedy_batch_does_nothing_but_an_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sort", "topk", "softmax", "cumsum"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a greedy batch needs no such pass"))
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample(logits, [spec()] * 4).token_ids, logits.argmax(1))
