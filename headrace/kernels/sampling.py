# SPDX-License-Identifier: Apache-2.0
"""Picking a token: edits of the logits, the filters as one threshold, random numbers, the draw.

Rows never look at each other, so a row's token does not depend on the batch. Nothing here sorts the vocabulary for a
row without `top_p`, and a row with `top_k` sorts its `top_k` best only.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cpu, on_cuda, op

# Where top_p alone decides, tokens less probable than this are looked at only if the others do not reach top_p.
_FIRST_FLOORS = (1e-4, 1e-5, 1e-6)
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def uniform_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Seeds over all 64 bits; positions and choices that differ in one bit."""
    if dtype == torch.float32:
        seeds = torch.tensor([0, 1, -1, 2**62, -(2**63), 7, 7, 7])
        positions = torch.tensor([0, 1, 2, 2**30, 0, 3, 3, 4], dtype=torch.int32)
        choices = torch.tensor([0, 0, 1, 0, 5, 0, 1, 0], dtype=torch.int32)
        yield Case("keys", (seeds.to(device), positions.to(device), choices.to(device)))


def penalty_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Rows with repeated tokens, one with a prompt only, one with no penalty."""
    if dtype == torch.float32:
        generator = _generator()
        columns = ([3, 8, 8], [3, 2, 8], [1.3, 1.3, 1.0], [0.5, 0.0, 0.0], [0.2, 0.7, 0.0])
        kinds = (torch.int32, torch.int32, torch.float32, torch.float32, torch.float32)
        rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
        token_ids = torch.randint(0, 9, (5, 16), generator=generator, dtype=torch.int32)
        logits = torch.randn(3, 100, generator=generator).to(device)
        made = [torch.tensor(c, dtype=k, device=device) for c, k in zip(columns, kinds, strict=True)]
        yield Case("3x100", (logits, token_ids.to(device), rows, *made, 8))


def add_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A row with unused entries, one with an id twice, one with none; a ban."""
    if dtype == torch.float32:
        logits = torch.randn(3, 50, generator=_generator())
        ids = torch.tensor([[0, 49, -1], [7, 7, 3], [-1, -1, -1]], dtype=torch.int32)
        values = torch.tensor([[-math.inf, 2.0, 9.0], [1.0, 1.0, -100.0], [0.0, 1.0, 2.0]])
        yield Case("3x50", (logits.to(device), ids.to(device), values.to(device)))


def filter_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Each filter alone and all together, flat and peaked rows, over a short and a long vocabulary."""
    if dtype != torch.float32:
        return
    for vocab, candidates in ((100, 100), (5000, 5000), (5000, 40), (300, 0)):
        top_k = torch.tensor([0, 1, 40, 0, 17, 3], dtype=torch.int32)
        top_p = torch.tensor([0.9, 0.5, 0.95, 1.0, 1.0, 0.3])
        if candidates < vocab:
            top_p[0] = 1.0
        if candidates == 0:
            top_k.zero_()
            top_p.fill_(1.0)
        min_p = torch.tensor([0.0, 0.0, 0.01, 0.05, 0.0, 0.2])
        spread = torch.tensor([0.1, 1.0, 3.0, 5.0, 2.0, 1.0])
        logits = torch.randn(6, vocab, generator=_generator()) * spread[:, None]
        args = [t.to(device) for t in (logits, top_k, top_p, min_p)]
        yield Case(f"{vocab}/{candidates}", (*args, candidates), logits.nbytes)


def draw_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Draws at both ends of the distribution and between, with and without a threshold."""
    if dtype == torch.float32:
        logits = torch.randn(4, 1000, generator=_generator()).to(device)
        uniform = torch.tensor([2.0**-33, 0.3, 0.7, 1 - 2.0**-33], dtype=torch.float64, device=device)
        yield Case("all", (logits, None, uniform), logits.nbytes)
        yield Case("some", (logits, logits.topk(20).values[:, -1], uniform), logits.nbytes)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser over int64 that wraps; shifts are made logical by masks."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@op(cases=uniform_cases)
