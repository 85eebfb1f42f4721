"""Objects travel as plain data: equal on the other side, and no claim in the bytes is trusted."""

from __future__ import annotations

import io
import json
import math
import random
import re
import resource
import struct
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.ops import safe_serialization
from shoal.ops.collective import broadcast_steps
from shoal.ops.safe_serialization import NotPlain, read, write
from shoal.runtime.agent import current
from support.limits import scaled
from support.reference import same_bits

Fleets = Callable[..., shoal.Fleet]


def same(one: Any, other: Any) -> bool:
    """Equal in type, value and order; floats and tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return same_bits(one, other) and strides(one) == strides(other) and one.requires_grad == other.requires_grad
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        same_metadata = same(getattr(one, "_metadata", None), getattr(other, "_metadata", None))
        return same_metadata and same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return one == other and all(any(same(own, remote) for remote in other) for own in one)
    return bool(one == other)


def strides(tensor: torch.Tensor) -> list[int]:
    """Those that mean something."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1 and tensor.numel()]


def any_bits() -> st.SearchStrategy[float]:
    return st.integers(0, 2**64 - 1).map(lambda word: float(struct.unpack("<d", struct.pack("<Q", word))[0]))


texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud83d\ude00", "\udc80", "ü\ud800", "\0", '"\\'])
numbers = st.integers() | st.integers(-(2**80), 2**80) | st.sampled_from([2**63, 2**63 - 1, -(2**63)])
keys = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
atoms = keys | any_bits() | st.builds(complex, any_bits(), any_bits()) | st.binary().map(bytearray)
torch_atoms = st.sampled_from([torch.bfloat16, torch.quint8, torch.device("cuda", 3), torch.device("cpu")])
sizes = st.lists(st.integers(0, 4), max_size=4)
DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.int64, torch.float8_e5m2]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(sizes), draw(st.sampled_from(DTYPES))
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw &= 1
    tensor = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    if shape:
        tensor = draw(st.sampled_from([tensor, tensor.transpose(0, -1)]))
    if dtype.is_floating_point and draw(st.booleans()):
        tensor.requires_grad_()
    return tensor


values = st.recursive(
    atoms | torch_atoms | sizes.map(torch.Size) | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=60)
def test_encoded_values_are_decoded_equally(value: Any) -> None:
    assert same(read(write(value)), value)


def spoil_and_read(value: Any, chance: random.Random) -> None:
    """Accepted data are plain: they can be serialized again, with an equal result."""
    message = write(value)
    for _ in range(8):
        spoiled = bytearray(message.numpy().tobytes())
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(spoiled))
            how = chance.randrange(4)
            if how == 0:
                spoiled[at] ^= 1 << chance.randrange(8)
            elif how == 1:
                spoiled[at:at] = chance.choice([b"[", b"]", b"9", b"[9e9,", b"\0" * 5, b'"tensor",', b"null,"])
            elif how == 2:
                del spoiled[at : at + chance.randrange(1, 4)]
            else:
                spoiled[at:at] = spoiled[: chance.randrange(len(spoiled))]
            spoiled = spoiled or bytearray(1)
            if chance.random() < 0.8 and len(spoiled) >= 8:  # with a length that fits, the text is looked at
                spoiled[:8] = struct.pack(
                    "<Q", max(0, len(spoiled) - 8 - sum(map(safe_serialization._nbytes, tensors_in(value))))
                )
        try:
            accepted = read(torch.frombuffer(spoiled, dtype=torch.uint8))
        except NotPlain:
            continue
        assert same(read(write(accepted)), accepted)


