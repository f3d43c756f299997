"""Find the attention layers of a transformers model that ignore ``attn_implementation``."""

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, PreTrainedModel

from tileattn.errors import UnsupportedError
from tileattn.torch.transformers_masks import ADDITIVE

_get_correct = PreTrainedModel.get_correct_attn_implementation
_set = PreTrainedModel.set_attn_implementation
# Arguments that some models always pass to attention functions, and that are not supported.
UNSUPPORTED = {
    "block_indices": "selecting blocks of keys is not supported",
    "indices": "selecting keys is not supported",
    "sinks": "a sink for each query is not supported, only one for each head, s_aux",
}
_BASES = frozenset(PreTrainedModel.__mro__)  # base classes without layers of a model


def check_models(implementation: str) -> None:
    """Patch ``PreTrainedModel`` to check a model's layers when the implementation is selected.

    It may be called more than once.
    """

    def get_correct_attn_implementation(
        self: Any, requested_attention: Any, *more: Any, **options: Any
    ) -> Any:
        if requested_attention == implementation:
            layers = layers_of(type(self), implementation)
            layers.check(implementation)
            layers.warn(implementation)
            if layers.own or not self._supports_sdpa:
                ADDITIVE.add(type(self.config))
        return _get_correct(self, requested_attention, *more, **options)

    def set_attn_implementation(
        self: Any, attn_implementation: Any, *more: Any, **options: Any
    ) -> None:
        if attn_implementation == implementation:  # check all parts before any part changes
            for part in self.modules():
                if isinstance(part, PreTrainedModel):
                    layers_of(type(part), implementation).check(implementation)
        _set(self, attn_implementation, *more, **options)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


class Layers(NamedTuple):
    """Class names of the attention layers of a model.

    Parameters
    ----------
    model : type
        Class of the model.
    by_interface : set of str
        Layers that call ``AttentionInterface``.
    own : set of str
        Layers that compute attention themselves.
    choices : set of str
        Layers from tables by implementation name without an entry for this one.
    passed : set of str
        Unsupported arguments that layers pass.
    """

    model: type
    by_interface: set[str]
    own: set[str]
    choices: set[str]
    passed: set[str]

    def check(self, implementation: str) -> None:
        """Raise UnsupportedError if the implementation would fail, or would never be called."""
        module = vars(sys.modules[self.model.__module__])
        is_used = self.by_interface or any(
            isinstance(x, AttentionInterface) for x in module.values()
        )
        if self.choices:
            reason = f"it chooses its layers by name, from {_listed(self.choices)}"
        elif self.passed:
            reasons = (f"it passes {name}, but {UNSUPPORTED[name]}" for name in sorted(self.passed))
            reason = "; ".join(reasons)
        elif self.own and not is_used:
            reason = f"{_listed(self.own)} does not use AttentionInterface"
        else:
            return
        raise UnsupportedError(
            f"{self.model.__name__} does not support attn_implementation={implementation!r}: "
            f"{reason}; use attn_implementation='eager'. If it is part of a larger model, name one "
            f"for each part: {{'text_config': {implementation!r}, 'vision_config': 'eager'}}"
        )

    def warn(self, implementation: str) -> None:
        """Warn of each layer that computes attention itself."""
        for layer in sorted(self.own):
            warnings.warn(
                f"{layer} computes attention itself: attn_implementation={implementation!r} is not "
                "used there",
                stacklevel=4,
            )


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def layers_of(model: type, implementation: str) -> Layers:
    """Find the attention layers that a model's code refers to."""
    layers = Layers(model, set(), set(), set(), set())
    for part in _reached(model):
        if isinstance(part, dict) and implementation not in part:
            layers.choices.update(each.__name__ for each in part.values())
        elif _is_attention(part):
            if any(isinstance(each, AttentionInterface) for each in _named(part)):
                layers.by_interface.add(part.__name__)
                layers.passed.update(UNSUPPORTED.keys() & _words(part))
            elif not any(map(_is_attention, _reached(part))):
                layers.own.add(part.__name__)
    return layers


def _is_attention(part: Any) -> bool:
    """Return True for a class whose name ends in ``Attention``, transformers' convention."""
    return isinstance(part, type) and re.search(r"Attention\d*$", part.__name__) is not None


def _reached(start: type) -> list[Any]:
    """Collect the layers, functions and tables that a class refers to, directly or indirectly.

    Models with a config class of their own are left out: they are checked when they are made.
    """
    config = getattr(start, "config_class", None)
    found: dict[int, Any] = {id(start): start}
    waiting: list[Any] = [start]
    while waiting:
        for part in _named(waiting.pop()):
            is_model = isinstance(part, type) and issubclass(part, PreTrainedModel)
            if id(part) not in found and not (is_model and part.config_class is not config):
                found[id(part)] = part
                waiting.append(part)
    del found[id(start)]
    return list(found.values())


def _named(part: Any) -> Iterator[Any]:
    """Yield the layers, functions and tables that a layer, function or table refers to."""
    if isinstance(part, dict):
        yield from part.values()
    elif isinstance(part, FunctionType):
        for code in _codes(part.__code__):
            for name in code.co_names:
                value = part.__globals__.get(name)
                is_near = isinstance(value, FunctionType) and value.__module__ == part.__module__
                if is_near or _is_part(value):
                    yield value
    elif isinstance(part, type):
        for member in _members(part):
            if isinstance(member, FunctionType):
                yield from _named(member)
            elif _is_part(member):
                yield member


def _words(layer: type) -> set[Any]:
    """Collect the constants in a layer's code; names of keyword arguments are among them."""
    found: set[Any] = set()
    for member in _members(layer):
        if isinstance(member, FunctionType):
            for code in _codes(member.__code__):
                for constant in code.co_consts:
                    found.update(constant if isinstance(constant, tuple) else (constant,))
    return found


def _members(layer: type) -> Iterator[Any]:
    """Yield the members of a class and of its bases that are not overridden."""
    overridden = {"_init_weights"}
    for base in layer.__mro__:
        if issubclass(base, torch.nn.Module) and base not in _BASES:
            members = {n: x for n, x in vars(base).items() if n not in overridden}
            for name, member in members.items():
                function = inspect.unwrap(member) if isinstance(member, FunctionType) else member
                if "super" not in getattr(getattr(function, "__code__", None), "co_names", ()):
                    overridden.add(name)
                yield function


def _is_part(value: Any) -> bool:
    """Return True for a layer, a table of layers by implementation name, and the interface."""
    if isinstance(value, type):
        return issubclass(value, torch.nn.Module)
    is_table = isinstance(value, dict) and "eager" in value and all(map(_is_part, value.values()))
    return is_table or isinstance(value, AttentionInterface)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
