"""An algorithm is its equation: a frozen dataclass of numbers with ``init`` and ``step``.

``mix`` is its only way to communicate (:class:`~shoal.algorithms.Mix`), so the same object runs on a thousand agents
stacked as the rows of one tensor, in threads, in processes and on a cluster. To write one, see docs/howto/extend.md.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass, replace
from numbers import Real
from typing import Any, ClassVar

import torch

from ..compression import Compressor
from ..topology.healing import Without
from ..topology.schedule import AnyTopology, Schedule
from .mix import Mix
from .needs import Need

State = tuple[torch.Tensor, ...]
"""The memory of an algorithm between steps, beside ``x``."""
Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the parameters that make up ``x``, in their order."""


class Gradient:
    """The gradients of the agents' own objectives, each call on a new sample.

    The first call in a step uses the sample that was drawn for it, and every further call draws another. So K local
    steps inside one step of an algorithm see K batches. :meth:`again` keeps the sample, for two gradients that belong
    together, as in variance reduction or sharpness-aware minimization.

    Args:
        function: ``x`` to a tensor of its shape: ``[n, d]`` in a stacked fleet, ``[d]`` in a real agent.
        full: The gradient over all of an agent's data, where ``function`` takes a sample of it.
        draw: Called with the :class:`Mix` before each step and before each further call in it, to choose a sample.
            ``mix.gradients`` is the number of the sample; the same number comes twice if a sample was not used.
        loss: ``x`` to the agents' losses at their rows, on the step's sample: ``[n, d]`` to ``[n]`` in a stacked fleet,
            ``[d]`` to a tensor of one number in a real agent. It is only recorded (:class:`Run`).
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        full: Callable[[torch.Tensor], torch.Tensor] | None = None,
        draw: Callable[[Mix], None] | None = None,
        loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._function, self._full, self._draw, self._loss = function, full or function, draw, loss
        self._mix: Mix | None = None
        self._used = False

    def draw(self, mix: Mix) -> None:
        """Choose the sample of the step that begins."""
        self._mix, self._used = mix, False
        if self._draw is not None:
            self._draw(mix)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient at ``x``, on a sample that no call before had.

        Raises:
            TypeError: The function returned no tensor.
            ValueError: The function returned a gradient of another shape than ``x``.
        """
        if self._mix is not None:
            if self._used:
                self.draw(self._mix)
            self._mix.gradients += 1
        self._used = True
        return self.again(x)

    def descent(self, x: torch.Tensor, lr: float | torch.Tensor) -> torch.Tensor:
        """``x - lr g(x)``, a new tensor. Raises as a call does."""
        return x - lr * self(x)

    def again(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient at ``x`` on the sample of the last call. Raises as a call does."""
        return _as(x, self._function(x))

    def full(self, x: torch.Tensor) -> torch.Tensor:
        """The gradient at ``x`` on all of the agent's data. Raises as a call does."""
        return _as(x, self._full(x))

    def loss(self, x: torch.Tensor) -> torch.Tensor | None:
        """The losses at ``x`` on the last sample, ``[n]`` or of one number; None if the loss is not known."""
        return None if self._loss is None else self._loss(x)


def _as(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, if it has the shape of ``x``. Another one might be broadcast, and the run end somewhere."""
    if not isinstance(gradient, torch.Tensor):
        raise TypeError(
            f"the gradient's function returned a {type(gradient).__name__} for x of shape {list(x.shape)}: it must "
            "return a tensor of that shape"
        )
    if gradient.shape != x.shape:
        raise ValueError(
            f"the gradient's function returned a tensor of shape {list(gradient.shape)} for x of shape "
            f"{list(x.shape)}: they must be equal, [n, d] in a stacked fleet and [d] in a real agent"
        )
    return gradient


class Algorithm(ABC):
    """A decentralized algorithm.

    Attributes:
        source: The paper and the equation.
        one_gradient: A step takes the gradient once, at its own ``x``: a wrapper such as local momentum may replace it.
        separable: Has ``one_gradient``, its estimate is ``x``, and the step of a part of ``x`` does not depend on the
            other parts. So parts of a model may step separately, each as soon as its gradients are complete. If the
            algorithm compresses, each part is then a message of its own.
        own_rounds: The algorithm itself chooses the steps in which agents exchange, so no wrapper may change them.
        from_x: A step starts from its ``x``, so a change of ``x`` between two steps affects the later ones.
        state_has_mean: The mean over agents of ``x`` and of the state is again one: no agent has a share of the model,
            or values for each neighbour.
    """

    source: ClassVar[str]
    one_gradient: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    own_rounds: ClassVar[bool] = False
    from_x: ClassVar[bool] = True
    state_has_mean: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[Need, ...]:
        """The conditions on the mixing under which the algorithm converges as documented; checked before the first
        step.

        An algorithm declares them as this property, or as a class attribute: ``needs = (DOUBLY_STOCHASTIC,
        CONNECTED)``, of :mod:`shoal.algorithms.needs`, or ``needs = ()`` if it works with any W. One that declares
        nothing causes a warning.
        """
        return ()

    def cycle(self, rounds: int) -> int:
        """The number of steps after which its use of W repeats, if the topology repeats after ``rounds`` rounds."""
        return rounds

    def init(self, x: torch.Tensor, grad: Gradient, mix: Mix) -> Any:
        """The state before the first step: a tuple of tensors, empty if nothing is remembered."""
        return ()

    @abstractmethod
    def step(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        """One step of every agent: the new ``x`` and the new state. ``x`` is not changed."""

    def restart(self, x: torch.Tensor, state: Any, grad: Gradient, mix: Mix) -> tuple[torch.Tensor, Any]:
        """Values to continue with after agents were lost; all survivors begin the same step with them.

        They are the present estimate and a new state, because the old state contains terms of lost agents, or lacks
        terms that they never sent.
        """
        x = self.estimate(x, state)
        return x, self.init(x, grad, mix)

    def healed(self, topology: Schedule, gone: tuple[int, ...]) -> AnyTopology:
        """The topology without some ranks; the remaining ones keep at most an edge to themselves."""
        return Without(topology, gone)

    def at_rest(self) -> Algorithm:
        """An algorithm whose steps without a gradient change the differences between agents as this one's do, and are
        linear in x and in every part of the state that has its shape; itself by default.
        """
        return self

    def estimate(self, x: torch.Tensor, state: Any) -> torch.Tensor:
        """The present estimate of an agent; ``x`` itself by default."""
        return x

    def scaled(self, by: float | torch.Tensor) -> Algorithm | None:
        """The same algorithm with its ``lr``, or its wrapped algorithm's, multiplied by ``by``; None without an ``lr``.

        A state remains valid with it, because it does not depend on the next step's ``lr``.

        Args:
            by: A factor, or one for each of the parameters, ``[d]``.
        """
        held = self._held()
        if "lr" in held:
            return replace(self, lr=held["lr"] * by)  # type: ignore[type-var]
        wrapped = held.get("algorithm")
        inner = wrapped.scaled(by) if isinstance(wrapped, Algorithm) else None
        return None if inner is None else replace(self, algorithm=inner)  # type: ignore[type-var]

    def shaped(self, shapes: Shapes) -> Algorithm:
        """The same algorithm for parameters of these shapes, if its equation, or its wrapped algorithm's, is one of
        matrices: it then has a field ``shapes``. An optimizer calls this with the shapes of its model's parameters.
        """
        held = self._held()
        if "shapes" in held:
            return self if held["shapes"] else replace(self, shapes=shapes)  # type: ignore[type-var]
        wrapped = held.get("algorithm")
        inner = wrapped.shaped(shapes) if isinstance(wrapped, Algorithm) else wrapped
        return self if inner is wrapped else replace(self, algorithm=inner)  # type: ignore[type-var]

    def _held(self) -> dict[str, Any]:
        """The fields of the algorithm, if it is a dataclass."""
        return {field.name: getattr(self, field.name) for field in fields(self)} if is_dataclass(self) else {}


_STEPS = ("lr", "outer_lr", "gamma")
"""Fields that are finite and not negative in every algorithm."""
_warned: dict[type[Algorithm], object] = {}
"""The classes whose missing declaration has caused a warning in this process."""


def require_algorithm(algorithm: object) -> None:
    """Raise TypeError if it is no algorithm, such as a class in place of its instance."""
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"an algorithm of shoal.algorithms is wanted, as GradientDescent(lr=0.1), not {algorithm!r}")


def is_number(value: object) -> bool:
    """A real number, or a tensor of them."""
    return isinstance(value, Real) or (isinstance(value, torch.Tensor) and not value.is_complex())


def check_algorithm(algorithm: object) -> None:
    """Check an algorithm's fields, and those of the one that it wraps.

    Raises:
        TypeError: It is no algorithm, such as a class in place of its instance; its ``compressor`` is none; or a field
            that is declared as a number has none.
        ValueError: A number is NaN or infinite, or a step is negative.
    """
    require_algorithm(algorithm)
    assert isinstance(algorithm, Algorithm)
    name = type(algorithm).__name__
    declared: tuple[Field[Any], ...] = fields(algorithm) if is_dataclass(algorithm) else ()
    for field in declared:
        held, types = getattr(algorithm, field.name), str(getattr(field.type, "__name__", field.type)).split(" | ")
        # Unchecked, these would make every parameter NaN, or raise in the middle of a step on one agent.
        if "float" in types and not (is_number(held) or (held is None and "None" in types)):
            raise TypeError(f"{name}({field.name}={held!r}): a number is wanted")
        if is_number(held) and ("float" in types or field.name in _STEPS):
            number = torch.as_tensor(held if isinstance(held, torch.Tensor) else float(held), device="cpu")
            if field.name in _STEPS and not bool(number.isfinite().all() and (number >= 0).all()):
                raise ValueError(f"{name}({field.name}={held!r}): a finite number of at least 0 is wanted")
            if not bool(number.isfinite().all()):
                raise ValueError(f"{name}({field.name}={held!r}): a finite number is wanted")
        if field.name == "compressor" and not isinstance(held, Compressor):
            raise TypeError(f"{name}(compressor={held!r}): a compressor of shoal.compression is wanted, as TopK(0.1)")
        if field.name == "algorithm":
            check_algorithm(held)


def warn_of_undeclared_needs(algorithm: Algorithm) -> None:
    """Warn, once for each class, of an algorithm without declared needs: no topology is refused for it."""
    kind, wrapped = type(algorithm), getattr(algorithm, "algorithm", None)
    if isinstance(wrapped, Algorithm):
        warn_of_undeclared_needs(wrapped)
    # setdefault is atomic: of agents that are threads one warns.
    if kind.needs is Algorithm.needs and _warned.setdefault(kind, token := object()) is token:
        warnings.warn(
            f"{kind.__name__} declares no needs, so no topology is refused, and a run may end at a wrong point without "
            "an error. Declare the conditions under which it converges, in the class: "
            "needs = (DOUBLY_STOCHASTIC, CONNECTED), of shoal.algorithms.needs; or needs = () if it works with any W",
            stacklevel=3,
        )