@given(values, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_corrupt_bytes_are_refused_or_give_a_plain_value(value: Any, chance: random.Random) -> None:
    spoil_and_read(value, chance)


@pytest.mark.soak
@given(values, st.randoms(use_true_random=False))
@settings(max_examples=12_500)
def test_a_hundred_thousand_corrupt_messages_are_refused_or_give_a_plain_value(
    value: Any, chance: random.Random
) -> None:
    spoil_and_read(value, chance)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [one for part in value for one in tensors_in(part)] if isinstance(value, (list, tuple)) else []


def message(text: str, after: bytes = b"") -> torch.Tensor:
    raw = struct.pack("<Q", len(text.encode())) + text.encode() + after
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


LIES = {
    "three GiB": ('["tensor","float32",[805306368],[0],false]', b"1234"),
    "more than there is": ('["tensor","uint8",[9223372036854775807,9223372036854775807],[0,1],false]', b"1234"),
    "one byte too many": ('["tensor","uint8",[3],[0],false]', b"1234"),
    "bytes of nobody": ("1", b"1"),
    "one byte too few": ('["tensor","uint8",[5],[0],false]', b"1234"),
    "less than nothing": ('["tensor","uint8",[-4],[0],false]', b"1234"),
    "sizes that are none": ('["tensor","uint8",[4.0],[0],false]', b"1234"),
    "true is no size": ('["tensor","uint8",[true],[0],false]', b"1"),
    "no such dtype": ('["tensor","float31",[1],[0],false]', b"1234"),
    "no dtype": ('["tensor","Tensor",[1],[0],false]', b"1234"),
    "quantized": ('["tensor","qint8",[4],[0],false]', b"1234"),
    "dimensions": ('["tensor","uint8",[1,4],[0],false]', b"1234"),
    "order": ('["tensor","uint8",[1,4],[0,0],false]', b"1234"),
    "no bool": ('["tensor","bool",[4],[0],false]', b"\0\1\2\1"),
    "gradient": ('["tensor","uint8",[4],[0],true]', b"1234"),
    "no tensor": ('["same",0]', b""),
    "itself": ('["list",["same",0],["tensor","uint8",[4],[0],false]]', b"1234"),
    "before": ('["list",["tensor","uint8",[4],[0],false],["same",-1]]', b"1234"),
    "too large to count": ('["Size",99999999999999999999]', b""),
    "million digits": ("9" * 1_000_000, b""),
    "infinite": ("1e999", b""),
    "NaN": ("NaN", b""),
    "Infinity": ("-Infinity", b""),
    "object": ("{}", b""),
    "pair": ('{"a":1}', b""),
    "nothing": ("", b""),
    "two": ("1 2", b""),
    "empty list": ("[]", b""),
    "list of lists": ("[[]]", b""),
    "unknown": ('["module","os"]', b""),
    "unhashable": ('["dict",["list"],1]', b""),
    "half a pair": ('["dict",1]', b""),
    "no metadata": ('["OrderedDict"]', b""),
    "twice": ('["dict","a",1,"a",2]', b""),
    "equal": ('["dict",1,1,true,2]', b""),
    "twice in a set": ('["set",1,1.0]', b""),
    "key NaN": ('["dict",["float","7ff8000000000000"],1]', b""),
    "NaN in a key": ('["dict",["tuple",1,["float","7ff8000000000000"]],1]', b""),
    "element NaN": ('["set",["float","7ff8000000000000"]]', b""),
    "tensor as key": ('["dict",["tensor","uint8",[1],[0],false],1]', b"1"),
    "float": ('["float","7ff8"]', b""),
    "no text": ('["str",["list"]]', b""),
    "half a character": ('["str","c3"]', b""),
    "device": ('["device","nowhere:77"]', b""),
    "not ascii": ('"é"', b""),
    "deep": ('["list",' * 102 + "1" + "]" * 102, b""),
    "very deep": ("[" * 1_000_000, b""),
    "one hash": ('["set"' + "".join(f',["int","{hex(k * (2**61 - 1))}"]' for k in range(1, 5000)) + "]", b""),
}


@pytest.mark.parametrize("lie", LIES)
def test_false_lengths_are_refused_at_once_and_cost_no_memory(lie: str) -> None:
    text, after = LIES[lie]
    spoiled = message(text, after)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(NotPlain):
        read(spoiled)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert time.monotonic() - started < scaled(1.0)


@pytest.mark.parametrize("raw", [b"", b"1234567", b"\xff" * 8, struct.pack("<Q", 2) + b"1"])
def test_a_message_that_is_not_text_is_refused(raw: bytes) -> None:
    with pytest.raises(NotPlain):
        read(torch.tensor(list(raw), dtype=torch.uint8))


class ForeignClass:
    pass


class StrSubclass(str):
    pass


Colour = IntEnum("Colour", "RED")
Pair = namedtuple("Pair", "a b")
with_attribute: OrderedDict[str, int] = OrderedDict()
with_attribute.other = 1  # type: ignore[attr-defined]
itself: list[Any] = []
itself.append(itself)
deep: list[Any] = []
for _ in range(101):
    deep = [deep]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it will be gone one day
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)

