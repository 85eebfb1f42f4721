"""The result of a run: its records as columns, a table, a plot or a pandas frame, and its file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...ops import safe_serialization
from .plotting import axes_for, frame_of, scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMAT = "shoal run, version "
_VERSION = "2"
"""Of the fields in a file. A field that is added, removed or changed in its meaning needs the next number."""
WHOLE = ("step", "rounds", "exchanges", "bytes")
"""The recorded counts; the other figures are numbers with fractions."""


@dataclass
class Run:
    """The result of a run, from which another can continue.

    A *step* is one step of the algorithm. A *round* is a step in which agents exchange something; ``LocalSteps`` has
    fewer rounds than steps. An *exchange* is one use of a verb of :class:`Mix` that sends something: gradient tracking
    makes two in a round.

    Attributes:
        x: After the last step: ``[n, d]`` stacked, ``[d]`` in a real agent.
        estimate: The agents' estimates: ``x``, or the algorithm's function of it.
        state: The algorithm's state, to continue with.
        steps: How many steps have been taken, since the state was new.
        sent: Bytes sent in them: by all agents of a stacked fleet, by this one in a real agent.
        rounds: Steps among them in which agents exchanged something.
        seconds: The simulated time of the steps on the network that the run was given; None without one.
        records: A dict for each recorded step, equal in a simulation and on every real agent, up to rounding:

            - ``step``, ``rounds``, ``exchanges``: the counts since the beginning;
            - ``bytes``: sent by all agents, without the messages that the records themselves need;
            - ``seconds``: simulated time, if there was a network;
            - ``consensus``: the consensus distance, ``sqrt(mean over agents of |x_i - mean x|^2)`` of the estimates;
            - ``loss``: the mean over agents of their losses at the mean of the estimates, if the gradient knows the
              loss (:func:`own`, :func:`shoal.sim.per_agent`), on the data of the step: all of it, or its batch;
            - the figures of ``measure``, which replace those above if they have their names.
        exchanges: Exchanges in the steps.
        gradients: Gradients that each agent took in them, so that a continued run knows its next batch.
    """

    x: torch.Tensor
    estimate: torch.Tensor
    state: Any
    steps: int
    sent: int = 0
    rounds: int = 0
    seconds: float | None = None
    records: list[dict[str, float]] = field(default_factory=list)
    exchanges: int = 0
    gradients: int = 0

    def column(self, name: str) -> torch.Tensor:
        """One recorded value over the steps, float64 ``[records]``, to plot.

        Raises:
            KeyError: Some record has no value of that name.
        """
        if self.records and name not in self._columns:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self._columns)}")
        return torch.tensor([row[name] for row in self.records], dtype=torch.float64)

    def table(self, rows: int = 20) -> Table:
        """The records for a terminal or a notebook, as ``rich.print`` shows them.

        Args:
            rows: At most so many, evenly spaced, with the first and the last among them.

        Raises:
            ValueError: ``rows`` is no count.
        """
        if rows < 2:
            raise ValueError(f"rows={rows}: pass at least 2, for the first and the last")
        made = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in self._columns:
            made.add_column(name, justify="right")
        last = len(self.records) - 1
        for number in range(min(rows, last + 1)):
            row = self.records[number if last < rows else round(number * last / (rows - 1))]
            made.add_row(*(f"{row[name]:,.0f}" if name in WHOLE else f"{row[name]:.4g}" for name in self._columns))
        return made

    def plot(
        self,
        figure: str = "consensus",
        *,
        against: str = "step",
        ax: Axes | None = None,
        log: bool | None = None,
        **style: Any,
    ) -> Axes:
        """Draw a recorded figure over another with matplotlib.

        Args:
            figure: A column of the records, vertical.
            against: Another column, such as ``"step"``, ``"rounds"`` or ``"bytes"``, horizontal.
            ax: Axes to draw into; a new figure if not given.
            log: A logarithmic vertical axis. If not given, it is logarithmic unless a value is negative.
            style: Options of ``matplotlib.axes.Axes.plot``, such as ``label`` or ``color``.

        Returns:
            The axes; ``.figure.savefig(path)`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.
            KeyError: Some record has no value of that name.
        """
        across, up = self.column(against), self.column(figure)
        axes = axes_for(ax)
        axes.plot(across.numpy(), up.numpy(), **style)
        scale(axes, against, figure, up, log)
        return axes

    def to_pandas(self) -> Any:
        """The records as a ``pandas.DataFrame``: a row for each recorded step.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of(self.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file, to continue it or to draw it later. The file contains no pickle.

        Args:
            path: The file; an existing one is replaced. Each real agent needs a file of its own.

        Raises:
            TypeError: The algorithm's state has a part that is no tensor, number, string or container of these.
        """
        content = {"kind": _FORMAT + _VERSION, **{one.name: getattr(self, one.name) for one in fields(self)}}
        try:
            data = safe_serialization.write(content, "run")
        except TypeError as error:
            raise TypeError(f"{error}, which cannot be saved without pickle: use tensors and plain data") from None
        Path(path).write_bytes(data.numpy().tobytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Run:
        """A run from a file of :meth:`save`. Loading runs no code of the file.

        Args:
            path: The file.
            device: Where to put its tensors.

        Raises:
            ValueError: The file is not one of :meth:`save`, or one of another version of Shoal with other fields.
        """
        data = bytearray(Path(path).read_bytes())
        try:
            content = safe_serialization.read(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0))
            kind, version, found = content.pop("kind").partition(_FORMAT)
            if kind or not version:
                raise ValueError("it has another kind of content")
            if found == _VERSION and content.keys() != {one.name for one in fields(cls)}:
                raise ValueError(f"its fields are {', '.join(content)}")
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a saved run, or is damaged: {error}") from error
        # An older file lacks counts that a continued run needs. With zeros in their place it would continue with other
        # batches, without an error.
        if found != _VERSION:
            raise ValueError(
                f"{os.fspath(path)} is a run of file version {found}, and this version of Shoal reads version "
                f"{_VERSION}. Load it with the version of Shoal that saved it, or run it again"
            )
        return cls(**_on(torch.device(device), content))

    @property
    def _columns(self) -> list[str]:
        """The columns that every row has: a run may have been resumed with another measure."""
        return [name for name in self.records[-1] if all(name in row for row in self.records)] if self.records else []


def _on(device: torch.device, content: Any) -> Any:
    """The content with its tensors on a device."""
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if isinstance(content, dict):
        return {name: _on(device, one) for name, one in content.items()}
    return type(content)(_on(device, one) for one in content) if isinstance(content, (tuple, list)) else content
