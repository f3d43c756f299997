"""Derivatives of expressions, as expressions: reverse mode on the graph.

At a tie ``minimum`` and ``maximum`` share the derivative between their inputs. The derivative of
``abs`` and ``sign`` at 0 is 0; the derivative of ``floor``, ``ceil``, ``rint`` and of a conversion
to an integer is 0 everywhere. The input that ``where`` does not choose never enters a derivative,
even if it is not finite.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tileattn.expressions.build import apply, times, where
from tileattn.expressions.nodes import Kind, Node, constant, ordered

_ONE, _MINUS_ONE, _ZERO, _TRUE = map(constant, (1.0, -1.0, 0.0, True))
_ERF_SLOPE = constant(2 / math.sqrt(math.pi))  # at 0


class Adjoint(NamedTuple):
    """The derivative of an output by a node: ``value`` under a condition, and elsewhere 0.

    ``value`` may be anything, even NaN, where the condition is false.
    """

    condition: Node
    value: Node

    def plus(self, other: "Adjoint | None") -> "Adjoint":
        """Add two parts."""
        if other is None:
            return self
        if self.condition == other.condition:
            return Adjoint(self.condition, apply("add", self.value, other.value))
        either = _TRUE
        if _TRUE not in (self.condition, other.condition):
            either = apply("bitwise_or", self.condition, other.condition)
        return Adjoint(either, apply("add", self.selected(), other.selected()))

    def under(self, condition: Node) -> "Adjoint":
        """Demand one more condition."""
        if self.condition == _TRUE:
            return Adjoint(condition, self.value)
        return Adjoint(apply("bitwise_and", self.condition, condition), self.value)

    def times(self, factor: Node) -> "Adjoint":
        """Multiply by a factor."""
        return Adjoint(self.condition, times(self.value, factor))

    def selected(self) -> Node:
        """Write out the value, and the 0 elsewhere."""
        return where(self.condition, self.value, _ZERO)


Part = tuple[Node, Adjoint]
Rule = Callable[[Node, Adjoint], Iterator[Part]]


def derivatives(output: Node) -> dict[Node, Node]:
    """Differentiate by the score and by every floating element of ``aux`` that is read.

    Inputs that do not affect the output are left out.
    """
    nodes = ordered([output])
    active = _active(nodes)
    adjoints: dict[Node, Adjoint] = {output: Adjoint(_TRUE, _ONE)}
    found: dict[Node, Node] = {}
    for node in reversed(nodes):
        if node not in active or node not in adjoints:
            continue
        adjoint = adjoints.pop(node)
        if node.op in ("input", "aux"):
            found[node] = adjoint.selected()
        elif node.op in _RULES:
            for x, part in _RULES[node.op](node, adjoint):
                if x in active:
                    adjoints[x] = part.plus(adjoints.get(x))
    return found


def _active(nodes: list[Node]) -> set[Node]:
    """Gather the nodes through which a derivative passes."""
    active: set[Node] = set()
    for node in nodes:
        leaf = node.op == "aux" or (node.op == "input" and node.value == "s")
        if node.kind == Kind.FLOAT and (leaf or any(x in active for x in node.inputs)):
            active.add(node)
    return active


# --- one rule for each operation ----------------------------------------------------------------


def _by(*factors: Callable[..., Node]) -> Rule:
    """Make the rule of an operation from its partial derivatives, functions of node and inputs."""

    def rule(node: Node, adjoint: Adjoint) -> Iterator[Part]:
        for x, factor in zip(node.inputs, factors, strict=True):
            yield x, adjoint.times(factor(node, *node.inputs))

    return rule


def _where(node: Node, adjoint: Adjoint) -> Iterator[Part]:
    condition, x, y = node.inputs
    yield x, adjoint.under(condition)
    yield y, adjoint.under(apply("invert", condition))


def _extremum(node: Node, adjoint: Adjoint) -> Iterator[Part]:
    """Pass the derivative to the chosen input; to both for a NaN."""
    half = where(apply("equal", *node.inputs), constant(0.5), _ONE)
    for x, other in (node.inputs, node.inputs[::-1]):
        beyond = (other, x) if node.op == "minimum" else (x, other)
        yield x, adjoint.times(half).under(apply("invert", apply("less", *beyond)))


def _quotient(x: Node, y: Node) -> Node:
    return apply("divide", x, y)


def _negated(x: Node) -> Node:
    return apply("negative", x)


def _whole_quotient(node: Node, x: Node, y: Node) -> Node:
    """Return ``floor(x / y)``, consistent with the remainder."""
    return apply("rint", _quotient(apply("subtract", x, node), y))


def _by_base(_: Node, x: Node, y: Node) -> Node:
    return times(y, apply("power", x, apply("subtract", y, _ONE)))


def _by_exponent(node: Node, x: Node, _: Node) -> Node:
    """Differentiate a power by its exponent; 0 at a power of 0, as its limit."""
    return where(apply("equal", node, _ZERO), _ZERO, times(node, apply("log", x)))


_RULES: dict[str, Rule] = {
    "add": _by(lambda *_: _ONE, lambda *_: _ONE),
    "subtract": _by(lambda *_: _ONE, lambda *_: _MINUS_ONE),
    "multiply": _by(lambda _node, _x, y: y, lambda _node, x, _y: x),
    "divide": _by(
        lambda _node, _x, y: _quotient(_ONE, y), lambda node, _x, y: _negated(_quotient(node, y))
    ),
    "negative": _by(lambda *_: _MINUS_ONE),
    "absolute": _by(lambda _node, x: apply("sign", x)),
    "remainder": _by(lambda *_: _ONE, lambda node, x, y: _negated(_whole_quotient(node, x, y))),
    "exp": _by(lambda node, _x: node),
    "expm1": _by(lambda node, _x: apply("add", node, _ONE)),
    "log": _by(lambda _node, x: _quotient(_ONE, x)),
    "log1p": _by(lambda _node, x: _quotient(_ONE, apply("add", x, _ONE))),
    "log2": _by(lambda _node, x: _quotient(constant(1 / math.log(2)), x)),
    "tanh": _by(lambda node, _x: apply("subtract", _ONE, times(node, node))),
    "sin": _by(lambda _node, x: apply("cos", x)),
    "cos": _by(lambda _node, x: _negated(apply("sin", x))),
    "arctan": _by(lambda _node, x: _quotient(_ONE, apply("add", _ONE, times(x, x)))),
    "erf": _by(lambda _node, x: times(_ERF_SLOPE, apply("exp", _negated(times(x, x))))),
    "sigmoid": _by(lambda node, _x: times(node, apply("subtract", _ONE, node))),
    "sqrt": _by(lambda node, _x: _quotient(constant(0.5), node)),
    "power": _by(_by_base, _by_exponent),
    "where": _where,
    "minimum": _extremum,
    "maximum": _extremum,
}
