"""Array functions of NumPy, PyTorch and JAX on numbers that stand in for elements of arrays.

A score function written for FlexAttention calls ``torch.where``, ``x.abs()`` or ``x.to(dtype)``.
`ArrayFunctions` receives these calls and turns each one into a call by the function's NumPy name.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

_NAMES = {
    **{"abs": "absolute", "neg": "negative", "sub": "subtract", "mul": "multiply"},
    **{"div": "divide", "true_divide": "divide", "pow": "power", "atan": "arctan"},
    **{"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal"},
    **{"gt": "greater", "ge": "greater_equal", "max": "maximum", "min": "minimum"},
    **{"clamp_min": "maximum", "clamp_max": "minimum", "bitwise_not": "invert"},
    **{"bitwise_left_shift": "left_shift", "bitwise_right_shift": "right_shift"},
    **{"special_erf": "erf", "special_expm1": "expm1", "special_log1p": "log1p"},
    **{"special_exp2": "exp2", "special_expit": "sigmoid", "expit": "sigmoid"},
    **{"__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor"},
    **{"__lshift__": "left_shift", "__rshift__": "right_shift"},
}
"""PyTorch's and SciPy's names that are not NumPy's."""

_SWAPPED = {
    **{"rsub": "subtract", "__rsub__": "subtract", "__rdiv__": "divide", "__rpow__": "power"},
    **{"__rtruediv__": "divide", "__rmod__": "remainder", "__rfloordiv__": "floor_divide"},
    **{"__rlshift__": "left_shift", "__rrshift__": "right_shift"},
}
"""Functions whose second input comes first."""

_KINDS: dict[str, type] = {
    **dict.fromkeys(("float", "double", "half", "bfloat16"), float),
    **dict.fromkeys(("int", "long", "short"), int),
    "bool": bool,
}
"""Methods of tensors that convert."""

_METHODS = """
abs absolute add arctan atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp_max clamp_min
cos divide eq equal erf exp exp2 expm1 float_power floor floor_divide ge greater greater_equal gt
isfinite isinf isnan le less less_equal log log1p log2 logaddexp logical_and logical_not logical_or
logical_xor lt maximum minimum mul multiply ne neg negative not_equal pow remainder sigmoid sign sin
sqrt square sub subtract tanh true_divide
"""
"""Methods of tensors that are functions of the same name."""


