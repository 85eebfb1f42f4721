"""The rank and size of a process for Lightning, instead of a launcher's variables."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment

from ...runtime.queries import local_rank, machine_rank, rank, size


class ShoalEnvironment(ClusterEnvironment):
    """An agent of Shoal. Its ranks are kept, since the Trainer asks for them when the agent has left, too."""

    def __init__(self) -> None:
        super().__init__()
        self._size, self._rank, self._local_rank, self._machine = size(), rank(), local_rank(), machine_rank()

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of a process group, of which there is none."""
        raise RuntimeError("ShoalStrategy opens no process group, so there is no main address")

    @property
    def main_port(self) -> int:
        """The port of a process group, of which there is none."""
        raise RuntimeError("ShoalStrategy opens no process group, so there is no main port")

    @staticmethod
    def detect() -> bool:
        """Lightning never chooses it by itself."""
        return False

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._machine
