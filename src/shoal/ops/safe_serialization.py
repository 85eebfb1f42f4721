"""Plain data and tensors as bytes: the format of :func:`shoal.broadcast_object`. Nothing is unpickled.

A message is the length of a text, the text, and the bytes of the tensors one after the other. The text is JSON: None,
booleans, strings, whole numbers up to 64 bits and finite floats are themselves. Any other value is a list that begins
with its type, ``["tuple", 1, 2]``. A tensor that occurs twice (tied weights) is written once and arrives once.

:func:`read` trusts no sender. It makes only types that it names itself, and a tensor only if all of its bytes have
arrived; it allocates nothing by a size that the message merely claims. For a message that it accepts, :func:`write`
would write the result in the same form.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..transport.messages import MAX_DIMENSIONS

MOST_DEPTH = 100
"""The limit of the nesting of objects."""
_MOST_OF_ONE_HASH = 64
"""Keys that are made to have one hash take a time that grows with the square of their number."""
_LENGTH = struct.Struct("<Q")
_DOUBLE = struct.Struct(">d")
_WORD = 1 << 63
_QUANTIZED = ("qint", "quint")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple}
_SETS: dict[str, Callable[[Iterable[Any]], Any]] = {"set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_KINDS: dict[type, str] = {kind: name for name, kind in [*_SEQUENCES.items(), *_SETS.items()]}  # type: ignore[misc]
_KINDS |= {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter", torch.Size: "Size"}
_TENSORS: dict[type, str] = {torch.Tensor: "tensor", torch.nn.Parameter: "parameter"}


class NotPlain(ValueError):
    """The bytes are not what :func:`write` writes."""


def write(value: object, name: str = "value") -> torch.Tensor:
    """An object as bytes: uint8, one dimension, on the CPU.

    Raises:
        TypeError: A part of it is no plain data; the message names it and its place: ``value['a'][3] is a Foo``.
        ValueError: The data is nested too deeply, or contains itself.
    """
    writer = _DataWriter(name)
    text = json.dumps(writer.as_data(value), separators=(",", ":"), allow_nan=False).encode("ascii")
    begin = _LENGTH.size + len(text)
    message = torch.empty(begin + sum(map(_nbytes, writer.tensors)), dtype=torch.uint8, device="cpu")
    message[:begin] = torch.frombuffer(bytearray(_LENGTH.pack(len(text)) + text), dtype=torch.uint8)
    for tensor in writer.tensors:
        end = begin + _nbytes(tensor)
        if end > begin:
            values = tensor.resolve_conj().resolve_neg().contiguous()
            message[begin:end].copy_(values.view(-1).view(torch.uint8))
        begin = end
    return message


def read(message: torch.Tensor) -> Any:
    """The value that :func:`write` was given; tensors on the CPU, in memory of their own.

    Raises:
        NotPlain: The bytes are something else.
    """
    try:
        return _read(message)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError, struct.error) as error:
        raise error if isinstance(error, NotPlain) else NotPlain(f"{type(error).__name__}: {error}") from None


def _read(message: torch.Tensor) -> Any:
    nbytes = message.numel()
    if nbytes < _LENGTH.size:
        raise NotPlain(f"{nbytes} bytes are too few")
    [length] = _LENGTH.unpack(message[: _LENGTH.size].numpy().tobytes())
    begin = _LENGTH.size + length
    if begin > nbytes:
        raise NotPlain(f"a text of {length} bytes in a message of {nbytes}")
    text = message[_LENGTH.size : begin].numpy().tobytes().decode("ascii")
    reader = _DataReader(message, begin)
    content = json.loads(
        text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse, object_pairs_hook=_refuse
    )
    value = reader.value(content, 0)
    if reader.at != nbytes:
        raise NotPlain(f"{nbytes - reader.at} bytes too many")
    return value


# Writing


class _DataWriter:
    """Turns objects into what JSON can say, and collects the tensors."""

    def __init__(self, name: str) -> None:
        self.tensors: list[torch.Tensor] = []
        self._known: dict[Hashable, int] = {}
        self._name = name
        # The path to the value that is being written: formatted only for an error.
        self._path: list[tuple[str, object]] = [("", None)] * (MOST_DEPTH + 1)

    def as_data(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _ATOMS:
            return _ATOMS[kind](value)
        if kind in _TENSORS:
            return self._tensor(value, depth)
        if kind not in _KINDS:
            raise TypeError(f"{self._where(depth)} is a {_class_name(kind)}")
        if depth > MOST_DEPTH:
            path = self._where(MOST_DEPTH)
            raise ValueError(f"{path[:80]}... has more than {MOST_DEPTH} objects in each other, or has itself in it")
        if isinstance(value, dict):
            return [_KINDS[kind], *self._beside(value, depth), *self._pairs(value, depth)]
        if isinstance(value, (set, frozenset)):
            self._check(list(value), depth)
        return [_KINDS[kind], *self._elements(value, depth, "" if isinstance(value, (list, tuple)) else "an element")]

    def _elements(self, value: Iterable[Any], depth: int, role: str) -> Iterator[Any]:
        for position, element in enumerate(value):
            self._path[depth] = role, position
            yield self.as_data(element, depth + 1)

    def _pairs(self, value: dict[Any, Any], depth: int) -> Iterator[Any]:
        self._check(list(value), depth)
        for key, item in value.items():
            self._path[depth] = "a key", None
            yield self.as_data(key, depth + 1)
            self._path[depth] = "", key
            yield self.as_data(item, depth + 1)

    def _beside(self, value: dict[Any, Any], depth: int) -> Iterator[Any]:
        """The metadata of a module's state beside its tensors: the versions of its classes."""
        if isinstance(value, OrderedDict):
            beside = vars(value)
            if beside.keys() - {"_metadata"}:
                raise TypeError(f"{self._where(depth)} has attributes, which are not sent: {', '.join(beside)}")
            self._path[depth] = "_metadata", None
            yield self.as_data(beside.get("_metadata"), depth + 1)

    def _tensor(self, tensor: torch.Tensor, depth: int) -> list[Any]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        special = "nested" if tensor.is_nested else "meta" if tensor.is_meta else ""
        if special or tensor.layout != torch.strided or dtype.startswith(_QUANTIZED):
            kind = special or f"{tensor.layout}, {tensor.dtype}".replace("torch.", "")
            raise TypeError(f"{self._where(depth)} is a tensor ({kind}) that is no plain block of numbers")
        if tensor.dim() > MAX_DIMENSIONS:
            raise TypeError(f"{self._where(depth)} has {tensor.dim()} dimensions; a tensor may have {MAX_DIMENSIONS}")
        marks = _TENSORS[type(tensor)], tensor.requires_grad
        place = (marks, _place(tensor)) if tensor.numel() else id(tensor)
        if place in self._known:
            return ["same", self._known[place]]
        self._known[place] = len(self.tensors)
        # In the order of its memory, if that has no gaps, so that fast traversal stays fast.
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        dense = tensor.permute(order)
        if tensor.is_contiguous() or not dense.is_contiguous():
            order, dense = list(range(tensor.dim())), tensor
        self.tensors.append(dense.detach())
        return [marks[0], dtype, list(dense.shape), order, marks[1]]

    def _check(self, keys: list[Any], depth: int) -> None:
        problem = _problem_of(keys)
        if problem:
            raise ValueError(f"{self._where(depth)} {problem}")

    def _where(self, depth: int) -> str:
        text = self._name
        for role, key in self._path[:depth]:
            text = f"{role} of {text}" if role else f"{text}[{_shortened(key)}]"
        return text


