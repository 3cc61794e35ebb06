"""How do classes of ours pass for those of onnxruntime's extension module, at the edges that clients see?

Clients match class names in logs, catch pybind11's `TypeError`s, and compare its enumerations with integers. What
is copied here is that behaviour: classes say that they live in `onnxruntime.capi.onnxruntime_pybind11_state`,
values of the wrong type are refused with the same words, and enumerations have the same methods.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

STATE = "onnxruntime.capi.onnxruntime_pybind11_state"  # `__module__` of the classes that are native there
COLLECTION = "onnxruntime.capi.onnxruntime_inference_collection"  # of those that are written in Python there
INT = "typing.SupportsInt | typing.SupportsIndex"


def incompatible(name: str, signature: str, *arguments: Any, kind: str = "function") -> TypeError:
    """The `TypeError` of a call that fits no overload."""
    shown = ", ".join(map(repr, arguments))
    return TypeError(
        f"{name}(): incompatible {kind} arguments. The following argument types are supported:\n"
        f"    1. {signature}\n\nInvoked with: {shown}"
    )


def integer(value: Any, name: str, signature: str, *arguments: Any) -> int:
    """An `int` of anything with `__index__`; floats, strings and `None` are refused."""
    try:
        return operator.index(value)
    except TypeError:
        raise incompatible(name, signature, *arguments) from None


def text(value: Any, name: str, signature: str, *arguments: Any) -> str:
    """A `str`, or the refusal of anything else."""
    if isinstance(value, str):
        return value
    raise incompatible(name, signature, *arguments)


def setting(check: Callable[[Any], Any], expected: str, default: Any, doc: str) -> Any:
    """A property of an options class: kept in `self._values`, converted by `check`, which may refuse it."""

    class Setting:
        __doc__ = doc

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type) -> Any:
            return self if instance is None else instance._values.get(self.name, default)

        def __set__(self, instance: Any, value: Any) -> None:
            try:
                instance._values[self.name] = check(value)
            except TypeError:
                cls = f"{STATE}.{type(instance).__qualname__}"
                raise incompatible("", f"(arg0: {cls}, arg1: {expected}) -> None", instance, value) from None

    return Setting()


def a_bool(default: bool, doc: str) -> Any:
    """A property that takes truth values."""
    return setting(bool, "bool", default, doc)


def an_int(default: int, doc: str) -> Any:
    """A property that takes integers."""
    return setting(operator.index, INT, default, doc)


def a_str(default: str, doc: str) -> Any:
    """A property that takes strings, and paths."""

    def check(value: Any) -> str:
        if isinstance(value, str):
            return value
        return value.__fspath__() if hasattr(value, "__fspath__") else operator.index(value)  # type: ignore[return-value]

    return setting(check, "str", default, doc)


def anything(doc: str) -> Any:
    """A property that takes whatever it is given."""
    return setting(lambda value: value, "object", None, doc)


def an_enum(default: Enumeration, doc: str) -> Any:
    """A property that takes members of one enumeration, and nothing else."""
    kind = type(default)

    def check(value: Any) -> Enumeration:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return setting(check, f"{STATE}.{kind.__name__}", default, doc)


def unpicklable(self: Any, protocol: Any = None) -> Any:
    """`__reduce_ex__` of the objects that onnxruntime cannot pickle or deep-copy either."""
    raise TypeError(f"cannot pickle '{type(self).__module__}.{type(self).__qualname__}' object")


class pybind11_type(type):
    """The type of enumerations: neither iterable nor subscriptable, unlike `enum.EnumMeta`."""


class Enumeration(metaclass=pybind11_type):
    """A member of an enumeration of pybind11: `value`, `name`, equal to its integer, and hashed as it."""

    __members__: dict[str, Any] = {}
    _equals_int = True
    _flags = False

    def __init__(self, value: int) -> None:
        self._value = operator.index(value)

    @property
    def value(self) -> int:
        """The number of the member."""
        return self._value

    @property
    def name(self) -> str:
        """The name of the member; `???` for a number without one."""
        return next((n for n, m in type(self).__members__.items() if m._value == self._value), "???")

    def __int__(self) -> int:
        return self._value

    __index__ = __int__

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, type(self)):
            return self._value == other._value
        return self._equals_int and isinstance(other, int) and self._value == other

    def __hash__(self) -> int:
        return hash(self._value)

    def __or__(self, other: Any) -> int:
        return self._value | int(other) if self._flags else NotImplemented

    def __and__(self, other: Any) -> int:
        return self._value & int(other) if self._flags else NotImplemented

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> Any:
        return member, (type(self).__name__, self._value)


def enumeration(name: str, doc: str, *, flags: bool = False, equals_int: bool = True, **members: int) -> type:
    """A class with these members, each also an attribute of the class."""
    body = {"__doc__": doc, "__module__": STATE, "_flags": flags, "_equals_int": equals_int}
    made: Any = pybind11_type(name, (Enumeration,), body)
    made.__members__ = {key: made(number) for key, number in members.items()}
    for key, value in made.__members__.items():
        setattr(made, key, value)
    return made


def member(name: str, value: int) -> Any:
    """The member of an enumeration, for unpickling under whatever name this package was imported."""
    from ep.onnxruntime import enums

    return getattr(enums, name)(value)