REFUSED: dict[str, tuple[Any, str]] = {
    "object": (
        {"a": [0, 1, 2, ForeignClass()]},
        rf"value\['a'\]\[3\] is a {re.escape(ForeignClass.__module__)}.ForeignClass",
    ),
    "class": (ForeignClass, "value is a type"),
    "function": ([print], r"value\[0\] is a builtin_function"),
    "str": ((1, StrSubclass("x")), r"value\[1\] is a .*StrSubclass, and no plain str"),
    "int": ({"a": {"b": Colour.RED}}, r"value\['a'\]\['b'\] is a .*Colour, and no plain int"),
    "tuple": ([Pair(1, 2)], r"value\[0\] is a .*Pair, and no plain tuple"),
    "dict": ([defaultdict(int)], r"value\[0\] is a collections.defaultdict, and no plain dict"),
    "numpy's": ([np.float64(1)], r"value\[0\] is a numpy.float64, and no plain float"),
    "array": (np.ones(2), "value is a numpy.ndarray"),
    "key": ({"a": {StrSubclass("x"): 1}}, r"a key of value\['a'\] is a .*StrSubclass"),
    "in a key": ({(1, ForeignClass()): 1}, r"a key of value\[1\] is a"),
    "element": ([{ForeignClass()}], r"an element of value\[0\] is a"),
    "attribute": ([with_attribute], r"value\[0\] has attributes, which are not sent: other"),
    "sparse": ([torch.eye(2).to_sparse()], r"value\[0\] is a tensor \(sparse_coo, float32\)"),
    "quantized": (quantized, r"value is a tensor \(.*qint8\)"),
    "meta": (torch.empty(2, device="meta"), r"value is a tensor \(meta\)"),
    "buffer": (torch.nn.parameter.UninitializedParameter(), "no plain Tensor|no plain Parameter"),
    "dimensions": (torch.ones([1] * 65), "65 dimensions"),
    "NaN": ({"a": {(1, math.nan): 2}}, r"value\['a'\] has NaN as a key"),
    "tensor as key": ({torch.ones(1): 2}, "value has a tensor as a key"),
    "itself": ({"a": itself}, r"value\['a'\]\[0\]\[0\].* or has itself in it"),
    "deep": (deep, "more than 100 objects in each other"),
    "one hash": ({k * (2**61 - 1) for k in range(100)}, "of one hash"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_unsupported_values_are_refused_at_the_root_with_their_path(what: str) -> None:
    value, expected_message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=expected_message):
        write(value)


def test_a_long_integer_is_sent_and_printable_in_an_error() -> None:
    assert read(write({10**5000: 1})) == {10**5000: 1}
    with pytest.raises(TypeError, match=r"value\[a long number\] is a type"):
        write({10**5000: ForeignClass})


def test_a_hundred_nested_objects_are_sent() -> None:
    assert read(write(deep[0])) == deep[0]


SPECIAL: dict[str, torch.Tensor] = {
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(3, 4).t(),
    "a column": torch.randn(3, 4)[:, 1],
    "expanded": torch.randn(1, 3).expand(1000, 3),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "half complex": torch.randn(3, dtype=torch.complex64),
    "inference": torch.randn(3),
    "no dimension": torch.tensor(3.0),
    "not a leaf": torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "frozen parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False),
    "empty": torch.empty(0, 7, 3),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_tensors_arrive_with_their_values(kind: str) -> None:
    tensor = SPECIAL[kind]
    result = read(write([tensor]))[0]
    assert type(result) is type(tensor)
    assert same_bits(result.detach(), tensor.detach())
    assert result.requires_grad == tensor.requires_grad
    if kind in ("channels last", "transposed"):
        assert result.stride() == tensor.stride()
    assert write(tensor).numel() < 8 + 80 + tensor.numel() * tensor.element_size()


def test_tensors_get_their_own_memory_and_shared_ones_stay_shared() -> None:
    model = torch.nn.Linear(30, 30)
    state = {"first": model.weight.detach(), "tied": model.weight.detach(), "other": model.weight.t()[:1], "b": {}}
    message = write(state)
    assert message.numel() < 30 * 31 * 4 + 300
    result = read(message)
    assert result["first"] is result["tied"]
    assert all(one.untyped_storage().nbytes() == one.numel() * 4 for one in (result["first"], result["other"]))
    message.zero_()
    assert same_bits(result["first"], state["first"])


def test_a_models_version_metadata_is_sent() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3)).state_dict()
    result = read(write(state))
    assert result._metadata == state._metadata and same(result, state)  # type: ignore[attr-defined]


