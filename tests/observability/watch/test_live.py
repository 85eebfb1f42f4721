"""A launcher's part: what fails in it ends no run, and leaves nothing open."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import urllib.error
import urllib.request
from threading import Thread
from typing import Any

import pytest

from shoal.observability.watch.launcher_link import StatusSender
from shoal.observability.watch.live import LocalViewer
from support.leftovers import nothing_is_left, wait_until
from support.status_messages import summary


def test_the_page_shows_agent_status_and_process_state() -> None:
    with nothing_is_left(), LocalViewer(2, 2, "two") as watch:
        watch.started(0, os.getpid())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
            agent.connect(watch.path)
            agent.send(json.dumps(summary(0, 2, step=5)).encode())
            assert wait_until(lambda: bool(watch.serve() or watch.state.as_json()["agents"][0]["step"]))  # type: ignore[attr-defined]
            results: list[dict[str, Any]] = []
            page = Thread(target=lambda: results.append(_news(watch.address)))
            page.start()
            assert wait_until(lambda: bool(watch.serve() or results))
            page.join()
        (one, other) = results[0]["agents"]
        assert (one["state"], one["step"]) == ("computing", 5)
        assert other["state"] == "not there"


def test_launchers_need_the_secret_of_the_current_attempt() -> None:
    with (
        nothing_is_left(),
        LocalViewer(2, 1, "one, and room for one", begins=1) as watch,
        contextlib.ExitStack() as tellers,
    ):
        for pid, secret in ((5, "of the first"), (6, "of the second")):
            listener = socket.create_server(("127.0.0.1", 0))
            address = listener.getsockname()
            watch.gather(listener, secret, 1)  # type: ignore[attr-defined]
            reported = [StatusSender(socket.AF_INET, address, known) for known in ("of the first", "of the second")]
            for sender in reported:
                tellers.callback(sender.close)
            right = next(reporter for reporter in reported if reporter._secret == secret.encode())
            right.process(1, pid, "there", "S")
            (wrong,) = (reporter for reporter in reported if reporter is not right)
            wrong.process(1, 666, "there", "S")

            def has_reported(pid: int = pid, senders: tuple[StatusSender, ...] = tuple(reported)) -> bool:
                for reporter in senders:
                    reporter.serve()
                watch.serve()
                return bool(watch.state.as_json()["agents"][1]["pid"] == pid)  # type: ignore[attr-defined]

            assert wait_until(has_reported)
            assert right._sealed is not None and wrong._sealed is None
            if pid == 5:
                before, first = right, address
        assert wait_until(lambda: bool(before.serve() or before._sealed is None))  # it was hung up on
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(first)


def _news(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}news", timeout=10) as page:
        status: dict[str, Any] = json.loads(page.readline().removeprefix(b"data: "))
    return status


def test_an_error_in_the_page_does_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with nothing_is_left(), LocalViewer(1, 1, "one") as watch:
        watch.state.draw = watch.state.as_json = None  # type: ignore[attr-defined, assignment, method-assign]
        watch.serve()
        assert watch.due == float("inf") and "the page is no longer served (TypeError" in capsys.readouterr().err
        watch.started(0, 1)
        watch.ended(0, "rank 0 exited with code 1", False)
        watch.serve()
        assert watch.fileno() > 0  # the launcher's loop still has it