class ArrayFunctions:
    """A number on which functions are called by NumPy's names, by PyTorch's, and as methods."""

    __slots__ = ()

    def named(self, name: str, *given: Any) -> Any:
        """Call a function by its name in NumPy; ``erf`` and ``sigmoid`` are two more."""
        raise NotImplementedError

    def astype(self, dtype: Any) -> Any:
        """Convert to another type of numbers."""
        raise NotImplementedError

    def refused(self, what: str) -> TypeError:
        """Return the TypeError for an unsupported operation."""
        raise NotImplementedError

    def element(self, tensor: Any, key: Any) -> Any:
        """Read a tensor of PyTorch at an index."""
        raise self.refused(f"reads {type(tensor).__name__} at {key!r}")

    def called(self, name: str, given: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call a function by any library's name for it, or read a tensor at an index."""
        if name == "__getitem__":
            return self.element(*given)
        unset = [key for key in ("inplace", "out") if options.get(key) in (None, False)]
        options = {key: x for key, x in options.items() if key not in unset}
        special = _SPECIAL.get(name)
        if special is None:
            if options:
                raise self.refused(f"calls {name} with {', '.join(options)}; leave them out")
            if name in _SWAPPED:
                return self.named(_SWAPPED[name], *given[::-1])
            return self.named(_NAMES.get(name, name), *given)
        try:
            inspect.signature(special).bind(self, *given, **options)
        except TypeError as error:
            raise self.refused(f"calls {name} with other arguments: {error}") from None
        return special(self, *given, **options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        options = dict(kwargs or {})
        given = [y for x in (*args, *options.values()) for y in (x if type(x) is tuple else (x,))]
        number = next(x for x in given if isinstance(x, cls))
        return number.called(function.__name__, args, options)

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS.split() or name in _SPECIAL or name in _KINDS:
            return partial(self._method, name)
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(str(self.refused(f"reads .{name} of a number, which has none")))

    def _method(self, name: str, *given: Any, **options: Any) -> Any:
        if name in _KINDS:
            return self.astype(_KINDS[name])
        if name == "where":  # x.where(condition, other)
            return self.called(name, (*given[:1], self, *given[1:]), options)
        return self.called(name, (self, *given), options)


# --- functions whose arguments have names, or that are made of others ----------------------------


def _where(n: ArrayFunctions, condition: Any, input: Any, other: Any) -> Any:
    return n.named("where", condition, input, other)


def _masked_fill(n: ArrayFunctions, x: Any, mask: Any, value: Any) -> Any:
    return n.named("where", mask, value, x)


def _clip(
    n: ArrayFunctions,
    x: Any,
    min: Any = None,
    max: Any = None,
    *,
    a_min: Any = None,
    a_max: Any = None,
) -> Any:
    low, high = (a if b is None else b for a, b in ((min, a_min), (max, a_max)))
    x = x if low is None else n.named("maximum", x, low)
    return x if high is None else n.named("minimum", x, high)


def _round(n: ArrayFunctions, x: Any, decimals: int = 0) -> Any:
    if decimals:
        raise n.refused(f"rounds to {decimals} decimals; it must be 0")
    return n.named("rint", x)


def _div(n: ArrayFunctions, x: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc":
        raise n.refused("divides with rounding_mode='trunc'; it must be 'floor' or None")
    return n.named("divide" if rounding_mode is None else "floor_divide", x, other)


def _isin(n: ArrayFunctions, x: Any, test_elements: Any, *, invert: bool = False) -> Any:
    values = getattr(test_elements, "tolist", lambda: test_elements)()
    if not isinstance(values, list | tuple | set | frozenset | range):
        raise n.refused("calls isin; its second argument must be a list of numbers")
    found = n.named("less", x, x)  # False
    for value in sorted(_flat(values)):
        found = n.named("logical_or", found, n.named("equal", x, value))
    return n.named("logical_not", found) if invert else found


def _flat(values: Any) -> list[Any]:
    """List the elements of nested lists."""
    return [y for x in values for y in (_flat(x) if isinstance(x, list | tuple) else [x])]


def _to(n: ArrayFunctions, x: Any, *given: Any, **options: Any) -> Any:
    """Convert to a dtype, or to the dtype of a value; skip devices and flags."""
    for y in (*given, *options.values()):
        dtype = _dtype_of(y)
        if dtype is None and (kind_name(y) or type(y).__name__ == "dtype"):
            dtype = y
        if dtype is not None:
            return x.astype(dtype)
        is_other = y is None or type(y).__name__ in ("bool", "int", "device", "memory_format")
        if not is_other and (not isinstance(y, str) or y.endswith("Tensor")):
            raise n.refused(f"must convert to a dtype or a device, or with a flag; got {y!r}")
    return x


def _dtype_of(x: Any) -> Any:
    """Return the dtype of a value: bool, int or float if traced; None without a dtype."""
    kind = getattr(getattr(x, "node", None), "kind", None)
    if kind is not None:
        return (bool, int, float)[kind]
    return getattr(x.value if isinstance(x, ArrayFunctions) else x, "dtype", None)


def _kind(dtype: Any) -> type:
    return {"bool": bool, "int": int}.get(kind_name(dtype) or "", float)


def kind_name(dtype: Any) -> str | None:
    """Return ``"bool"``, ``"int"`` or ``"float"`` for a dtype of any library; None for others."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    found = re.fullmatch(r"(?:torch\.)?[bu]?(bool|int|float)_?\d*", name)
    return found and found[1]


def _new(value: float) -> Callable[..., Any]:
    """Make a number with `Tensor.new_ones` and the like, whose size must be ()."""

    def made(n: ArrayFunctions, x: Any, size: Any = (), *, dtype: Any = None, **_: Any) -> Any:
        if tuple(size):
            raise n.refused(f"makes a tensor of size {tuple(size)}; its size must be ()")
        kind = _kind(_dtype_of(x) if dtype is None else dtype)
        return n.named("where", True, kind(value), kind(value))

    return made


def _full_like(n: ArrayFunctions, x: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Any:
    if isinstance(fill_value, bool | int | float):
        fill_value = _kind(_dtype_of(x) if dtype is None else dtype)(fill_value)
    return n.named("where", n.named("equal", x, x), fill_value, fill_value)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "where": _where,
    "masked_fill": _masked_fill,
    "clip": _clip,
    "clamp": _clip,
    "round": _round,
    "around": _round,
    "div": _div,
    "isin": _isin,
    "to": _to,
    "type": _to,
    "new_ones": _new(1.0),
    "new_zeros": _new(0.0),
    "full_like": _full_like,
    "zeros_like": lambda n, x, **_: _full_like(n, x, 0.0),
    "ones_like": lambda n, x, **_: _full_like(n, x, 1.0),
    "reciprocal": lambda n, x: n.named("divide", 1.0, x),
    "rsqrt": lambda n, x: n.named("divide", 1.0, n.named("sqrt", x)),
    # As in PyTorch, the derivative at 0 is 0; a maximum would share it.
    "relu": lambda n, x: n.named("where", n.named("less_equal", x, 0), 0, x),
    "softplus": lambda n, x: n.named("logaddexp", x, 0.0),
    "log_sigmoid": lambda n, x: n.named(
        "negative", n.named("logaddexp", n.named("negative", x), 0.0)
    ),
    "silu": lambda n, x: n.named("multiply", x, n.named("sigmoid", x)),
}
