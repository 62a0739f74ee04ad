"""On-policy distillation: what a teacher thinks of the tokens that the student drew, as advantages.

A token's advantage is log teacher - log student. Drawn by the student, its policy gradient is in expectation the one of
the reverse KL, KL(student || teacher), of that token's distribution: the derivative of log student itself adds nothing,
because probabilities sum to 1 (Agarwal et al. 2024, Gu et al. 2024). With a discount of 1 a token also answers for
those that follow it, and the sum is the gradient of the reverse KL of whole completions.
"""

import torch
from torch import Tensor


def distillation_advantages(
    teacher_N: Tensor,  # noqa: N803
    student_N: Tensor,  # noqa: N803
    completions_N: Tensor,  # noqa: N803
    discount: float = 0.0,
) -> Tensor:
    """[N] from log-probs of the drawn tokens, in double precision; the tokens of a completion are in their order.

    A_t = d_t + discount A_{t+1}, with d = log teacher - log student.
    """
    differences = teacher_N.double() - student_N.double()
    if discount == 0:
        return differences
    order = torch.argsort(completions_N, stable=True)
    _, counts = torch.unique_consecutive(completions_N[order], return_counts=True)
    lasts, sums = counts.cumsum(0) - 1, differences[order]
    for back in range(1, int(counts.max()) if len(counts) else 0):
        here = (lasts - back)[counts > back]
        sums[here] += discount * sums[here + 1]
    return torch.empty_like(sums).index_copy_(0, order, sums)
