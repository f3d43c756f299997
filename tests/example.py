"""The worked example of four tokens: arrays, and results to the digits that it prints."""

import numpy as np

from tileattn import Attention, Gradients

Q = np.array([[1.0, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]])
K = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
V = np.arange(1.0, 17).reshape(4, 4)
DOUT = np.array([[1.0] * 4, [0] * 4, [1] * 4, [0] * 4])

OUT = np.array([[7.20], [9.88], [6.08], [7.92]]) + np.arange(4)
DV = np.broadcast_to([[0.590], [0.217], [0.976], [0.217]], (4, 4))
DQ = np.array([[-1.19, 1.18, 4.38, 1.91], [0] * 4, [-3.14, 3.14, 4.28, 3.72], [0] * 4])
DK = np.array([[-12.99, 0, -5.57, 0], [-1.31, 0, -0.73, 0], [8.66, 0, 4.38, 0], [5.64, 0, 1.91, 0]])


def check_example(attention: Attention, grads: Gradients) -> None:
    """Compare with the printed numbers, to half a unit of the last digit.

    The example rounds P to three digits before it goes on: dQ and dK are right to the second.
    """
    sums = np.exp(attention.lse[:2])
    for actual, printed, atol in (
        (attention.out, OUT, 0.0051),
        (sums, np.full(2, 12.107), 0.0005),
        (grads.dv, DV, 0.00051),
        (grads.dq, DQ, 0.0151),
        (grads.dk, DK, 0.0151),
    ):
        np.testing.assert_allclose(actual, printed, rtol=0, atol=atol)
