"""Elastic jobs: the invitation that a launcher stores, and how joining launchers claim ranks.

The launcher serves the store, which authenticates no client. So the invitation is signed with the job's secret, which
is not stored. A joining launcher has the secret from ``SHOAL_SECRET``. Otherwise, as a process of the same user on the
same machine, it reads the secret out of the launcher's process, which no other user may inspect. Ranks are claimed by
compare-and-set of one value, so launchers that join at the same time get different ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from .. import clock, config
from ..errors import ShoalError
from ..transport.addresses import text_of
from .launch import join_address
from .rendezvous import CLAIMED, INVITATION, PREFIX, client
from .store import StoreLocation, TcpStore

JOIN_SECONDS = 20.0
"""Seconds that a job may take to answer."""
SECRET_NAME = "shoal-secret"


@dataclass(frozen=True)
class Invitation:
    """The size of a job that agents may join, and where its secret is.

    Attributes:
        name: The name of the job.
        size: The number of ranks.
        begins: The number of ranks with which the job begins.
        pid: The process id of its launcher.
        descriptor: The launcher's descriptor of the memory file that holds the secret.
        attempt: The number of earlier restarts of the job.
        watch_port: The port on which its launcher receives the status of joining launchers; 0 for none.
    """

    name: str
    size: int
    begins: int
    pid: int
    descriptor: int
    attempt: int = 0
    watch_port: int = 0

    def written(self, secret: str) -> str:
        """The invitation as JSON, signed."""
        return json.dumps([asdict(self), self._proof(secret)])

    @classmethod
    def read(cls, text: str, environ: Mapping[str, str]) -> tuple[Invitation, str]:
        """The invitation from JSON, and the secret that it is signed with.

        Raises:
            ShoalError: The caller does not know the secret.
            ValueError, TypeError: The text is malformed.
        """
        data, proof = json.loads(text)
        invitation = cls(str(data["name"]), *(int(data[field.name]) for field in fields(cls)[1:]))
        given = config.read(environ).secret
        secret = given or _secret_in(invitation.pid, invitation.descriptor)
        if not secret:
            raise ShoalError(
                "a joining launcher authenticates with the run's secret. Without SHOAL_SECRET only the user of that "
                "run finds it, on the machine of its launcher: set SHOAL_SECRET to the same for that run and this "
                "command"
            )
        # Any client may write to the store: without the check, it could lead this launcher into another job.
        if not hmac.compare_digest(invitation._proof(secret).encode(), str(proof).encode()):
            whose = "SHOAL_SECRET is not that of the run" if given else "somebody else writes to its store"
            raise ShoalError(f"its message is not signed with the secret: {whose}")
        return invitation, secret

    def _proof(self, secret: str) -> str:
        return hmac.digest(
            secret.encode(), json.dumps(["shoal invitation", *asdict(self).values()]).encode(), "sha256"
        ).hex()


def keep_secret(secret: str) -> int:
    """Create a memory file with the secret, for processes of this user that may inspect this process."""
    descriptor = os.memfd_create(SECRET_NAME)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return descriptor


def _secret_in(pid: int, descriptor: int) -> str:
    """The secret in another process's file of :func:`keep_secret`; empty if there is none or it may not be read."""
    file = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        # A store may name any process, so a file that another user has created is refused.
        if Path(f"/proc/{pid}").stat().st_uid != os.getuid() or os.readlink(file) != f"/memfd:{SECRET_NAME} (deleted)":  # noqa: PTH115
            return ""
        return file.read_text()
    except OSError:
        return ""


def claim(host: str, port: int, count: int, environ: Mapping[str, str], deadline: float) -> tuple[Invitation, str, int]:
    """Claim ``count`` ranks of the job at this store. Returns the job, its secret, and the first of the ranks.

    Raises:
        ShoalError: The job has not enough free ranks, none to claim, or does not answer.
    """
    where = join_address(host, port)
    with contextlib.closing(_open(host, port, deadline)) as store:
        try:
            text = store.get(INVITATION, deadline).decode()
        except ShoalError:
            raise ShoalError(f"the process at {where} is no run that agents may join") from None
        if not text:
            raise ShoalError(f"the run at {where} has no room for more agents: it was started without --max-agents")
        try:
            invitation, secret = Invitation.read(text, environ)
            return invitation, secret, _claim(store, invitation, count, deadline)
        except ShoalError as error:
            raise ShoalError(f"the run at {where}: {error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise ShoalError(f"the store at {where} sent invalid data ({error})") from None


def _open(host: str, port: int, deadline: float) -> TcpStore:
    where = join_address(host, port)
    try:
        # A plain connection first: torch's client prints many lines for each failure.
        with socket.create_connection((host, port), timeout=max(0.1, deadline - clock.monotonic())) as link:
            address = text_of(link.getpeername())
    except OSError as error:
        raise ShoalError(
            f"no process answers at {where} ({error.strerror or error}): the run has ended, or this is not its "
            "address, which it prints when it starts"
        ) from None
    try:
        return TcpStore(
            partial(client, address, port, deadline),
            StoreLocation(f"the store of the run at {where}"),
            prefix=PREFIX,
            deadline=deadline,
        )
    except (ShoalError, RuntimeError) as error:
        raise ShoalError(f"the process at {where} is no run of Shoal's ({error})") from None


def _claim(store: TcpStore, invitation: Invitation, count: int, deadline: float) -> int:
    known = store.get(CLAIMED, deadline)
    while True:
        claimed = int(known.split()[0])
        free = invitation.size - invitation.begins - claimed
        if count > free:
            raise ShoalError(
                f"{count} cannot join: {free} ranks are free. It began with {invitation.begins} of --max-agents "
                f"{invitation.size}, and {claimed} have been claimed since; a rank is not claimed twice"
            )
        # The random part is needed because `swap` returns the value afterwards: two launchers that claim equally many
        # ranks at once would both take it for their own.
        mine = f"{claimed + count} {clock.random_hex(8)}".encode()
        found = store.swap(CLAIMED, known, mine)
        if found == mine:
            return invitation.begins + claimed
        known = found


def main(arguments: list[str]) -> None:
    """Claim ranks and print the result, for a launcher, which does not import torch."""
    host, port, count = arguments[0], int(arguments[1]), int(arguments[2])
    data: dict[str, Any]
    try:
        invitation, secret, first = claim(host, port, count, os.environ, clock.monotonic() + JOIN_SECONDS)
        data = {"invitation": asdict(invitation), "secret": secret, "first": first}
    except ShoalError as error:
        data = {"error": str(error)}
    json.dump(data, sys.stdout)