def uniforms(seeds: Tensor, positions: Tensor, choices: Tensor) -> Tensor:
    """One random number in (0, 1) per row, a pure function of its three keys.

    seeds: int64 [n] (64 bits, as a signed number). positions: [n], the output position of the token to draw.
    choices: [n]. Returns fp64 [n], never 0 and never 1, with 32 random bits.
    """
    keyed = _mix(seeds + _GOLDEN)
    keyed = _mix(keyed ^ ((positions.long() << 32) | choices.long()))
    bits = (keyed >> 32) & 0xFFFFFFFF
    return (bits.double() + 0.5) * 2.0**-32


@op(cases=penalty_cases)
def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    max_len: int,
) -> Tensor:
    """Lower, in place, the logits of tokens that a row already holds.

    logits: fp32 [n, vocab]. token_ids: int32 [all rows, capacity]; `rows` [n] picks from it. The other columns are [n].
    Repetition counts prompt and output: a positive logit is divided, a negative one multiplied. Presence is taken off
    once, frequency once per occurrence, of output tokens only. max_len: at least the largest of `num_tokens`.
    """
    held = token_ids[rows, :max_len].long()
    at = torch.arange(max_len, device=logits.device)
    valid = at < num_tokens[:, None]
    # A place past the end repeats the row's first token: it is written the same value twice.
    held = torch.where(valid, held, held[:, :1])
    is_output = valid & (at >= num_prompt_tokens[:, None])
    counts = torch.zeros_like(logits).scatter_add_(1, held, is_output.to(logits.dtype)).gather(1, held)
    value = logits.gather(1, held)
    value = torch.where(value > 0, value / repetition[:, None], value * repetition[:, None])
    value = value - counts * frequency[:, None] - (counts > 0) * presence[:, None]
    return logits.scatter_(1, held, value)


@op(cases=add_cases)
def add_at(logits: Tensor, token_ids: Tensor, values: Tensor) -> Tensor:
    """Add, in place, `values` [n, width] to logits [n, vocab] at `token_ids` [n, width]; an id of -1 is no entry."""
    used = token_ids >= 0
    return logits.scatter_add_(1, token_ids.clamp(min=0).long(), torch.where(used, values, 0.0))


