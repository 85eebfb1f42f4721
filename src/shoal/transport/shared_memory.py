"""Links between processes of one machine: headers over Unix sockets, numbers read in place.

Usually a tensor is copied into a shared buffer and out of it again, once for each neighbour. Here the sender copies
once into its own arena, whatever its degree, and each neighbour reads that memory while it sums. With d neighbours an
agent writes its tensor once and its result once and reads d + 2 tensors, which is the least that a publishing copy
allows. The socket carries a header of about a hundred bytes, or the tensor itself if it is so small that a header and
an acknowledgement cost more than its bytes.

Rejected: named shared memory (``/dev/shm`` fills up, names clash and outlive a killed process); a ring buffer for each
pair (memory and copies grow with the degree); ``process_vm_readv`` (needs ptrace rights in containers).

The sockets are SOCK_SEQPACKET: a packet is whole or absent, even if its sender is killed, and it carries the
descriptors of new memory files. No name stays in the file system. The kernel gives the peer's uid, and a connection of
another user is closed unread, if it can be made at all (``listeners.py``).
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket

from ..errors import ProtocolError
from . import status_socket
from .authentication import Accepting, ChecksumSeal, Connecting
from .link import Published, Receiver
from .messages import LOCKABLE, ON_DEVICE, PACKET_BYTES, Kind, Message, Payload, Where, decode, encode, frames
from .poller import READ, Poller
from .retransmit import ConnectionCut
from .shared_regions import PeerMemory
from .sockets import Incoming, Outgoing

MANY_BYTES = PACKET_BYTES // 4
"""Of a packet that may have others behind it: messages that are sent at once share packets."""
_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_CLOSE = int(socket.MSG_CMSG_CLOEXEC)


class SharedMemoryLink(Outgoing):
    """A link to a process of the same machine."""

    seal_of = staticmethod(lambda _key: ChecksumSeal())

    def __init__(
        self, sock: socket.socket, peer: int, greeting: Connecting, poller: Poller, receiver: Receiver
    ) -> None:
        super().__init__(sock, peer, greeting, poller, receiver)
        self._shared: set[int] = set()

    def _place(self, message: Message, published: Published, start: int, stop: int) -> None:
        region = published.region
        if region is None:
            message.where = Where.INLINE
            if not message.tail:
                message.body = published.copy(start, stop)
            return
        segment = region.segment
        # The receiver maps the file when its descriptor arrives. A header that came first would refer to unknown
        # memory, which ends the connection.
        if segment.ident not in self._shared:
            of_device = segment.size if published.data.device.type != "cpu" else 0
            self._share(segment.ident, segment.fd, of_device=of_device)
        message.where = Where.SHARED
        message.segment = segment.ident
        message.offset = region.offset + start * published.data.element_size()

    def _share(self, ident: int, fd: int, lockable: bool = False, of_device: int = 0) -> None:
        # Messages queued before this point leave before the descriptor: the order of messages on a link is the order of
        # the calls.
        self._pack()
        flags = ON_DEVICE if of_device else LOCKABLE if lockable else 0
        message = Message(Kind.SEGMENT, segment=ident, flags=flags, nbytes=of_device)
        # A copy of the descriptor: the owner may close its own before the packet leaves, and its number could then be
        # another file's.
        self._packets.append((encode(message), os.dup(fd)))
        self._shared.add(ident)

    def share(self, ident: int, fd: int, lockable: bool) -> None:
        """Let the peer map a memory file before a message refers to it."""
        if ident not in self._shared:
            self._share(ident, fd, lockable)

    def forget(self, ident: int) -> None:
        """The peer may unmap a memory file of ours."""
        if ident in self._shared:
            self._shared.discard(ident)
            self.post(Message(Kind.FORGET, segment=ident))

    def flush(self) -> None:
        if not self.open:
            return
        self._pack()
        try:
            while self._packets:
                packet, fd = self._packets[0]
                # Sealed again if the socket is full and flush() comes again. That is sound for a checksum; a seal that
                # counts packets would run ahead of the receiver's.
                packet = self._seal.close(packet)
                if fd >= 0:
                    self.sock.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
                    # The kernel holds its own reference while the packet is under way.
                    os.close(fd)
                else:
                    self.sock.send(packet)
                self._packets.popleft()
        except BlockingIOError:
            self._want_write(True)
            return
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors on their way; the next event tries again
                self._want_write(True)
                return
            self.fail(f"sending to it failed: {error}")
            return
        if self._events != READ:
            self._want_write(False)

    @property
    def idle(self) -> bool:
        return self.sock.fileno() < 0 or (not self._frames and not self._packets)

    def close(self) -> None:
        # Descriptors that were never sent. Without this each lost neighbour would leave some open.
        for _, fd in self._packets:
            if fd >= 0:
                os.close(fd)
        super().close()


class SharedMemoryIncoming(Incoming):
    """A connection from a process of the same machine."""

    seal_of = staticmethod(lambda _key: ChecksumSeal())

    def __init__(self, sock: socket.socket, greeting: Accepting, poller: Poller, receiver: Receiver) -> None:
        super().__init__(sock, greeting, poller, receiver)
        self.memory = PeerMemory()
        self._buffer = bytearray(PACKET_BYTES + 8192)

    def _read_status_query(self, question: bytes) -> None:
        if question != status_socket.QUESTION:
            return
        with contextlib.suppress(BlockingIOError):  # the querying process does not read
            for packet in status_socket.here.answer():
                self.sock.send(packet)
        raise ConnectionCut("it has only asked")

    def read(self) -> None:
        nbytes = len(self._buffer)
        while nbytes >= MANY_BYTES:  # after a shorter packet there is rarely another, and the poller would report it
            nbytes, ancillary, flags, _ = self.sock.recvmsg_into([self._buffer], 64, _CLOSE)
            descriptors = _descriptors(ancillary) if ancillary else []
            if not nbytes:
                raise ProtocolError("its end of the connection closed")
            try:
                # The rest of a packet that is cut off is gone, and the kernel may have dropped descriptors. The
                # connection cannot recover from this.
                if flags & _CUT:
                    raise ProtocolError("a packet larger than any of ours")
                for frame in frames(self._seal.open(memoryview(self._buffer)[:nbytes])):
                    self._take(decode(frame), descriptors)
            # Also unclaimed descriptors: a peer could otherwise fill this process's table of descriptors.
            finally:
                for fd in descriptors:
                    os.close(fd)

    def _take(self, message: Message, descriptors: list[int]) -> None:
        if message.kind is Kind.SEGMENT:
            # A descriptor belongs to the packet that brought it, and a SEGMENT is a packet of its own.
            if not descriptors:
                raise ProtocolError("shared memory without its descriptor")
            if message.flags & ON_DEVICE:
                self.memory.add_of_device(message.segment, descriptors.pop(0), message.nbytes)
            else:
                self.memory.add(message.segment, descriptors.pop(0), bool(message.flags & LOCKABLE))
            return
        if message.kind is Kind.FORGET:
            self.memory.forget(message.segment)
            return
        if message.where is Where.SHARED:
            data = self.memory.view(message.segment, message.offset, message.nbytes, message.dtype)
            message.payload = Payload(data, data.numel())
        elif message.where is Where.STREAM:
            raise ProtocolError("a payload in pieces on a Unix socket")
        self._receiver.on_message(self.peer, message)

    def close(self) -> None:
        super().close()
        self.memory.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            # The kernel may cut the list in the middle of a number; the whole ones must still be closed.
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            found.extend(fds)
    return found
