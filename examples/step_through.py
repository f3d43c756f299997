"""FlashAttention in a debugger: ``python examples/step_through.py`` stops before the first tile."""

import numpy as np

from tileattn.algorithm import spec
from tileattn.algorithm.memory import Executor
from tileattn.call.parse import parse

Q = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], float)
K = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]], float)
V = np.arange(1.0, 17.0).reshape(4, 4)


def main() -> None:
    """Run the specification on four queries and four keys, in tiles of 2 x 2."""
    problem, operands = parse(Q, K, V, {"scale": 1.0, "causal": True})
    executor = Executor(problem.accum_dtype)  # runs one task after the other
    np.set_printoptions(precision=4, suppress=True)
    breakpoint()
    attention = spec.forward(problem, operands, (2, 2), executor)
    print(attention.out[0, 0])


if __name__ == "__main__":
    main()
