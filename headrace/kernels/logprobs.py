# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen tokens and of the most probable ones.

The top is taken from the logits before the normaliser is, so that no [rows, vocab] table of log-probabilities exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.kernels.op import Case, on_cpu, on_cuda, op


def logprob_cases(dtype: torch.dtype, device: str) -> Iterator[Case]:
    """With and without a top."""
    if dtype == torch.float32:
        logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(5)).to(device)
        chosen = torch.tensor([0, 999, 5, 6, 7], dtype=torch.int32, device=device)
        for num_top in (0, 1, 20):
            yield Case(f"top {num_top}", (logits, chosen, num_top), logits.nbytes)


@op(cases=logprob_cases)
def gather_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and rank of each row's chosen token, and its `num_top` best.

    logits: fp32 [n, vocab]. chosen: [n] token ids. Returns token ids int32 [n, 1 + num_top] (the chosen one first,
    then the best, best first), their log-probabilities fp32 [n, 1 + num_top], and the chosen token's rank int32 [n]:
    one more than the number of tokens that are strictly more probable.
    """
    return gather_normalised(logits, chosen, num_top, logits.logsumexp(1))


def gather_normalised(
    logits: Tensor, chosen: Tensor, num_top: int, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, given each row's log of the sum of exp, fp32 [n]."""
    chosen = chosen.long()[:, None]
    own = logits.gather(1, chosen)
    ranks = (logits > own).sum(1, dtype=torch.int32) + 1
    best = logits.topk(num_top, dim=1)
    ids = torch.cat([chosen, best.indices], dim=1).int()
    scores = torch.cat([own, best.values], dim=1)
    return ids, scores - normaliser[:, None], ranks


@gather_logprobs.impl("cpu rows", on_cpu, use="deterministic")
def gather_logprobs_cpu_rows(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Torch sums a row of its own in another order than one of several: so each by itself."""
    normalisers = [row.logsumexp(0) for row in logits]
    return gather_normalised(logits, chosen, num_top, torch.stack(normalisers) if normalisers else logits.new_empty(0))


gather_logprobs.impl("triton", on_cuda, "headrace.kernels.logprobs_triton:gather_logprobs", use="deterministic")
