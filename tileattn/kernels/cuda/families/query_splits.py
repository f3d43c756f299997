"""Splits of the queries of a key block, which several work tiles share in the backward pass."""

from tileattn.call.problem import Problem
from tileattn.kernels.cuda.tuning import Tuning

# A split sums at most this many rows of queries, 1,024 tiles. Its relative error is then about
# 8e-7: it grows with the square root, and 4,096 tiles without a total had 1.7e-6 (H200, normal
# input).
_SHORT_SPLIT = 16384
_NARROW = 64  # columns of heads whose rows take longer in 32 bits


def splits_queries(P: Problem, tuning: Tuning) -> bool:
    """Return True if several work tiles share a key block."""
    return query_splits(P, tuning) != (1, 1)


def has_short_splits(P: Problem, tuning: Tuning) -> bool:
    """Return True if several work tiles share a key block, and none has too many queries.

    A split of float32 keeps no total of its sums (``src/long_sums.cuh``).
    """
    heads, queries = query_splits(P, tuning)
    rows = -(-P.group // heads) * -(-P.Nq // queries)
    return heads * queries > 1 and rows <= _SHORT_SPLIT


def query_splits(P: Problem, tuning: Tuning) -> tuple[int, int]:
    """Return into how many parts the query heads, and the queries, of a key block are split.

    A key head with few key blocks would leave most SMs idle, and with a causal mask its first
    blocks run longest. The number of key heads does not count, nor the number of SMs, so that dk
    and dv have the same bits in any batch and on any GPU. Packed lengths are known only on the
    device.
    """
    is_open = P.window == (None, None)
    few_keys = is_open and P.Nq >= tuning.split_ratio * P.Nk
    shared = P.group >= tuning.split_group or P.Nk >= tuning.split_long_keys
    in_32_bits = P.dtype.itemsize >= 4
    if P.is_packed or not (few_keys or (P.group > 1 and (shared or in_32_bits))):
        return 1, 1
    rows, least = P.group * _queries_of_key(P), max(P.Nk, tuning.split_rows)
    if few_keys:
        rows, (fewest, most) = P.group * P.Nq, tuning.split_few_rows
        least = min(max(4 * P.Nk, fewest), most)
    if in_32_bits and max(P.D, P.Dv) <= _NARROW:
        least //= 4  # a row takes longer
    splits = 1
    while 2 * splits * least <= rows and 2 * splits * P.Nk <= tuning.split_keys:
        splits *= 2
    parts = 1
    while 2 * parts <= min(splits, P.group):
        parts *= 2
    each = -(-P.group // parts)  # query heads
    return -(-P.group // each), splits // parts if is_open else 1


def _queries_of_key(P: Problem) -> int:
    """Return the queries of a mean key with a causal mask, otherwise a quarter of them.

    Without a causal mask key blocks have the same length, so fewer splits let them end together.
    """
    left, right = P.window
    if left is not None and right is not None:
        return min(left + right + 1, P.Nq) // 4
    return P.Nq // (4 if left is right else 2)
