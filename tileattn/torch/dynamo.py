"""Trace ``score_mod`` and ``mask_mod`` while Dynamo traces their caller.

The function runs unchanged on traced values, but reads its closure, globals, defaults, attributes
and items through Dynamo. So it sees the values at this point of the program, and Dynamo sets
guards: it compiles again when one of these values changes. Tensors become arrays of ``aux``.
Numbers that Dynamo keeps symbolic, such as sizes, do too: one program then serves all values.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch._dynamo import exc, variables
from torch._dynamo.comptime import ComptimeContext, comptime
from torch._dynamo.variables.base import VariableTracker

from tileattn.expressions.aux_arrays import kind_of
from tileattn.expressions.nodes import Kind
from tileattn.expressions.state import is_fixed, reads
from tileattn.expressions.trace import array_or_element
from tileattn.torch.functions import ArrayKind, text_of

_PLAIN = (bool, int, float, str, bytes, type(None))
_MODULES = ("numpy", "math", "operator", "torch")
_KINDS = {int: Kind.INTEGER, float: Kind.FLOAT}
_REMEDY = (
    "in a compiled program the function may read numbers, and attributes and items that are "
    "numbers; pass others as aux=(tensor, ...), which the function gets as parameters"
)


def text_in_program(
    name: str, function: Any, kinds: Sequence[tuple[torch.dtype, int]], first: int
) -> tuple[str | None, Sequence[Any]]:
    """Return the text of a function, and the arrays it captures, numbered from ``first``.

    ``kinds`` has the dtype and the number of axes of each array of ``aux``. The text is None if
    Dynamo does not trace this function.
    """
    text: str | None = None
    captured: Sequence[Any] = ()
    comptime(_read)
    return text, captured


def _read(ctx: ComptimeContext) -> None:
    """Set ``text`` and ``captured`` in the frame of `text_in_program`."""
    name, kinds, first = (ctx.get_local(x).as_python_constant() for x in ("name", "kinds", "first"))
    arrays = [ArrayKind(dtype, (1,) * ndim) for dtype, ndim in kinds]
    tx: Any = ctx._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    function, failure = tx.symbolic_locals["function"], None
    for keeps_symbols in (True, False):
        reader = _Reader(tx, name, first, keeps_symbols)
        try:
            text = text_of(name, reader.value(function), arrays)
        except Exception as error:  # whatever a function raises
            failure = error
        else:
            tx.symbolic_locals["text"] = variables.ConstantVariable.create(text)
            tx.symbolic_locals["captured"] = variables.TupleVariable(reader.captured)
            return
    reason, *_ = str(failure).splitlines() or [type(failure).__name__]
    ctx.graph_break(f"`{name}` cannot be compiled: {reason}; {_REMEDY}")


class _Reader:
    """Reads Dynamo's variables as values, and sets guards on them.

    Parameters
    ----------
    tx : InstructionTranslatorBase
        Dynamo's translator of the current frame.
    name : str
        Name of the option, for messages.
    first : int
        Number of the first captured array.
    keeps_symbols : bool
        True to keep symbolic numbers symbolic; False to compile for their present values.
    """

    def __init__(self, tx: Any, name: str, first: int, keeps_symbols: bool) -> None:
        self.tx, self._name, self._first = tx, name, first
        self._keeps_symbols = keeps_symbols
        self.captured: list[VariableTracker] = []

    def value(self, x: Any) -> Any:
        """Return the value of a variable, or an object that reads it."""
        x = x.realize()
        if isinstance(x, variables.SymNodeVariable):
            return self._number(x)
        try:
            constant = x.as_python_constant()
        except (NotImplementedError, exc.Unsupported):
            constant = x
        if _is_plain(constant):
            return constant
        if isinstance(x, variables.FunctoolsPartialVariable):
            keywords = {name: self.value(y) for name, y in x.keywords.items()}
            return partial(self.value(x.func), *map(self.value, x.args), **keywords)
        number = x.is_tensor() and x.as_proxy().node.meta["example_value"].dim() == 0
        return self.array(x) if number else _Object(self, x)

    def apply(self, function: Callable[..., Any], x: Any, *constants: Any) -> Any:
        """Apply a built-in function to a variable and constants."""
        others = map(variables.ConstantVariable.create, constants)
        built: Any = VariableTracker.build(self.tx, function)
        return self.value(built.call_function(self.tx, [x, *others], {}))

    def global_value(self, scope: dict[str, Any], name: str) -> Any:
        """Return what a global variable holds."""
        if _is_fixed(scope[name]):
            return scope[name]
        root, effects = self.tx.output.root_tx, self.tx.output.side_effects
        if scope is root.f_globals and name in root.symbolic_globals:  # the program sets it
            return self.value(effects.load_global(effects[root.symbolic_globals[name]], name))
        source = self.tx.import_source(scope["__name__"])
        module = VariableTracker.build(self.tx, sys.modules[scope["__name__"]], source)
        return self.apply(getattr, module, name)

    def call(self, x: Any, *args: Any, **keywords: Any) -> Any:
        """Call a Python function whose closure and defaults are Dynamo's variables."""
        code, own, stand_in = x.get_code(), x.self_args(), variables.ConstantVariable.create(None)
        if reads(code).is_opaque:
            raise TypeError(f"{code.co_name} imports a module, writes a variable, or inspects code")
        given = [*own, *(stand_in for _ in args)]
        bound = x.bind_args(self.tx, given, dict.fromkeys(keywords, stand_in))
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        absent = {*parameters[min(len(given), code.co_argcount) :]} - keywords.keys()
        defaults = {name: self.value(self._contents(bound[name])) for name in absent}
        cells = tuple(self._cell(bound[name]) for name in code.co_freevars)
        scope = _Scope(self, x.get_globals())
        function = FunctionType(code, scope, code.co_name, None, cells)
        return function(*map(self.value, own), *args, **keywords, **defaults)

    def _number(self, x: Any) -> Any:
        kind = _KINDS.get(x.python_type())
        if kind is None or not self._keeps_symbols:
            return x.evaluate_expr()
        return self._captured(x, kind, 0)

    def array(self, x: Any) -> Any:
        """Return the traced array that stands for a tensor."""
        like = x.as_proxy().node.meta["example_value"]
        kind = kind_of(like)
        if kind is None:
            raise TypeError(f"it captures a tensor of dtype {like.dtype}")
        return self._captured(x, kind, like.dim())

    def _captured(self, x: Any, kind: Kind, ndim: int) -> Any:
        self.captured.append(x)
        return array_or_element(self._first + len(self.captured) - 1, kind, ndim, self._name)

    def _contents(self, x: Any) -> Any:
        is_cell = isinstance(x, variables.CellVariable)
        return self.tx.output.side_effects.load_cell(x) if is_cell else x

    def _cell(self, x: Any) -> CellType:
        try:
            contents = self._contents(x)
        except exc.Unsupported:  # the cell is still empty
            return CellType()
        return CellType(self.value(contents))


