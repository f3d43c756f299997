"""Translate the caller's ``score_mod`` and ``mask_mod`` to CUDA, as text for ``functions.cuh``.

Each node of an expression becomes one statement that calls the function of that name in
``numpy.cuh``. Values that depend only on the batch entry and the head are computed once per head,
the others once per pair. Parameters are read from cells that precede the arrays. A term added to
the score goes into the score's ``fma`` (``Product``). A mask is written twice: for a pair, and in
interval arithmetic for ranges of queries and keys.
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tileattn.expressions.derivative import derivatives
from tileattn.expressions.diagonals import by_distance
from tileattn.expressions.extrema import RangeExtrema
from tileattn.expressions.intervals import INDEX_RANGES, all_bounds
from tileattn.expressions.nodes import Kind, Node, constant, elements, ordered
from tileattn.expressions.parameters import kernel_cells

Aux = tuple[tuple[str, int], ...]
"""The dtype's name and the number of axes of each array."""

Known = Sequence[RangeExtrema | None]
"""The bounds of the elements of each array; None if they are unknown."""


class Learned(NamedTuple):
    """A read of an array in ``score_mod`` whose gradient the call computes."""

    element: Node
    own: str  # the letters of "b", "h" and "i" that index the array directly
    arrays: tuple[int, ...]  # all arrays whose gradients the call computes, by number


_SCORE = Node("input", Kind.FLOAT, (), "s")
_PLACES = {"b": "batch", "h": "head"}  # the other inputs keep their names
_OF_PAIRS = ("s", "i", "j")

_NAME = re.compile(r"(?<!\.)\bx\d+\b")  # the name of a value, not of an array

# Discontinuous functions: they tell a quotient from one that differs in the last bit.
_JUMPS = frozenset(
    {"floor", "floor_divide", "remainder", "sign", "less", "less_equal", "equal", "not_equal"}
)

# An origin whose query and key are below this: positions counted from it fit in 32 bits.
NEAR = 1 << 29
_INT = np.iinfo(np.int32).max
_NEAR_ORIGINS = RangeExtrema(np.array([[0] * 4, [_INT, _INT, NEAR - 1, NEAR - 1]]))

_ELEMENTS = {
    **{"bool": "bool", "int8": "signed char", "int16": "short", "int32": "int", "int64": "i64"},
    **{"uint8": "unsigned char", "uint16": "unsigned short", "uint32": "u32"},
}
"""C++ types of integer elements; floating-point types have the names of their dtypes."""

_TEXT = """\
#pragma once

#include "config.cuh"
#include "intervals.cuh"

struct AuxArrays {{
{fields}}};

{structs}"""

_STRUCT = """\
struct {name} {{
{more}    const AuxArrays& aux;
    i64 batch, head;
{members}
    __device__ {name}(const AuxArrays& aux, i64 batch, i64 head)
        : aux(aux), batch(batch), head(head) {{
{of_head}    }}

    {of_type}__device__ {method} const {{
{of_pair}    }}
}};
"""

_INTERVAL = "Interval<{}>"

_CELLS = {Kind.BOOLEAN: "i64", Kind.INTEGER: "i64", Kind.FLOAT: "double"}

_READS_ARRAYS = """\
    static constexpr bool READS_ARRAYS = {};
"""

_LEARNED = """\
    static constexpr int AXES = {axes};
    static constexpr bool OWN_B = {b}, OWN_H = {h}, OWN_I = {i};  // whether it is indexed by them
    static constexpr bool OF_DISTANCE = {of_distance};  // i and j count by their difference alone
    using Value = {dtype};
    __device__ static const LearnedSums& sums(const AuxArrays& aux) {{ return aux.sums{number}; }}
    __device__ static void* gradient(const AuxArrays& aux) {{
        return const_cast<char*>(aux.dx{number}.data);
    }}

"""


