"""How long sums are added up: in blocks of terms, then the sums of the blocks, and so on.

An accumulator that takes n terms one by one errs by up to n u of the sum of their magnitudes (u: half the
distance from 1 to the next number, 2^-24 in float32), and by nearly as much where the terms are alike, as
each addition is then rounded the same way. In blocks no term passes through more than `additions(n)`
roundings, which takes the place of n in that bound (Higham, "Accuracy and Stability of Numerical Algorithms",
2nd edition, 4.2: a sum errs by at most h u of the sum of magnitudes, to first order, where no term passes
through more than h additions).
"""

from __future__ import annotations

import math

LONGEST = 256  # terms that one accumulator takes; longer sums are added up in blocks
BLOCK = 128  # most terms of a block
LEAST = BLOCK // 4  # fewest: below, the sums of the blocks would be as many as the terms


def block(extent: int, terms: int) -> int:
    """How many iterations of a loop over `extent` make a block, where each adds `terms` (at most BLOCK).

    A divisor of `extent` where one gives LEAST to BLOCK terms; else what leaves the last block little
    shorter than the others.
    """
    most = max(1, BLOCK // terms)
    if extent <= most:
        return extent
    divisor = next(d for d in range(most, 0, -1) if extent % d == 0)
    if divisor * terms >= LEAST:
        return divisor
    return math.ceil(extent / math.ceil(extent / most))


def additions(terms: int) -> int:
    """Roundings that a term of a sum of `terms` passes through, at most.

    All but the last stage have blocks of LEAST to BLOCK terms, the last has up to LONGEST.
    """
    stages, left = 0, terms
    while left > LONGEST:
        stages, left = stages + 1, math.ceil(left / LEAST)
    return min(terms, LONGEST + stages * BLOCK)
