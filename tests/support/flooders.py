"""Processes that connect to an agent and have no business there: they hold connections open, or make ever new ones."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

NOBODY = 65534
_FLOOD = """
import os, select, socket, sys, time
where, port, source, uid, keep, seconds = sys.argv[1], *sys.argv[2:4], *map(int, sys.argv[4:6]), float(sys.argv[6])
if uid:
    os.setgid(uid)
    os.setuid(uid)
print("ready", flush=True)
end, made, held, poll = time.monotonic() + seconds, 0, {}, select.epoll()
while time.monotonic() < end:
    if len(held) < keep or not keep:
        sock = socket.socket(*((socket.AF_INET, socket.SOCK_STREAM) if port else (socket.AF_UNIX, 5)))
        sock.setblocking(False)
        try:
            if source:
                sock.bind((source, 0))
            sock.connect((where, int(port)) if port else "\\0" + where)
            made += 1
        except BlockingIOError:
            made += bool(port)
        except OSError:
            pass
        if keep and port:
            held[sock.fileno()] = sock
            poll.register(sock.fileno(), select.EPOLLIN)
        else:
            sock.close()
    for fd, _ in poll.poll(0.01 if keep and len(held) >= keep else 0, 100):
        try:
            ended = not held[fd].recv(100)
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        if ended:
            held.pop(fd).close()
print(made, flush=True)
os._exit(0)
"""


class Flooder:
    """One such process.

    Args:
        where: An address, or the abstract name of a Unix socket.
        port: 0 for a Unix socket.
        source: The address to come from.
        uid: The user that it runs as.
        keep: The number of connections kept open, and reopened when closed; 0: each is closed at once.
        seconds: The duration.
    """

    def __init__(
        self, where: str, port: int = 0, *, source: str = "", uid: int = 0, keep: int = 0, seconds: float = 60.0
    ) -> None:
        argv = [where, str(port or ""), source, str(uid), str(keep), str(seconds)]
        self._process = subprocess.Popen([sys.executable, "-I", "-c", _FLOOD, *argv], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def made(self) -> int:
        """How many connections it has made; waits for its end."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def flood(*flooders: Flooder, after: float = 0.2) -> Iterator[None]:
    """Run the block under these floods, which have had a moment to begin."""
    try:
        time.sleep(after)
        yield
    finally:
        for one in flooders:
            one.close()


def may_become_others() -> bool:
    """Whether this process may start others as another user."""
    return os.geteuid() == 0