@lru_cache(maxsize=256)
def functions_text(
    score_mod: Node | None,
    mask_mod: Node | None,
    aux: Aux,
    accum_dtype: np.dtype[Any],
    learned: Learned | None = None,
    near: int | None = None,
) -> str:
    """Return the text for the functions of a call, or "" if it has none.

    The text contains no length, address, stride or parameter, so calls of all sizes and constants
    share their kernels.

    Parameters
    ----------
    score_mod, mask_mod : Node or None
        Expressions of the caller's functions.
    aux : tuple of (str, int)
        Dtype and number of axes of each array that they read.
    accum_dtype : numpy.dtype
        Type of the scores.
    learned : Learned, optional
        For the kernel of the gradient of an array: differentiate by this element, not by the score.
    near : int, optional
        Number of the array that holds an origin below `NEAR`.
    """
    if score_mod is None and mask_mod is None:
        return ""
    cells = kernel_cells(score_mod, mask_mod)
    fields = [f"    {_CELLS[x.kind]} c{n};\n" for x, n in cells.items()]
    fields += [f"    AuxArray<{axes}> x{n};\n" for n, (_, axes) in enumerate(aux)]
    new = _SCORE if score_mod is None else score_mod
    of = _SCORE if learned is None else learned.element
    grad = derivatives(new).get(of, constant(0.0))
    known = [_NEAR_ORIGINS if n == near else None for n in range(len(aux))]
    score = _Printer([new, grad], "Accum", aux, known, accum_dtype, cells)
    visible = constant(True) if mask_mod is None else mask_mod
    mask, masks = (
        _Printer([visible], "double", aux, known, np.dtype(np.float64), cells, number)
        for number in ("{}", _INTERVAL)
    )
    method = "Accum score(Score s, int i, int j, Accum& grad)"
    structs = [
        score.struct("ScoreFunction", method, ("grad = {1};", "return {0};")),
        mask.struct("MaskFunction", "bool visible(int i, int j)"),
        masks.struct(
            "MaskIntervals",
            "Interval<bool> visible(Interval<int> i, Interval<int> j)",
            more=_READS_ARRAYS.format(str(bool(elements(visible))).lower()),
        ),
    ]
    if learned is not None:
        for n in learned.arrays:
            fields += [
                f"    AuxArray<{aux[n][1]}> dx{n};\n",
                f"    AuxArray<{aux[n][1] + 1}> sums{n};\n",
            ]
        structs += _learned_structs(learned, aux, known, accum_dtype, cells)
    return _TEXT.format(fields="".join(fields), structs="\n".join(structs))


def _learned_structs(
    learned: Learned, aux: Aux, known: Known, dtype: np.dtype[Any], cells: Mapping[Node, int]
) -> list[str]:
    """Write the indices of an element, for a pair and for ranges of queries and keys."""
    indices, number = learned.element.inputs, int(learned.element.value or 0)
    own = {name: str(name in learned.own).lower() for name in "bhi"}
    distance = str(by_distance(indices)).lower()
    more = _LEARNED.format(
        axes=len(indices), number=number, dtype=aux[number][0], of_distance=distance, **own
    )
    pair, ranges = (
        _Printer(indices, "Accum", aux, known, dtype, cells, number) for number in ("{}", _INTERVAL)
    )
    method = "void place({0} i, {0} j, {1}* index)"

    def ends(printer: _Printer) -> list[str]:
        texts = printer.indices(learned.element)
        return [f"index[{n}] = {text};" for n, text in enumerate(texts)]

    return [
        f"using LearnedSums = AuxArray<{len(indices) + 1}>;\n",
        pair.struct("LearnedElement", method.format("int", "i64"), ends(pair), more),
        ranges.struct(
            "LearnedRange", method.format("Interval<int>", "Interval<double>"), ends(ranges)
        ),
    ]