@op(cases=filter_cases)
def filter_threshold(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_candidates: int) -> Tensor:
    """The lowest logit that each row's filters keep: fp32 [n]; a token is kept when its logit is not below it.

    logits: fp32 [n, vocab], temperature applied. top_k: int32 [n], 0 is off. top_p, min_p: fp32 [n], 1 and 0 are off.
    num_candidates: how many of a row's best the filters can need: 0 where no row has top_k or top_p, the vocabulary
    where a row has top_p without top_k, else the largest top_k. min_p first, then top_k, then top_p over what these
    leave, renormalised. Tokens that tie with the last one kept are kept.
    """
    vocab = logits.shape[1]
    lowest = logits.amax(1) + torch.log(min_p)
    if num_candidates == 0:
        return lowest
    if num_candidates >= vocab:
        best = logits.sort(dim=1, descending=True).values
    else:
        best = logits.topk(num_candidates, dim=1).values
    place = torch.arange(best.shape[1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, vocab)
    keep = (place < limit[:, None]) & (best >= lowest[:, None])
    # Not left to the sum where top_p is off: in fp32 it reaches 1 before the last token.
    keep &= (_mass_before(torch.where(keep, best, -math.inf)) < top_p[:, None]) | (top_p >= 1)[:, None]
    keep[:, 0] = True
    last = keep.sum(1) - 1
    # Without top_k a row's tail may lie past the candidates of its neighbours; it has no top_p then either.
    unlimited = (top_k <= 0) & (top_p >= 1)
    return torch.where(unlimited, lowest, best.gather(1, last[:, None]).squeeze(1))


def _mass_before(best: Tensor) -> Tensor:
    """Probability of the candidates before each one; best: [n, candidates], descending."""
    probs = best.softmax(1)
    return probs.cumsum(1) - probs


@filter_threshold.impl("cpu", on_cpu)
def filter_threshold_cpu(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, num_candidates: int) -> Tensor:
    """Row by row, sorting only the tokens that can matter: a full sort of 49k logits costs 3.7 ms here, this 0.2."""
    lowest = logits.amax(1) + torch.log(min_p)
    if num_candidates == 0:
        return lowest
    peaks = logits.amax(1).tolist()
    for row, (k, p, peak) in enumerate(zip(top_k.tolist(), top_p.tolist(), peaks, strict=True)):
        scores = logits[row]
        if not math.isfinite(peak):
            continue
        if 0 < k < scores.shape[0]:
            best = scores.topk(k).values
            best = best[best >= lowest[row]]
            mass = None
        elif p < 1:
            best, mass = _candidates_for_mass(scores, peak, float(lowest[row]), p)
        else:
            continue
        last = best.shape[0] if p >= 1 else _num_before(best, p, mass)
        lowest[row] = best[last - 1]
    return lowest


def _num_before(best: Tensor, top_p: float, mass: float | None) -> int:
    """How many of the descending `best` begin below `top_p` of `mass` (None: their own sum, in units of the first)."""
    weights = (best - best[0]).exp()
    running = weights.cumsum(0)
    total = running[-1] if mass is None else mass
    return max(int((running - weights < top_p * total).sum()), 1)


def _candidates_for_mass(scores: Tensor, peak: float, lowest: float, top_p: float) -> tuple[Tensor, float]:
    """Enough of the scores not below `lowest`, descending, to hold `top_p`; and the mass of all of them."""
    total = float(torch.where(scores >= lowest, scores - peak, -math.inf).exp().sum())
    for floor in _FIRST_FLOORS:
        cut = peak + math.log(floor * total)
        if cut > lowest:
            best = scores[scores >= cut]
            if float((best - peak).exp().sum()) >= top_p * total * 1.0001:
                return best.sort(descending=True).values, total
    return scores[scores >= lowest].sort(descending=True).values, total


@op(cases=draw_cases)
def draw(logits: Tensor, thresholds: Tensor | None, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF, in order of token id, over the tokens not below the row's threshold.

    logits: fp32 [n, vocab]. thresholds: fp32 [n] or None. uniform: fp64 [n] in (0, 1). Returns int64 [n].
    """
    if thresholds is not None:
        logits = torch.where(logits >= thresholds[:, None], logits, -math.inf)
    # fp64: over 150,000 tokens an fp32 running sum loses the tail, and the last sum could round up to a draw.
    cdf = logits.softmax(1).cumsum(1, dtype=torch.float64)
    return (
        torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None], right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    )


@draw.impl("cpu", on_cpu)
def draw_cpu(logits: Tensor, thresholds: Tensor | None, uniform: Tensor) -> Tensor:
    """Row by row over the tokens that are kept, instead of an fp64 sum over the whole vocabulary for each."""
    if thresholds is None:
        anywhere: Tensor = draw.reference(logits, None, uniform)
        return anywhere
    tokens = torch.zeros(logits.shape[0], dtype=torch.int64)
    kept = logits >= thresholds[:, None]
    for row in range(logits.shape[0]):
        ids = kept[row].nonzero().squeeze(1)
        if ids.shape[0]:
            place = draw.reference(logits[row, ids][None], None, uniform[row : row + 1])
            tokens[row] = ids[place[0]]
    return tokens


for _op in (uniforms, filter_threshold, draw):
    _op.impl("triton", on_cuda, f"headrace.kernels.sampling_triton:{_op.name}")
