"""Requests of agents on other machines that wait at the owner of a window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.errors import ProtocolError
from shoal.transport import quotas
from shoal.transport.messages import Kind, Message, Payload, inline_payload
from shoal.windows.owner_service import OwnerService


def put(number: int, payload: Payload) -> Message:
    return Message(Kind.DATA, "win_put", "~window x", number, 0, number + 1, nbytes=4, payload=payload)


def test_requests_behind_one_that_never_becomes_complete_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MESSAGES", 10)
    refused: list[int] = []
    engine: Any = SimpleNamespace(
        rank=0, flush=lambda: None, check_by=lambda _: None, refuse=lambda source, *_: refused.append(source)
    )
    owner: Any = SimpleNamespace(with_p=False, cause=None, find=lambda _: None)
    service = OwnerService(owner, engine)
    never = Payload(torch.empty(1 << 10), 0)
    for rank in (1, 2):
        service.serve(rank, put(0, never))
    for number in range(1, 10):
        service.serve(1, put(number, inline_payload(torch.uint8, bytearray(4))))
    with pytest.raises(ProtocolError, match="requests to windows that wait"):
        service.serve(1, put(10, inline_payload(torch.uint8, bytearray(4))))
    service.serve(2, put(1, inline_payload(torch.uint8, bytearray(4))))  # another agent has a quota of its own
    service.forget(1)  # as one that broke the protocol
    for number in range(2, 10):
        service.serve(2, put(number, inline_payload(torch.uint8, bytearray(4))))
    assert len(service._waiting) == 10 and not refused
    service.again()
    assert not refused  # the first one is not complete
