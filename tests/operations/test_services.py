"""Which service takes a message: the one whose prefix the name of the message begins with."""

from __future__ import annotations

import pytest

from shoal.operations.services import Service, Services
from shoal.transport.wire import Kind, Message


class AcceptingService(Service):
    def serve(self, source: int, message: Message) -> None: ...


@pytest.mark.parametrize(
    ("name", "accepted"), [("~a", True), ("~a b c", True), ("~ab", False), ("~b", False), ("a", False), ("x ~a", False)]
)
def test_a_service_receives_the_messages_with_its_prefix(name: str, accepted: bool) -> None:
    services, service = Services(), AcceptingService()
    message = Message(Kind.DATA, "average", name)
    assert services.of(message) is None
    services.add("~a", service)
    assert services.of(message) is (service if accepted else None)
    assert services.get("~a") is service and services.all() == [service]