def schedules(optimizer: torch.optim.Optimizer) -> list[Any]:
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer), lr.ExponentialLR(optimizer, 0.9)]
    return [
        lr.StepLR(optimizer, 2),
        lr.MultiStepLR(optimizer, [2, 3, 3]),
        lr.CosineAnnealingLR(optimizer, 5),
        lr.CosineAnnealingWarmRestarts(optimizer, 5),
        lr.ReduceLROnPlateau(optimizer),
        lr.OneCycleLR(optimizer, 0.1, 10),
        lr.PolynomialLR(optimizer),
        lr.SequentialLR(optimizer, parts, [3]),
        lr.LambdaLR(optimizer, lambda step: 1.0),
    ]


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Rprop"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_states_of_optimizers_and_schedules_are_sent(kind: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert same(read(write(optimizer.state_dict())), optimizer.state_dict())
    for schedule in schedules(optimizer) if kind == "SGD" else ():
        assert same(read(write(schedule.state_dict())), schedule.state_dict()), schedule


# Between agents


class Greeting:
    """Says that it was unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("this was executed",)


def sent_by_rank_0(raw: torch.Tensor, kind: str) -> Callable[[], None]:
    """The actions of an agent that sends these bytes as an object, and the others' results."""

    def run() -> None:
        agent = current()
        if agent.rank == 0:
            steps = lambda operation: broadcast_steps(agent, operation, raw, 0, torch.uint8)  # noqa: E731
            agent.engine.submit(kind, "~broadcast_object", steps).wait()
        else:
            with pytest.raises(shoal.Mismatch, match=r"broadcast_object on rank [12]") as caught:
                shoal.broadcast_object(None, 0)
            assert caught.value.ranks == (0,)
        assert shoal.broadcast_object("and on" if agent.rank == 1 else None, 1) == "and on"

    return run


def bomb() -> bytes:
    """A file of torch.save that says that few bytes are many numbers."""
    buffer = io.BytesIO()
    torch.save(torch.zeros(1, dtype=torch.uint8).expand(1 << 31), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("what", ["pickle", "bomb", "nonsense"])
def test_an_agent_that_sends_another_type_is_named(
    fleet: Fleets, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    buffer = io.BytesIO()
    torch.save(Greeting(), buffer)
    raw = {"pickle": buffer.getvalue(), "bomb": bomb(), "nonsense": random.Random(1).randbytes(500)}[what]
    fleet(3).run(sent_by_rank_0(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "broadcast_object"))
    assert "executed" not in capsys.readouterr().out


def test_between_agents_that_trust_each_other_any_object_is_sent(fleet: Fleets) -> None:
    value = {"pair": Pair(1, ForeignClass), "tensor": torch.ones(3), "array": np.arange(3.0)}

    def run() -> None:
        result = shoal.broadcast_object(value if shoal.rank() == 1 else None, 1, trusted=True)
        assert result is not None and result["pair"] == Pair(1, ForeignClass)
        assert same_bits(result["tensor"], value["tensor"]) and np.array_equal(result["array"], value["array"])

    fleet(3).run(run)


@pytest.mark.parametrize("trusting", [(0,), (1,), (0, 1), (1, 2)])
def test_trust_on_some_agents_only_is_a_mismatch_and_nothing_is_unpickled(
    fleet: Fleets, trusting: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> str:
        rank = shoal.rank()
        value = Greeting() if 0 in trusting else "plain"
        try:
            shoal.broadcast_object(value, 0, trusted=rank in trusting)
        except shoal.Mismatch as error:
            return str(error)
        return ""

    expected_message = fleet(3).run(run)
    assert "trusted" in expected_message[0]
    assert all("trusted" in expected_message[rank] for rank in range(1, 3) if (rank in trusting) != (0 in trusting))
    executed = capsys.readouterr().out.count("executed")
    assert executed == (len(set(trusting) - {0}) if 0 in trusting else 0)


def test_the_root_names_the_refused_value(fleet: Fleets) -> None:
    def run() -> None:
        with pytest.raises(
            TypeError, match=r"broadcast_object sends plain.*value\['a'\] is a .*ForeignClass.*trusted=True"
        ):
            shoal.broadcast_object({"a": ForeignClass()}, 0)

    fleet(1).run(run)


def test_the_text_of_a_message_is_json() -> None:
    raw = write({"a": (1, None)}).numpy().tobytes()
    assert json.loads(raw[8:]) == ["dict", "a", ["tuple", 1, None]]
