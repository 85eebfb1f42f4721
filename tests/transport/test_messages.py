"""Messages as bytes: whatever is encoded comes back, and whatever else comes is refused and never anything worse."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ProtocolError
from shoal.transport.messages import DTYPES, PREFIX, Kind, Message, Where, decode, encode, frame_length, frames
from support.reference import bits, same_bits
from support.samples import ALL_DTYPES, sample

few = settings(max_examples=150)

counts = st.integers(0, 2**32 - 1)
large = st.integers(0, 2**63 - 1)
texts = st.text(max_size=40)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(Kind))
    message = Message(
        kind,
        op=draw(texts),
        name=draw(texts),
        round=draw(large),
        stage=draw(st.integers(0, 2**16 - 1)),
        token=draw(large),
        flags=draw(st.integers(0, 2**8 - 1)),
        digest=draw(counts),
        scale=draw(st.floats(allow_nan=True)),
        segment=draw(counts),
        offset=draw(large),
    )
    if kind not in (Kind.DATA, Kind.CONTROL):
        message.text = draw(texts)
        message.nbytes = draw(large)
        return message
    message.dtype = draw(st.sampled_from(DTYPES))
    message.shape = draw(shapes)
    message.nbytes = math.prod(message.shape) * message.dtype.itemsize
    if kind is Kind.CONTROL:
        message.offset = draw(st.integers(0, message.nbytes))
        message.body = draw(st.binary(max_size=message.nbytes - message.offset))
        return message
    message.where = draw(st.sampled_from([Where.INLINE, Where.SHARED, Where.STREAM]))
    if message.where is Where.INLINE:
        message.body = bytes_of(sample(draw(st.integers(0, 9)), message.shape, message.dtype))
    return message


def round_trip(message: Message) -> Message:
    frame = memoryview(encode(message))
    assert frame_length(frame) == len(frame) - PREFIX
    return decode(frame[PREFIX:])


@few
@given(message=messages())
def test_encoded_frames_are_decoded_equally(message: Message) -> None:
    back = round_trip(message)
    for field in ("kind", "op", "name", "round", "stage", "token", "flags", "digest", "where", "segment", "offset"):
        assert getattr(back, field) == getattr(message, field), field
    assert struct.pack("<d", back.scale) == struct.pack("<d", message.scale)
    assert back.nothing == math.isnan(message.scale)
    if message.kind not in (Kind.DATA, Kind.CONTROL):
        assert back.text == message.text
        return
    assert (back.dtype, back.shape, back.nbytes) == (message.dtype, message.shape, message.nbytes)
    if message.kind is Kind.CONTROL:
        assert back.body == message.body and back.payload is None
    if message.where is Where.INLINE:
        assert back.payload is not None
        assert back.payload.complete
        assert bytes_of(back.payload.data) == bytes(message.body)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_an_inline_tensor_of_every_dtype_is_decoded_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 0), (7,), (2, 3, 4)]:
        tensor = sample(1, shape, dtype)
        nbytes = tensor.numel() * tensor.element_size()
        back = round_trip(
            Message(Kind.DATA, dtype=dtype, shape=shape, where=Where.INLINE, nbytes=nbytes, body=bytes_of(tensor))
        )
        assert back.payload is not None
        assert same_bits(back.payload.data.view(shape), tensor)


def test_an_inline_tensor_outlives_its_receive_buffer() -> None:
    tensor = torch.arange(5.0)
    message = Message(Kind.DATA, dtype=torch.float32, shape=(5,), where=Where.INLINE, nbytes=20, body=bytes_of(tensor))
    buffer = bytearray(encode(message))
    back = decode(memoryview(buffer)[PREFIX:])
    buffer[:] = bytes(len(buffer))
    assert back.payload is not None
    assert same_bits(back.payload.data, tensor)


@few
@given(sent=st.lists(messages(), max_size=5))
def test_a_packet_of_several_frames_is_split_in_order(sent: list[Message]) -> None:
    packet = memoryview(b"".join(map(encode, sent)))
    assert [decode(frame).token for frame in frames(packet)] == [message.token for message in sent]


def survives(frame: bytes) -> None:
    """Bytes from anybody: a message that makes sense, or a ProtocolError, and no other exception."""
    try:
        for part in frames(memoryview(frame)):
            message = decode(part)
            assert isinstance(message.kind, Kind)
            assert isinstance(message.where, Where)
            assert all(dim >= 0 for dim in message.shape) or message.kind is not Kind.DATA
            if message.payload is not None:
                assert message.payload.data.numel() == math.prod(message.shape)
                bits(message.payload.data).sum()  # its memory is there
    except ProtocolError as error:
        assert str(error)


@few
@given(message=messages())
def test_every_truncation_of_a_frame_is_refused(message: Message) -> None:
    frame = encode(message)
    for length in range(1, len(frame)):
        with pytest.raises(ProtocolError):
            list(frames(memoryview(frame[:length])))
        if length > PREFIX:
            with pytest.raises(ProtocolError):
                decode(memoryview(frame[PREFIX:length]))
    with pytest.raises(ProtocolError):
        decode(memoryview(b""))


@few
@given(message=messages())
def test_every_flipped_bit_of_a_frame_gives_a_message_or_a_refusal(message: Message) -> None:
    frame = bytearray(encode(message))
    for bit in range(8 * min(len(frame), 200)):
        frame[bit // 8] ^= 1 << bit % 8
        survives(bytes(frame))
        frame[bit // 8] ^= 1 << bit % 8


@few
@given(message=messages(), seed=st.integers(0, 2**32 - 1))
def test_several_overwritten_bytes_give_a_message_or_a_refusal(message: Message, seed: int) -> None:
    chance = random.Random(seed)
    frame = bytearray(encode(message))
    for _ in range(50):
        broken = bytearray(frame)
        for _ in range(chance.randint(1, 12)):
            broken[chance.randrange(len(broken))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        survives(bytes(broken))


@few
@given(noise=st.binary(max_size=400))
def test_noise_gives_a_message_or_a_refusal(noise: bytes) -> None:
    survives(noise)
    survives(struct.pack("<I", len(noise)) + noise)
    try:
        decode(memoryview(noise))
    except ProtocolError:
        pass


@pytest.mark.parametrize("length", [0, 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1])
def test_an_absurd_length_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(ProtocolError, match=str(length)):
        frame_length(memoryview(struct.pack("<I", length) + bytes(200)))


@pytest.mark.parametrize("shape", [(2**62, 4), (2**63 - 1,), (-1,), (-1, -20), (2**40, 2**40), (1, 2, -3)])
def test_an_absurd_shape_is_refused(shape: tuple[int, ...]) -> None:
    for where in (Where.INLINE, Where.SHARED, Where.STREAM):
        message = Message(Kind.DATA, dtype=torch.float32, shape=shape, where=where, nbytes=80, body=bytes(80))
        with pytest.raises(ProtocolError):
            round_trip(message)


@pytest.mark.parametrize(("nbytes", "body"), [(8, 12), (12, 8), (16, 16), (0, 0), (2**63, 12), (12, 0)])
def test_a_payload_whose_length_differs_from_its_shape_is_refused(nbytes: int, body: int) -> None:
    message = Message(Kind.DATA, dtype=torch.float32, shape=(3,), where=Where.INLINE, nbytes=nbytes, body=bytes(body))
    with pytest.raises(ProtocolError):
        round_trip(message)


@pytest.mark.parametrize(("nbytes", "offset", "body"), [(12, 0, 13), (12, 8, 5), (12, 13, 0), (8, 0, 8), (16, 0, 12)])
def test_a_piece_beyond_its_body_or_a_body_of_another_shape_is_refused(nbytes: int, offset: int, body: int) -> None:
    message = Message(Kind.CONTROL, dtype=torch.float32, shape=(3,), nbytes=nbytes, offset=offset, body=bytes(body))
    with pytest.raises(ProtocolError, match="of shape"):
        round_trip(message)


def test_text_that_is_not_utf8_is_refused() -> None:
    frame = bytearray(encode(Message(Kind.DENY, op="neighbor_allreduce", name="name")))
    at = frame.index(b"name")
    frame[at] = 0xFF
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(memoryview(frame)[PREFIX:])


def test_tensors_may_have_as_many_dimensions_as_in_torch() -> None:
    def of(count: int) -> Message:
        return Message(Kind.DATA, dtype=torch.uint8, shape=(1,) * count, where=Where.SHARED, nbytes=1)

    assert round_trip(of(64)).shape == (1,) * 64
    with pytest.raises((ProtocolError, struct.error)):
        round_trip(of(65))