class _Scope(dict[str, Any]):
    """Globals of a function, read through Dynamo."""

    def __init__(self, reader: _Reader, scope: dict[str, Any]) -> None:
        super().__init__()
        self._reader, self._scope = reader, scope

    def __getitem__(self, name: str) -> Any:
        if name not in self._scope:
            raise KeyError(name)
        return self._reader.global_value(self._scope, name)


class _Object:
    """An object that a function reads; it has attributes and items, and can be called."""

    __slots__ = ("_reader", "_variable")

    def __init__(self, reader: _Reader, variable: Any) -> None:
        self._reader, self._variable = reader, variable

    def __getattr__(self, name: str) -> Any:
        try:
            return self._reader.apply(getattr, self._variable, name)
        except exc.ObservedAttributeError:
            exc.handle_observed_exception(self._reader.tx)
            raise AttributeError(f"{self._type} has no attribute {name!r}") from None

    def __getitem__(self, key: Any) -> Any:
        if _is_plain(key):
            return self._reader.apply(operator.getitem, self._variable, key)
        return self._reader.array(self._variable)[key] if self._is_tensor else self._refuse()

    def __len__(self) -> int:
        return int(self._reader.apply(len, self._variable))

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if isinstance(self._variable, variables.functions.BaseUserFunctionVariable):
            return self._reader.call(self._variable, *args, **keywords)
        return self.__getattr__("__call__")(*args, **keywords)

    @property
    def _is_tensor(self) -> bool:
        return bool(self._variable.is_tensor())

    @property
    def _type(self) -> str:
        return f"an object of type {self._variable.python_type().__name__}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"it computes with {self._type}")

    __iter__ = __bool__ = __contains__ = __eq__ = __hash__ = __array__ = _refuse
    __array_ufunc__ = __array_function__ = _refuse


def _is_plain(x: Any) -> bool:
    """Return True for numbers, strings, containers of them, and objects that never change."""
    if isinstance(x, tuple | list | set | frozenset):
        return all(map(_is_plain, x))
    if isinstance(x, dict):
        return all(map(_is_plain, (*x, *x.values())))
    return type(x) in _PLAIN or _is_fixed(x)


def _is_fixed(x: Any) -> bool:
    """Return True for known modules, and functions that never change."""
    if isinstance(x, ModuleType):
        return x.__name__ in _MODULES
    if isinstance(x, BuiltinFunctionType) and x.__self__ is torch._C._VariableFunctions:
        return True
    return is_fixed(x)