class _Printer:
    """Writes the statements of expressions.

    ``floats`` is the C++ type of floating-point values. ``cells`` numbers the hoisted expressions.
    ``number`` is a format that turns the type of a number into that of a value: "{}", or
    `_INTERVAL` for interval arithmetic.
    """

    def __init__(
        self,
        outputs: Sequence[Node],
        floats: str,
        aux: Aux,
        known: Known,
        dtype: np.dtype[Any],
        cells: Mapping[Node, int],
        number: str = "{}",
    ) -> None:
        self._outputs, self._floats, self._aux, self._number = outputs, floats, aux, number
        self._cells = cells
        self._nodes = [node for node in ordered(outputs, cells) if node.op != "constant"]
        self._names = {node: f"x{n}" for n, node in enumerate(self._nodes)}
        self._plain = number == "{}"
        self._jumps = any(node.op in _JUMPS or _truncates(node) for node in self._nodes)
        self._bounds = all_bounds(outputs, INDEX_RANGES, known, dtype)
        self._of_pairs: set[Node] = set()
        for node in self._nodes:
            if node.value in _OF_PAIRS or not self._of_pairs.isdisjoint(node.inputs):
                self._of_pairs.add(node)

    def struct(
        self, name: str, method: str, ends: Sequence[str] = ("return {0};",), more: str = ""
    ) -> str:
        """Write the struct of one function; ``ends`` are the last statements of its method."""
        of_head = [node for node in self._nodes if node not in self._of_pairs]
        outputs = list(map(self._text, self._outputs))
        lines = [end.format(*outputs) for end in ends]
        names = set(_NAME.findall(" ".join(lines)))
        for node in reversed(self._nodes):
            if node in self._of_pairs and self._names[node] in names:
                value = self._value(node)
                names |= set(_NAME.findall(value))
                lines.insert(0, f"const {self._type(node)} {self._names[node]} = {value};")
        return _STRUCT.format(
            name=name,
            method=method,
            of_type="template <class Score>\n    " if "Score s" in method else "",
            members="".join(f"    {self._type(x)} {self._names[x]};\n" for x in of_head),
            of_head="".join(f"        {self._names[x]} = {self._value(x)};\n" for x in of_head),
            of_pair="".join(f"        {line}\n" for line in lines),
            more=more,
        )

    def indices(self, element: Node) -> list[str]:
        """Write the indices of an element; an index that may be negative counts from the end."""
        texts = list(map(self._text, element.inputs))
        for axis, index in enumerate(element.inputs):
            if not self._bounds[index][0] >= 0:
                size = f"aux.x{int(element.value or 0)}.sizes[{axis}]"
                texts[axis] = f"numpy::from_start({texts[axis]}, {size})"
        return texts

    def _type(self, node: Node) -> str:
        return self._number.format(self._type_of_number(node))

    def _type_of_number(self, node: Node) -> str:
        if node.kind == Kind.INTEGER:
            low, high = self._bounds[node]
            if self._plain and node.op == "aux":
                dtype = np.dtype(self._aux[int(node.value or 0)][0])
                return "int" if np.can_cast(dtype, np.int32) else "i64"
            return "int" if low >= -_INT - 1 and high <= _INT else "i64"
        return "bool" if node.kind == Kind.BOOLEAN else self._floats

    def _text(self, node: Node) -> str:
        """Return the name of a value, or a constant."""
        if node.op != "constant":
            return self._names[node]
        number = self._number_text(node)
        return number if self._number == "{}" else f"{self._type(node)}({number})"

    def _number_text(self, node: Node) -> str:
        if node.kind == Kind.FLOAT:
            value = float(node.value or 0.0)
            if math.isfinite(value):
                return f"{self._floats}({value.hex()})"
            sign = "-" if value < 0 else ""
            name = "numpy::nan" if math.isnan(value) else "infinity"
            return f"{sign}{name}<{self._floats}>()"
        if node.kind == Kind.BOOLEAN:
            return str(node.value).lower()
        least = -(2**63)  # C++ has no literal for it
        literal = "1ull << 63" if node.value == least else f"{node.value}ll"
        return f"{self._type_of_number(node)}({literal})"

    def _value(self, node: Node) -> str:
        """Return the C++ expression of a node, in terms of the names of its inputs."""
        if node in self._cells:
            cell = f"{self._type_of_number(node)}(aux.c{self._cells[node]})"
            return cell if self._plain else f"{self._type(node)}({cell})"
        if node.op == "input":
            return _PLACES.get(str(node.value), str(node.value))
        if node.op == "aux":
            number = int(node.value or 0)
            dtype = self._aux[number][0]
            array = ", ".join([f"aux.x{number}", *self.indices(node)])
            return f"{self._type(node)}(numpy::element<{_ELEMENTS.get(dtype, dtype)}>({array}))"
        if node.op == "cast":
            (x,) = node.inputs
            if self._plain and node.kind == Kind.FLOAT and x.op == "absolute":
                (y,) = x.inputs
                if self._type(x) == self._type(y) == "int":  # |x| is free for a float
                    return f"numpy::absolute({self._type(node)}({self._text(y)}))"
            name = "numpy::truncate" if _truncates(node) else self._type(node)
            return f"{name}({self._text(x)})"
        inputs = self._widened(node)
        if self._plain and node.op in ("remainder", "floor_divide") and self._is_unsigned(node):
            return f"int(numpy::{node.op}({', '.join(f'u32({x})' for x in inputs)}))"
        if self._plain and node.kind == Kind.FLOAT:
            if node.op in ("add", "subtract"):  # to the unscaled score, in its fma
                pairs = zip(node.inputs, inputs, strict=True)
                inputs = ["s" if x == _SCORE else y for x, y in pairs]
            if node.op == "divide" and node.inputs[1] not in self._of_pairs and not self._jumps:
                inputs[1] = f"numpy::Divisor({inputs[1]})"
        return f"numpy::{node.op}({', '.join(inputs)})"

    def _is_unsigned(self, node: Node) -> bool:
        """Return True for int32 operands, a dividend of 0 or more and a positive divisor."""
        of_int = all(self._type(x) == "int" for x in (node, *node.inputs))
        dividend, divisor = (self._bounds[x][0] for x in node.inputs)
        return of_int and bool(dividend >= 0 and divisor > 0)

    def _widened(self, node: Node) -> list[str]:
        """Return the inputs of an operation, with all integers cast to one type."""
        types = {self._type_of_number(x) for x in (node, *node.inputs)}
        wide = "i64" in types or node.op.endswith("_shift")
        return [
            f"{self._number.format('i64')}({self._text(x)})"
            if wide and self._type_of_number(x) == "int"
            else self._text(x)
            for x in node.inputs
        ]


def _truncates(node: Node) -> bool:
    """Return True if a node casts a floating-point value to an integer."""
    return node.op == "cast" and node.kind == Kind.INTEGER and node.inputs[0].kind == Kind.FLOAT
