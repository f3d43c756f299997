"""A gallery of score and mask functions, for ``score_mod=``, ``mask_mod=`` and ``aux=``.

Each is a few lines of NumPy on one pair: batch entry ``b``, query head ``h``, query ``i`` and key
``j``. Arrays come as further parameters, in the order of ``aux``. A plain number (a window, a
width) is a default argument.
"""

# mypy: disable-error-code="no-untyped-def"

import numpy as np
from numpy.typing import NDArray

# --- scores -------------------------------------------------------------------------------------


def alibi(s, b, h, i, j):
    """Penalise distance, by head: slopes of 1/2, 1/4, ..."""
    return s - 2.0 ** -(h + 1.0) * np.abs(i - j)


def soft_cap(s, b, h, i, j, cap=15.0):
    """Bound the scores smoothly."""
    return cap * np.tanh(s / cap)


def relative_bias(s, b, h, i, j, table):
    """Add a learned bias for each head and distance; ``table`` is (Hq, 2 * reach + 1)."""
    reach = 16
    return s + table[h, np.clip(i - j, -reach, reach) + reach]


def t5_bias(s, b, h, i, j, table, bucket):
    """Add a learned bias for each head and bucket; ``bucket`` is looked up by distance.

    ``table`` is (Hq, buckets), ``bucket`` integers of shape (longest + 1,).
    """
    return s + table[h, bucket[np.abs(i - j)]]


def t5_buckets(longest: int, buckets: int = 16) -> NDArray[np.int64]:
    """Return the bucket of each distance: half of them have one each, the others more and more."""
    exact = buckets // 2
    distance = np.arange(longest + 1)
    rest = np.log(np.maximum(distance, exact) / exact) / np.log(longest / exact + 1)
    return np.where(distance < exact, distance, exact + (rest * exact).astype(int))


def transformer_xl(s, b, h, i, j, position, content):
    """Add a term of the query and the distance, and one of the head and the key.

    ``position`` is (B, Hq, Nq, reach + 1), ``content`` (B, Hq, Nk).
    """
    reach = 24
    return s + position[b, h, i, np.clip(i - j, 0, reach)] + content[b, h, j]


def temperature(s, b, h, i, j, log_temperature):
    """Divide by a learned temperature of each head; ``log_temperature`` is (Hq,)."""
    return s * np.exp(-log_temperature[h])


def gaussian(s, b, h, i, j, centre, width):
    """Prefer keys at a learned distance, within a learned width; both are (Hq,)."""
    offset = (i - j - centre[h]) / width[h]
    return s - 0.5 * offset * offset


def masked_score(s, b, h, i, j):
    """Mask by a score of minus infinity: the pair has no part in the softmax."""
    return np.where((i + j) % 3 == 0, -np.inf, s)


# --- masks --------------------------------------------------------------------------------------


def sliding_window(b, h, i, j, width=20):
    """Attend to the last keys up to the query itself."""
    return (i >= j) & (i - j < width)


def prefix_lm(b, h, i, j, prefix):
    """Attend to a whole prefix, and causally from there; ``prefix`` is (B,)."""
    return (j < prefix[b]) | (i >= j)


def documents(b, h, i, j, document):
    """Attend within a document, causally; ``document`` has the number of each token's, (B, N)."""
    return (document[b, i] == document[b, j]) & (i >= j)


def dilated_window(b, h, i, j, width=40, step=3):
    """Attend to every third key of a window."""
    return (np.abs(i - j) < width) & ((i - j) % step == 0)


def local_and_global(b, h, i, j, block=16, tokens=4):
    """Attend within a block, and to and from a few global tokens."""
    return (i // block == j // block) | (j < tokens) | (i < tokens)


def neighbourhood(b, h, i, j, width=8, reach=2):
    """Attend to the pixels around, in an image whose rows are one after the other."""
    rows, columns = i // width - j // width, i % width - j % width
    return (np.abs(rows) <= reach) & (np.abs(columns) <= reach)


def tree(b, h, i, j, ancestor, context):
    """Attend to all of a context and to one's ancestors: speculative decoding of a tree.

    ``ancestor`` is (B, nodes, nodes), booleans; ``context`` has the number of keys before, (B,).
    """
    return (j < context[b]) | ((j >= context[b]) & ancestor[b, i, j - context[b]])


def scattered(b, h, i, j, keep=160):
    """Attend to pairs that a hash of the indices chooses, others in each head: keep of 256."""
    x = (i * 73856093) ^ (j * 19349663) ^ ((h + 1) * 83492791) ^ (b * 2654435)
    x = (x ^ (x >> 13)) * 1274126177
    return ((x >> 16) & 255) < keep