def _place(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Equal for tensors that are one in memory."""
    at = tensor.device, tensor.data_ptr(), tensor.dtype
    return *at, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _int(value: int) -> Any:
    # In base 16, which takes a time that grows with the length and not with its square.
    return value if -_WORD <= value < _WORD else ["int", hex(value)]


def _float(value: float) -> Any:
    return value if math.isfinite(value) else ["float", _bits(value)]


def _bits(value: float) -> str:
    """All of a float, also which of the many NaN it is."""
    return _DOUBLE.pack(value).hex()


def _str(value: str) -> Any:
    # JSON reads two halves of a character that stand together as that character.
    if value.isascii() or not _SURROGATES.search(value):
        return value
    return ["str", value.encode("utf-8", "surrogatepass").hex()]


_SURROGATES = re.compile("[\ud800-\udfff]")

_ATOMS: dict[type, Callable[[Any], Any]] = {
    int: _int,
    float: _float,
    str: _str,
    complex: lambda value: ["complex", _bits(value.real), _bits(value.imag)],
    bytes: lambda value: ["bytes", value.hex()],
    bytearray: lambda value: ["bytearray", value.hex()],
    torch.dtype: lambda value: ["dtype", str(value).removeprefix("torch.")],
    torch.device: lambda value: ["device", str(value)],
}


def _class_name(kind: type) -> str:
    bases = [base for base in (*_ATOMS, *_KINDS, *_TENSORS) if issubclass(kind, base)]
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name}, and no plain {bases[0].__name__}" if bases else name


def _shortened(key: object) -> str:
    try:
        text = repr(key)
    except ValueError:  # Python does not write out numbers of thousands of digits
        text = "a long number"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _problem_of(keys: list[Any]) -> str:
    """Why these cannot be the keys of a dict, or the elements of a set, that is written and read; or nothing."""
    for key in keys:
        if isinstance(key, torch.Tensor):
            return "has a tensor as a key or element, which equals nothing else"
        if _has_nan(key):
            return "has NaN as a key or element, which equals nothing"
    if len(keys) > _MOST_OF_ONE_HASH and max(Counter(map(hash, keys)).values()) > _MOST_OF_ONE_HASH:
        return f"has more than {_MOST_OF_ONE_HASH} keys or elements of one hash"
    return ""


def _has_nan(key: Any) -> bool:
    if isinstance(key, (tuple, frozenset)):
        return any(map(_has_nan, key))
    return isinstance(key, (float, complex)) and key != key


# Reading


class _DataReader:
    """Makes objects from the JSON text, and tensors from the bytes that follow."""

    def __init__(self, message: torch.Tensor, at: int) -> None:
        self.at = at
        self._message = message
        self._tensors: list[torch.Tensor] = []
        self._makers: dict[str, Callable[[str, list[Any], int], Any]] = {
            **dict.fromkeys(_SEQUENCES, self._sequence),
            **dict.fromkeys(_SETS, self._set),
            **dict.fromkeys(_MAPPINGS, self._mapping),
            **dict.fromkeys(_TENSORS.values(), self._tensor),
            "same": self._same,
            "Size": self._size,
        }

    def value(self, content: Any, depth: int) -> Any:
        if not isinstance(content, list):
            return content
        if depth > MOST_DEPTH:
            raise NotPlain(f"deeper than {MOST_DEPTH} objects in each other")
        kind, *rest = content
        if not isinstance(kind, str):
            raise NotPlain("a list that does not begin with its kind")
        if kind in _READ_ATOMS:
            return _READ_ATOMS[kind](*map(_text, rest))
        if kind not in self._makers:
            raise NotPlain(f"there is no kind {_shortened(kind)}")
        return self._makers[kind](kind, rest, depth + 1)

    def _sequence(self, kind: str, rest: list[Any], depth: int) -> Any:
        return _SEQUENCES[kind]([self.value(element, depth) for element in rest])

    def _size(self, kind: str, rest: list[Any], depth: int) -> torch.Size:
        return torch.Size(_shape(rest))

    def _set(self, kind: str, rest: list[Any], depth: int) -> Any:
        elements = [self.value(element, depth) for element in rest]
        _check_keys(kind, elements)
        return _SETS[kind](elements)

    def _mapping(self, kind: str, rest: list[Any], depth: int) -> Any:
        found = _MAPPINGS[kind]()
        if kind == "OrderedDict":
            metadata, *rest = rest
            if metadata is not None:
                found._metadata = self.value(metadata, depth)
        if len(rest) % 2:
            raise NotPlain(f"a {kind} has a key without a value")
        # Keys and values in turn, as they were written: that is the order of the tensors.
        pairs = [self.value(element, depth) for element in rest]
        _check_keys(kind, pairs[::2])
        # Not by update(), because a Counter counts its arguments.
        for key, item in zip(pairs[::2], pairs[1::2], strict=True):
            found[key] = item
        return found

    def _same(self, kind: str, rest: list[Any], depth: int) -> torch.Tensor:
        [number] = rest
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise NotPlain(f"there is no tensor {_shortened(number)} so far")
        return self._tensors[number]

    def _tensor(self, kind: str, rest: list[Any], depth: int) -> torch.Tensor:
        name, sizes, order, requires_grad = rest
        dtype = _DTYPES.get(_text(name))
        if dtype is None or name.startswith(_QUANTIZED):
            raise NotPlain(f"a tensor of {_shortened(name)}, a dtype that torch {torch.__version__} has not here")
        shape = _shape(sizes)
        if len(shape) > MAX_DIMENSIONS or type(requires_grad) is not bool or _sorted_ints(order) != len(shape):
            raise NotPlain(f"a tensor of {len(shape)} dimensions, {_shortened(order)}, {_shortened(requires_grad)}")
        nbytes = dtype.itemsize * math.prod(shape)
        if nbytes > self._message.numel() - self.at:
            raise NotPlain(
                f"a tensor {_shortened(list(shape))} of {name} needs {nbytes} bytes; there are only "
                f"{self._message.numel() - self.at}"
            )
        flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        flat.copy_(self._message[self.at : self.at + nbytes])
        self.at += nbytes
        if dtype == torch.bool and (flat > 1).any():
            raise NotPlain("a tensor of bool has other bytes than 0 and 1")
        # An empty tensor's sizes are not worth bytes, and their product may be more than torch can count.
        dense = flat.view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype, device="cpu")
        tensor = dense.permute(_inverse(order))
        if kind == "parameter":
            tensor = torch.nn.Parameter(tensor, requires_grad)
        elif requires_grad:
            tensor.requires_grad_()
        self._tensors.append(tensor)
        return tensor


def _check_keys(kind: str, keys: list[Any]) -> None:
    problem = _problem_of(keys)
    if problem:
        raise NotPlain(f"a {kind} {problem}")
    if len(set(keys)) < len(keys):
        raise NotPlain(f"a {kind} has one key or element twice")


def _shape(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or not all(type(size) is int and 0 <= size < _WORD for size in sizes):
        raise NotPlain(f"{_shortened(sizes)} is no shape")
    return tuple(sizes)


def _sorted_ints(order: Any) -> int:
    """How many dimensions are in an order; -1 if it is none."""
    if not isinstance(order, list) or any(type(dimension) is not int for dimension in order):
        return -1
    return len(order) if sorted(order) == list(range(len(order))) else -1


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise NotPlain(f"{_shortened(content)} is no text")
    return content


def _parse_int(word: str) -> int:
    # Its length first: int() takes a time that grows with the square.
    value = int(word) if len(word) <= 20 else _WORD
    if not -_WORD <= value < _WORD:
        raise NotPlain("a whole number of more than 64 bits")
    return value


def _parse_float(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise NotPlain("a float that is not finite")
    return value


def _refuse(content: object) -> Any:
    raise NotPlain("JSON of another kind")


def _read_int(word: str) -> int:
    if not _HEX.fullmatch(word):
        raise NotPlain("a whole number in another form")
    return int(word, 16)


def _read_float(word: str) -> float:
    return float(_DOUBLE.unpack(bytes.fromhex(word))[0])


_HEX = re.compile("-?0x[0-9a-f]+")

_READ_ATOMS: dict[str, Callable[..., Any]] = {
    "int": _read_int,
    "float": _read_float,
    "complex": lambda real, imag: complex(_read_float(real), _read_float(imag)),
    "str": lambda word: bytes.fromhex(word).decode("utf-8", "surrogatepass"),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "dtype": lambda word: _DTYPES[word],
    "device": lambda word: torch.device(word),
}
