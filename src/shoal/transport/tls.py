"""TLS 1.3 between machines, in which both sides show a certificate for one rank. By Python's own ``ssl``.

A connection begins unencrypted with the greeting of the listening side; then TLS begins, and all later data is inside
it. The certificates are in one folder: ``ca.crt``, the trusted authority; ``rank-N.crt`` and ``rank-N.key``, the
agent's certificate and key; and, optionally, ``revoked.crl``, the revoked certificates. A certificate for rank N has
the DNS name ``rank-N.shoal``.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from pathlib import Path

from ..config import Config
from ..errors import ProtocolError
from .retransmit import ConnectionCut

AUTHORITY, REVOKED = "ca.crt", "revoked.crl"
RECORD_BYTES = 1 << 15
"""More than the largest record with its overhead: so much may have arrived and not be readable yet."""


def host_name(rank: int) -> str:
    """The name that the certificate of a rank is for."""
    return f"rank-{rank}.shoal"


class Certificates:
    """The certificates of one agent.

    Args:
        folder: The folder with the files.
        rank: The rank of the agent.

    Raises:
        ValueError: One is missing, cannot be read, or does not belong to its key; the message names it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._accepting = self._context(ssl.PROTOCOL_TLS_SERVER, folder, rank)
        self._connecting = self._context(ssl.PROTOCOL_TLS_CLIENT, folder, rank)

    @staticmethod
    def _context(side: int, folder: Path, rank: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Also for the accepting side: by default a TLS server asks for no certificate, and any process could connect.
        context.verify_mode = ssl.CERT_REQUIRED
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed
        own, key = folder / f"rank-{rank}.crt", folder / f"rank-{rank}.key"
        # The errors of ssl name no file, so each step notes what it reads.
        doing = f"read {folder / AUTHORITY}"
        try:
            context.load_verify_locations(folder / AUTHORITY)
            doing = f"read {folder / REVOKED}"
            if (folder / REVOKED).exists():
                context.load_verify_locations(folder / REVOKED)
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
            doing = f"read {own} and {key}"
            context.load_cert_chain(own, key, lambda: "")  # no question to the terminal for a key with a password
        except (OSError, ValueError) as error:
            raise ValueError(
                f"SHOAL_TLS=on: cannot {doing} (SHOAL_CERTIFICATES={str(folder)!r}): {error}; "
                "shoal certificates make writes them"
            ) from None
        return context

    @property
    def good_until(self) -> str:
        """When the authority's own certificate ends, in OpenSSL's words."""
        return str(self._accepting.get_ca_certs()[0]["notAfter"])

    def accept(self, sock: socket.socket) -> Encrypted:
        """Begin TLS with a connecting peer."""
        sock.getpeername()  # raises if the peer has disconnected: wrapping would fail and leave the socket open
        # Without a handshake here: it would block the thread that drives the agent until the peer answers.
        return Encrypted(self._accepting.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))

    def connect(self, sock: socket.socket, peer: int) -> Encrypted:
        """Begin TLS with a peer that must be rank ``peer``."""
        sock.getpeername()
        return Encrypted(
            self._connecting.wrap_socket(sock, server_hostname=host_name(peer), do_handshake_on_connect=False)
        )


def certificates_of(rank: int, config: Config) -> Certificates | None:
    """The certificates from ``SHOAL_TLS`` and ``SHOAL_CERTIFICATES``; None without TLS.

    Raises:
        ValueError: TLS is on without a folder, or as for :class:`Certificates`.
    """
    if not config.tls:
        return None
    if not config.certificates:
        raise ValueError("SHOAL_TLS=on, but no certificates: set SHOAL_CERTIFICATES to the folder that has them")
    return Certificates(Path(config.certificates), rank)


class Encrypted:
    """A socket with TLS, with the methods of a non-blocking socket that links use.

    Errors of ``ssl`` become those of a socket: :class:`BlockingIOError` if a call would block.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self.ready = False

    def shake_hands(self) -> bool:
        """Continue TLS's handshake; returns whether it is complete. Raises :class:`ProtocolError` if the peer is not
        trusted.
        """
        if not self.ready:
            try:
                self._sock.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except ssl.SSLEOFError:
                raise ConnectionCut("it closed the connection during TLS's handshake") from None
            except ssl.SSLCertVerificationError as error:
                raise ProtocolError(f"its certificate is refused: {error.verify_message}") from None
            except ssl.SSLError as error:
                raise _explained(error) from None
            self.ready = True
        return self.ready

    def is_of(self, rank: int) -> bool:
        """Whether the other side has shown the certificate of that rank."""
        names: Iterable[tuple[str, str]] = (self._sock.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
        return ("DNS", host_name(rank)) in names

    @property
    def pending(self) -> int:
        """Bytes that are received and decrypted, for which no event occurs."""
        return self._sock.pending()

    def recv(self, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: memoryview | bytearray) -> int:
        try:
            return self._sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        # The peer has closed its socket without TLS's own farewell, as a killed process does. For the link it is the
        # end of a plain socket.
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLError as error:
            raise _explained(error) from None

    def send(self, data: bytes | memoryview) -> int:
        try:
            return self._sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise BrokenPipeError(str(_explained(error))) from None

    def sendmsg(self, buffers: Iterable[memoryview]) -> int:
        """Send the first buffer, or a part of it; call again with the rest."""
        return self.send(next(iter(buffers)))

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


def _explained(error: ssl.SSLError) -> ProtocolError:
    """The error for a TLS alert with the other side's finding, which may arrive after this side's handshake."""
    reason = error.reason or str(error)
    found = reason.partition("ALERT_")[2].replace("_", " ").lower()
    return ProtocolError(f"it refuses this agent's certificate: {found}" if found else f"TLS failed: {reason}")
