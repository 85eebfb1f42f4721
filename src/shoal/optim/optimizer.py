"""A decentralized optimizer around any torch optimizer: the user's loop, the user's local step, and an exchange.

The wrapped optimizer is not rebuilt and keeps its state; a decentralized step is its step, before or after an average
with the neighbours. Strategies differ in the begin of the exchange and the use of its result
(:class:`~shoal.optim.steps.StepStrategy`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import networkx as nx
import torch
from torch.nn.parallel import DistributedDataParallel

from ..algorithms.algorithm import Algorithm, check_algorithm, warn_of_undeclared_needs
from ..algorithms.gradient_descent import GradientDescent
from ..algorithms.needs import check, without
from ..algorithms.wrappers import OfMachines
from ..compression import Compressor, LowRank
from ..runtime.agent import current, warn_of_process_group
from ..topology.schedule import Schedule
from .equation import Equation
from .exchanges.bucket_exchange import BucketExchange
from .exchanges.buckets import as_given, by_count, checked_bucket_bytes
from .exchanges.hooks import BackwardCounter, BeforeForward
from .exchanges.sync_exchange import GradientExchange, ParameterExchange
from .factory import ATC, PARALLEL, by_buckets, compressing, feeds_back, mixed_of, strategy_of
from .malloc_trimming import keep_freed_memory
from .params import Names, name_of_optimizer
from .settings import ALIASES, BY_HAND, NAMES, CommunicationType, Settings
from .sharding import check_optimizer, check_sharding
from .steps import DuringBackward, InnerStep, Join
from .topologies import STATIC, WeightChecks, agent_schedule, given, of_agents, of_machines, one_peer

_DEFAULTS = Settings()


class DecentralizedOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose agents average during training.

    It replaces the optimizer that it wraps, with the same ``param_groups``, ``state`` and hooks, so learning-rate
    schedulers, gradient clipping and ``GradScaler`` work on it. All agents call ``step()`` equally often. Between steps
    the attributes of :class:`~shoal.optim.Settings` may be set; they hold for the round that begins at the next forward
    pass (adapt with combine) or step.

    Args:
        optimizer: Any torch optimizer but LBFGS; its state is kept.
        model: The module, or modules, whose parameters it has.
        algorithm: The equation of a step, from :mod:`shoal.algorithms`. ``GradientDescent(1.0)`` adapts, then combines,
            and with ``atc=False`` adapts with combine; ``ParallelGradientDescent(1.0)`` averages gradients, before the
            wrapped optimizer sees them. Any other takes the wrapped optimizer's update as its gradient, so its own
            ``lr`` is a factor of that: usually 1.
        compression: The compressor of messages: one of :mod:`shoal.compression`. For adapt, then combine, CHOCO-SGD
            replaces the algorithm, or DeepSqueeze if the topology is a schedule that changes, with a ``gamma`` that
            suits the compressor; with :class:`~shoal.compression.LowRank` PowerGossip does, which needs a static
            undirected graph. ``optimizer.algorithm`` is the chosen one. Averaged gradients are compressed on the
            way to the mean and back; the errors of a coarse compressor's messages are added to the next.
        topology: The weights of each round: a graph, or a schedule, of which every exchange is a round. If none is
            given: the attributes' weights, else the static topology that the script has set, else one peer at a time
            (:class:`shoal.topology.OnePeerExponential`), or if the algorithm needs another, the first that it accepts
            of the exponential graph, the symmetric exponential graph and the chain. ``"static"``: the static topology,
            even if the script has set none.
        overlap: ``"backward"``: buckets are stepped and sent during the backward pass, as soon as their gradients are
            complete, and ``step()`` waits; for any algorithm that is ``separable``. Not with gradient clipping, a
            closure or a GradScaler, which need all gradients first.
        bucket_bytes: The size of one message: 16 MiB, or 4 MiB with ``overlap="backward"``, if not given.
        num_groups: The number of messages of about equal size, instead of ``bucket_bytes``.
        groups: Parameters that are sent together, and without others: lists of them, or of their names. One message for
            each list, and dtype in it; ``bucket_bytes`` applies to parameters in no list.
        name: Matches the exchanges of different agents; the same on all agents, different for each optimizer of an
            agent. By default the n-th optimizer without a name of one agent matches the n-th of every other.
        mix_state: State of the wrapped optimizer that is averaged beside the parameters, in the same rounds with the
            same weights: ``("exp_avg_sq",)`` for Adam. Each is as many bytes as the parameters. By default none is
            averaged; for Adam and similar optimizers with a warning, which an empty tuple avoids.
        bucket_exchange: The kind of exchange: in step with the neighbours, or through windows (``window_exchange.py``).
        unchecked: The names of conditions that W need not fulfil (``"doubly stochastic"``), for experts.
        settings: The initial attributes. ``communication_type=CommunicationType.hierarchical_neighbor_allreduce``
            averages between machines; ``topology`` is then the topology of the machines. Adapt, then combine, and adapt
            with combine average the machines' means; another algorithm, which must be separable, or ``compression``,
            becomes one of machines (:class:`shoal.algorithms.OfMachines`).

    A topology that does not meet the algorithm's needs is refused with an error. Other weights, such as the static
    topology's of the common algorithms or weights set by hand, cause one warning.

    Raises:
        TypeError: ``optimizer``, ``model`` or ``algorithm`` is not one.
        ValueError: LBFGS; a parameter that is not in the model, or that another wrapper has; a topology of another
            size, or on which the algorithm cannot converge; an invalid overlap or bucket size.
        Mismatch: At a step, if agents' models differ, or they have frozen different parameters; it names one.
    """

    _step_supports_amp_scaling = True  # else GradScaler would skip step() on an agent whose neighbours wait for it

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        algorithm: Algorithm = ATC,
        *,
        compression: Compressor | LowRank | None = None,
        topology: nx.Graph | Schedule | Literal["static"] | None = None,
        overlap: Literal["backward"] | None = None,
        bucket_bytes: int | None = None,
        num_groups: int | None = None,
        groups: Sequence[Sequence[torch.nn.Parameter | str]] | None = None,
        name: str | None = None,
        mix_state: Sequence[str] | None = None,
        bucket_exchange: type[BucketExchange] = ParameterExchange,
        unchecked: str | Iterable[str] = (),
        **settings: Any,
    ) -> None:
        # Optimizer.__init__ would make new groups, state and hooks; the wrapped optimizer's are used instead.
        self._inner = _checked(optimizer)
        warn_of_process_group(current("DecentralizedOptimizer"), stacklevel=4)
        self._models = [model] if isinstance(model, torch.nn.Module) else list(model or ())  # Params refuses none
        numbers = sum(param.numel() for group in self._inner.param_groups for param in group["params"])
        static, topology = topology == STATIC, given(topology)
        check_algorithm(algorithm)
        algorithm = compressing(algorithm, compression, topology, numbers)
        machines = settings.get("communication_type") is CommunicationType.hierarchical_neighbor_allreduce
        if machines and isinstance(algorithm, Algorithm) and not by_buckets(algorithm):
            algorithm = of_machines(algorithm)
        self._algorithm = algorithm
        self._settings = Settings()
        self._scheduled = topology is not None
        self._counting = bucket_exchange.counts
        self._passes = BackwardCounter()
        self._warned = False
        for key, value in settings.items():
            setattr(self, key, value)
        self._names = Names(self._models, self._inner)
        self._name = name = name_of_optimizer() if name is None else name
        size_of_bucket = checked_bucket_bytes(bucket_bytes, overlap)
        # An algorithm has one vector, unless its parts are to step by themselves.
        parts = by_buckets(algorithm) or (overlap and isinstance(algorithm, Algorithm) and algorithm.separable)
        whole = size_of_bucket if parts else float("inf")
        if num_groups is not None and (groups is not None or bucket_bytes is not None):
            raise ValueError("num_groups sets the size of messages; leave groups and bucket_bytes out")
        if not parts and (num_groups is not None or groups is not None):
            raise ValueError(
                f"{type(algorithm).__name__} steps one vector of all parameters, so there is nothing to group; leave "
                'num_groups and groups out, or, where it is separable, add overlap="backward"'
            )
        if topology is not None and algorithm == PARALLEL:
            raise ValueError("gradients are averaged over all agents, whatever the topology; leave topology out")
        schedule = None if topology is None else agent_schedule(topology, self._settings.communication_type)
        if topology is not None and isinstance(algorithm, OfMachines):
            topology = of_agents(topology)
        check_sharding(self._names(), self._models, algorithm, compression, bucket_exchange.in_step, overlap)
        travels = GradientExchange if algorithm == PARALLEL and bucket_exchange.in_step else bucket_exchange
        self._bucket_exchange = travels(self._names, name, whole, self._settings, schedule)
        self._bucket_exchange.sharing, self._bucket_exchange.trainable = self._names.sharing, self._names.are_trainable
        if (
            topology is None
            and not static
            and by_buckets(algorithm)
            and isinstance(self._bucket_exchange, ParameterExchange)
        ):
            self._bucket_exchange.default = one_peer()
        if num_groups is not None:
            self._bucket_exchange.group_as(by_count(self._names.trainable or self._names(), num_groups))
        elif groups is not None:
            self._bucket_exchange.group_as(as_given(self._names(), groups))
        if overlap and any(isinstance(model, DistributedDataParallel) for model in self._models):
            raise ValueError(
                'overlap="backward": DistributedDataParallel averages gradients after this optimizer would have used '
                "them; leave overlap out, or DistributedDataParallel"
            )
        if isinstance(compression, Compressor) and isinstance(self._bucket_exchange, GradientExchange):
            self._bucket_exchange.compress(compression, feeds_back(compression, numbers))
        self._local = InnerStep(self._inner)
        self._bucket_exchange.mixed = mixed_of(self._inner, mix_state, algorithm, bucket_exchange)
        kind = STATIC if static else topology
        unchecked = unchecked if isinstance(unchecked, str) else tuple(unchecked)
        self._strategy = strategy_of(algorithm, self._bucket_exchange, self._local, overlap, kind, name, unchecked)
        self._check_needs(topology, name, unchecked)
        self._join = Join(self._bucket_exchange, self._strategy, name)
        self._names.claim(self)
        keep_freed_memory()
        self._count_passes()
        self._hook = self._models[0].register_forward_pre_hook(BeforeForward(self._models[0], self))

    def _check_needs(self, topology: nx.Graph | Schedule | None, name: str, unchecked: str | Iterable[str]) -> None:
        """Check a given topology now; otherwise the exchange checks the weights of each round."""
        algorithm, algorithm_name = self._algorithm, type(self._algorithm).__name__
        if current("DecentralizedOptimizer").rank == 0:
            warn_of_undeclared_needs(algorithm)
        if topology is not None:
            dimension = sum(param.numel() for param in self._names())
            check(algorithm_name, algorithm.needs, topology, dimension=dimension, unchecked=unchecked)
            return
        checked = without(unchecked, algorithm_name, algorithm.needs)
        if isinstance(algorithm, GradientDescent) and not isinstance(self._strategy, Equation):
            needs = [need for need in checked if need.name not in self._bucket_exchange.does_without]
            self._bucket_exchange.balance = WeightChecks(f"{name} ({self._strategy.equation})", needs)

    # It stands for the optimizer that it wraps

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that is wrapped."""
        return self._inner

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that defines a step."""
        return self._algorithm

    @property
    def overlaps_backward(self) -> bool:
        """Buckets leave during the backward pass, which must therefore come before ``step()`` and not in a closure."""
        return isinstance(self._strategy, DuringBackward)

    @property
    def reads_parameters(self) -> bool:
        """An exchange that began with the forward pass reads the parameters' memory until ``step()``."""
        return self._bucket_exchange.under_way and not self.overlaps_backward

    @property
    def rounds(self) -> int:
        """How many exchanges there have been."""
        return self._bucket_exchange.rounds

    def __getattr__(self, name: str) -> Any:
        """A setting, or an attribute of the wrapped optimizer, such as ``param_groups``, ``state`` and ``defaults``."""
        name = ALIASES.get(name, name)
        if name in NAMES:
            return getattr(self._settings, name)
        if name == "_inner":  # it is being made, or copied
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        name = ALIASES.get(name, name)
        if name in NAMES:
            self._check_that_it_counts(name, value)
            self._settings.set(name, value)
            self._warn_if_late(name)
            if "_names" in self.__dict__:  # not yet, where it begins with some settings
                self._count_passes()
        elif name.startswith("_") or name in ("found_inf", "grad_scale", "step"):  # GradScaler's, and schedulers'
            super().__setattr__(name, value)
        else:
            known = ", ".join((*NAMES, *ALIASES))
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} to set; there are: {known}")

    def _check_that_it_counts(self, name: str, value: Any) -> None:
        join: Join | None = self.__dict__.get("_join")  # not yet, where it begins with some settings
        if join is not None and join.active and name in (*BY_HAND, "communication_type"):
            raise ValueError(
                f"{name} cannot be set for single rounds inside join(): agents without batches, which run no loop, "
                "would take part in another way. Set it before join(), or give a schedule as topology="
            )
        if self._scheduled and name in BY_HAND and value is not None:
            raise ValueError(f"{name}: the weights of this optimizer come from its topology=; give one of the two")
        if name == "communication_type" and isinstance(self._algorithm, OfMachines):
            if value is not CommunicationType.hierarchical_neighbor_allreduce:
                raise ValueError(f"communication_type cannot be set any more: {self._algorithm} is one of machines")
            return
        if join is not None and name == "communication_type" and self._scheduled:
            machines = CommunicationType.hierarchical_neighbor_allreduce
            if (value is machines) != (self._settings.communication_type is machines):
                raise ValueError(
                    "communication_type: the topology= of this optimizer is for "
                    f"{'agents' if value is machines else 'machines'}; pass both to the constructor"
                )
        if name not in (*BY_HAND, "communication_type", "robust") or value is getattr(_DEFAULTS, name):
            return
        by_settings = isinstance(self._algorithm, GradientDescent) and by_buckets(self._algorithm) is not None
        counting = self._counting if by_settings else ()
        if name not in counting:
            who = self._algorithm if not by_settings else "an exchange through these windows"
            raise ValueError(
                f"{name} would not count: {who} determines what is exchanged. Of the settings it takes "
                f"{', '.join((*sorted(counting), 'num_steps_per_communication'))}"
            )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a decentralized optimizer cannot be pickled or copied; save its state_dict()")

    def __repr__(self) -> str:
        algorithm = self._algorithm if isinstance(self._strategy, Equation) else self._strategy.equation
        return f"{type(self).__name__}({algorithm}; {self._inner!r})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's. The parameters must be the model's; they are exchanged from the next round on."""
        self._inner.add_param_group(param_group)
        try:
            self._names.read(self)
            self._strategy.changed()
        except BaseException:
            self._inner.param_groups.pop()
            self._names.read(self)
            raise
        self._names.claim(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self._inner.zero_grad(set_to_none)

    # A step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The local step and this round's exchange, in the order of the algorithm.

        If the gradients of a ``GradScaler`` overflowed, the local step is skipped but the exchange is not: the
        neighbours wait for it.

        Args:
            closure: Evaluates the model and its gradients again, before everything else.
        """
        local = self._local
        found_inf, scale = self.__dict__.get("found_inf"), self.__dict__.get("grad_scale")  # a GradScaler's
        if found_inf is not None:
            # It removes both only after a step that succeeds, and multiplies its scale by the one that it finds.
            self.found_inf, self.grad_scale = None, 1
        engine, began = current("optimizer.step").engine, time.perf_counter_ns()
        engine.check_joined("optimizer.step")
        local.closure, local.loss = closure, None
        local.unscale(self._names(), found_inf, scale)
        self._names.check_modules()
        if not self._alone:
            self._names.begin_step(self._strategy.begins_early)
        self._count_passes()
        passes = self._passes.begin_step()
        enough = passes >= self._settings.num_steps_per_communication or self._strategy.at_every_step
        due = enough and not self._alone
        try:
            with self._join.round(due):
                self._strategy.step(due)
            if due:
                self._bucket_exchange.equalize()
            if self._bucket_exchange.mixed is not None and not local.overflowed:
                self._bucket_exchange.mixed.confirm(self._names())
        finally:
            self._passes.end_step(enough)
            self._warned = False
            local.closure = None
        engine.step_ended(self._name, began)
        return cast("float | None", local.loss)

    def join(self) -> AbstractContextManager[None]:
        """A context around a loop over batches, of which agents have different numbers; all agents enter it.

        An agent that leaves the loop takes part in the others' rounds until no agent has a batch: with its unchanged
        parameters, so that they move towards its neighbours'. If gradients are averaged it does not count: the mean is
        over the agents that have batches. Asynchronous optimizers forward received data until all have ended, and then
        add the messages in transit.

        Raises:
            ValueError: The weights of each round are set by hand, or a setting is set inside, so agents without batches
                could not use them; give a ``topology``. Or a step of the algorithm needs all agents, and agents without
                batches could not take part. Or another optimizer has joined the loop: agents without batches would wait
                in one while others wait in the other.
            RuntimeError: The loop was left between a forward pass and its step.
        """
        return self._join.loop()

    def synchronize(self) -> None:
        """Wait until what this agent has begun to send or fetch has arrived. ``step()`` does what follows from it."""
        self._bucket_exchange.wait()

    @property
    def _alone(self) -> bool:
        """There is no other agent to exchange with. An algorithm's own equation is still stepped."""
        return current("optimizer.step").size == 1 and not isinstance(self._strategy, Equation)

    def _count_passes(self) -> None:
        """Count backward passes if an exchange follows several of them: also with parameters that are learnt only
        now.
        """
        if self._settings.num_steps_per_communication > 1:
            self._passes.watch(self._names())

    def _begin_pass(self) -> None:
        """A forward pass of training begins: exchanges that start there do so."""
        self._count_passes()
        enough = self._passes.next >= self._settings.num_steps_per_communication and not self._passes.stepping
        if enough and self._strategy.begins_early and not self._alone and self._names.any_trainable():
            with torch.no_grad():
                self._names.begin_pass()
                self._strategy.begin_pass()

    def _warn_if_late(self, name: str) -> None:
        bucket_exchange = self.__dict__.get("_bucket_exchange")
        if bucket_exchange is not None and bucket_exchange.under_way and not self._warned:
            self._warned = True
            warnings.warn(
                f"{name} was set after this round's exchange had begun, at the forward pass; it holds from the next "
                "round on. Set it before the forward pass.",
                stacklevel=4,
            )

    # State

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``"shoal"`` what is ours.

        Take it between steps, before the next forward pass. With windows all agents call it together: what is on its
        way is taken in first, so that the saved masses add up to the whole.
        """
        agent = current("optimizer.state_dict")
        own = {"agent": (agent.rank, agent.size), **self._with_exchange(self._strategy.state())}
        return {**self._inner.state_dict(), "shoal": own}

    def _with_exchange(self, strategy_state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of the strategy with that of the exchange."""
        return {
            "rounds": self._bucket_exchange.rounds,
            "passes": self._passes.kept,
            "way": strategy_state,  # the key in states that earlier versions saved
            "layout": self._bucket_exchange.layout_to_keep,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a :meth:`state_dict`. The state of a plain optimizer of the same kind is accepted, too.

        Load the model first. With windows all agents call it together.

        Raises:
            ValueError: The state is of another number of agents, or has another algorithm's memory. Or it is of
                another agent, whose part of an algorithm's state or of the mass of push-sum would then exist twice.
        """
        state = dict(state_dict)
        own = state.pop("shoal", {})
        agent, kept = current("optimizer.load_state_dict"), own.get("way", {})
        rank, size = own.get("agent", (agent.rank, agent.size))
        if size != agent.size or (kept and rank != agent.rank):
            raise ValueError(
                f"the state is of agent {rank} of {size}, and this is agent {agent.rank} of {agent.size}. For another "
                "number of agents save with shoal.Checkpoint, and load with start='consensus'"
            )
        self._strategy.check_state(kept)
        self._bucket_exchange.abandon()
        self._inner.load_state_dict(state)
        self._bucket_exchange.rounds = own.get("rounds", 0)
        self._passes.load(own.get("passes", 0))
        self._bucket_exchange.go_on_with(own.get("layout", []))
        self._strategy.load_state(kept)

    def hand_over(self) -> dict[str, Any]:
        """The state for :meth:`take_over` of a joining agent. It contains no windows: all agents create them again in
        :meth:`met`.
        """
        own = self._with_exchange(self._strategy.state() if self._bucket_exchange.in_step else {})
        return {"state": {**self._inner.state_dict(), "shoal": own}, "agreed": self._bucket_exchange.agreed}

    def take_over(self, handed_over: Mapping[str, Any]) -> None:
        """Continue with the state from another agent's :meth:`hand_over`, at the next round of all agents. That agent's
        agreements with the others hold for this one; all agents reset the algorithm's memory.
        """
        self.load_state_dict(handed_over["state"])
        self._bucket_exchange.agreed = bool(handed_over["agreed"])

    def met(self) -> None:
        """Agents have been admitted, and have taken over their state. All agents call it, including the new ones."""
        with torch.no_grad():
            self._bucket_exchange.met()

    def close(self) -> None:
        """Give the model back: no hook, no claim on its parameters, which keep their values."""
        self._hook.remove()
        self._passes.close()
        self._names.release()
        self._strategy.close()


def _checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if isinstance(optimizer, DecentralizedOptimizer):
        raise ValueError("this optimizer is decentralized already; wrap the one inside it")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"an optimizer of torch is wanted, not {type(optimizer).__name__}")
    check_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS cannot be decentralized: it evaluates the model several times in a step, and its line search is "
            "about one agent's own loss. Take SGD or Adam."
        )
    return optimizer
