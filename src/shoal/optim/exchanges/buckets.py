"""Parameters in a few large pieces of memory, so that a model is a few messages and not one for each tensor.

Each parameter stays the tensor it was, with its shape and strides; its data lie in a bucket. The bucket lies in memory
that neighbours read, so what is exchanged is not copied first: while neighbours read the parameters here, the average
is written to a second bucket, to which the parameters then move. If the parameters are many and small, the average is
copied back instead, in one call instead of one for each.

Sharded parameters (``DTensor``) stay in place, because the sharding library reads that memory itself (FSDP gathers from
it). So their local parts are copied into the bucket before a round and out of it afterwards. The same holds for
parameters that share memory with other tensors (``params.py``).

Work for each parameter in a step runs in C where possible: a thousand Python calls cost as much as the step of the
wrapped optimizer.

:func:`by_count` and :func:`as_given` make groups of parameters that are sent together, if the caller sets them: a
number of groups, or explicit groups. They replace ``bucket_bytes``, which sets a size. Each group is one message of
each dtype, and contains no other parameters. Parameters in no group are put into buckets of the usual size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor

from ...dtensors import is_sharded, like, local, locals_of, placed_as, placements
from ...runtime.agent import current
from ...topology._validate import check_size
from ..params import is_dense

BUCKET_BYTES = 16 << 20
"""Large enough that a message costs little beside its bytes."""
OVERLAPPED_BUCKET_BYTES = 4 << 20
"""During the backward pass: small enough that the first leaves early, and that little is left when it ends."""


MOVED_BYTES = 2 << 10
"""Parameters that are larger than this on average move to where their average is; smaller ones have it copied."""

_version, _shape, _nbytes = attrgetter("_version"), attrgetter("shape"), attrgetter("nbytes")
_Places = list[tuple[torch.Size, tuple[int, ...] | None]]


def checked_bucket_bytes(bucket_bytes: int | None, overlap: str | None) -> int:
    """The checked argument ``bucket_bytes`` of an optimizer, or its default.

    Raises:
        ValueError: It is no whole number of bytes.
    """
    if bucket_bytes is None:
        return OVERLAPPED_BUCKET_BYTES if overlap else BUCKET_BYTES
    try:
        return check_size(bucket_bytes)
    except (TypeError, ValueError):
        raise ValueError(f"bucket_bytes={bucket_bytes!r}: it must be a whole number of bytes, 1 or more") from None


class _Memory:
    """Room for all parameters of a bucket.

    Attributes:
        flat: ``[numel]``.
    """

    def __init__(self, flat: Tensor, places: _Places) -> None:
        self.flat, self._places = flat, places

    @cached_property
    def views(self) -> list[Tensor]:
        """Each parameter's part, in the shape and strides that it had at first."""
        found, at = [], 0
        for shape, strides in self._places:
            part = self.flat[at : at + shape.numel()]
            found.append(
                part.view(shape) if strides is None else part.as_strided(shape, strides, part.storage_offset())
            )
            at += shape.numel()
        return found

    @cached_property
    def addresses(self) -> list[int]:
        """The address of each part."""
        return [view.data_ptr() for view in self.views]


class Bucket:
    """Some parameters of one dtype on one device: plain tensors, or the local parts of sharded ones.

    Args:
        params: The parameters.
        stays: The parameters stay in their own memory, and are copied into the bucket and out of it.

    Attributes:
        params: In the order of their memory.
        of: The parameters that they belong to: themselves, or, for optimizer state, its parameters.
        kind: The kind of optimizer state; empty for the parameters themselves.
        numel: The number of local elements.
    """

    kind = ""

    def __init__(self, params: list[torch.nn.Parameter], stays: bool = False) -> None:
        self.params = self.of = params
        # FSDP keeps pointers to this memory. A parameter that is moved away would be gathered with old numbers.
        self._stays = stays or any(map(is_sharded, params))
        tensors = self._tensors()
        self.numel = sum(tensor.numel() for tensor in tensors)
        # Equal on all agents and fixed: the layout must not depend on later changes of one agent to a parameter.
        self._places: _Places = [(tensor.shape, tensor.stride() if is_dense(tensor) else None) for tensor in tensors]
        self._moves = not self._stays and sum(tensor.nbytes for tensor in tensors) > MOVED_BYTES * len(params)
        # If the average is copied, a view of the same memory in another shape is equivalent.
        self._size = _shape if self._moves else _nbytes
        self._sizes = [self._size(tensor) for tensor in tensors]
        self._has_empty = not all(tensor.numel() for tensor in tensors)  # whose addresses mean nothing
        self._spare: _Memory | None = None
        self._mean: _Memory | None = None
        self._versions: list[int] | None = None
        self._guarded: list[int] = []
        self._here = self._memory()
        self._move_in()

    @property
    def flat(self) -> Tensor:
        """Their data, ``[numel]``."""
        return self._here.flat

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which the parameters lie in :attr:`flat`: dimensions with larger strides come first."""
        return tuple(
            tuple(shape)
            if strides is None
            else tuple(size for _, size in sorted(zip(strides, shape, strict=True), key=lambda pair: -pair[0]))
            for shape, strides in self._places
        )

    def put(self, numbers: Tensor) -> None:
        """Set the parameters to these numbers, ``[numel]``."""
        self.flat.copy_(numbers)
        self.written()

    def written(self) -> None:
        """Notes that new values of the parameters have been written to :attr:`flat`."""
        if self._stays:
            self._copy_out(self._here)

    @property
    def stays(self) -> bool:
        """The parameters are in their own memory, and are copied before each round."""
        return self._stays

    def stay(self) -> None:
        """Keep the parameters in their own memory, where other code has put them."""
        self._stays, self._moves = True, False

    def _tensors(self) -> Sequence[Tensor]:
        """The local tensors of the parameters."""
        return locals_of(self.params) if self._stays else self.params

    def _copy_out(self, memory: _Memory) -> None:
        torch._foreach_copy_([tensor.detach() for tensor in self._tensors()], memory.views)

    def _memory(self) -> _Memory:
        first = self.params[0]
        if not first.is_cpu:
            return _Memory(first.detach().new_empty(self.numel), self._places)
        # From the arena, whose memory neighbours on this machine can map. Other memory would be copied once more for
        # each round.
        return _Memory(current("optim").engine.shared_memory((self.numel,), first.dtype), self._places)

    def _move_in(self) -> None:
        if self._stays:
            torch._foreach_copy_(self._here.views, [tensor.detach() for tensor in self._tensors()])
            return
        for param, view in zip(self.params, self._here.views, strict=True):
            # First the numbers, then the pointer: in the other order the bucket's uninitialized numbers would be copied
            # onto themselves.
            view.copy_(param.detach())
            param.data = view

    # Where the parameters are

    @property
    def in_place(self) -> bool:
        """All parameters lie where they were put, by one look at each."""
        # Parameters that stay are never in the bucket, and an empty tensor has no address of its own. So adopt() copies
        # the former, and looks at each of the latter.
        if self._stays or self._has_empty:
            return False
        # The sizes, too: a parameter that was replaced by a part of itself begins at the same address.
        here = list(map(Tensor.data_ptr, self.params)) == self._here.addresses
        return here and list(map(self._size, self.params)) == self._sizes

    @property
    def outgrown(self) -> bool:
        """A parameter has another shape, dtype or device than it had, so that it has no place here."""
        pairs = zip(self._tensors(), self._places, strict=True)
        as_before = (self.flat.dtype, self.flat.device)
        return any(tensor.shape != shape or (tensor.dtype, tensor.device) != as_before for tensor, (shape, _) in pairs)

    def adopt(self) -> None:
        """Move the parameters into the bucket again, after ``param.data = ...`` or ``module.to(...)`` moved them."""
        if self._stays:
            self._move_in()
        if self._stays or self.in_place:
            return
        for param, view in zip(self.params, self._here.views, strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.detach())
                param.data = view

    # While their average is under way

    def guard(self, guarded: bool) -> None:
        """The parameters must not change after this call; with ``guarded``, :meth:`changed` reports changes."""
        tensors = self._tensors()
        # The address as well as the version: param.data = ... changes the numbers without a new version.
        self._versions = list(map(_version, tensors)) if guarded else None
        self._guarded = list(map(Tensor.data_ptr, tensors)) if self._stays else self._here.addresses

    def changed(self) -> list[int]:
        """The parameters that have changed since :meth:`guard`, in place or by ``param.data = ...``."""
        versions = self._versions
        if versions is None:
            return []
        tensors = self._tensors()
        there = list(map(Tensor.data_ptr, tensors))
        if versions == list(map(_version, tensors)) and there == self._guarded:
            return []
        triples = zip(tensors, versions, self._guarded, strict=True)
        return [
            number
            for number, (tensor, version, address) in enumerate(triples)
            if tensor._version != version or tensor.data_ptr() != address
        ]

    def room_for_result(self) -> Tensor:
        """Memory of the bucket's size that nothing lies in, ``[numel]``."""
        return self._room.flat

    @property
    def _room(self) -> _Memory:
        if self._spare is None:
            self._spare = self._memory()
        return self._spare

    def take_result(self) -> None:
        """Set the parameters' data to the numbers in :meth:`room_for_result`."""
        if self._stays:
            self._copy_out(self._room)
            return
        if not self._moves:
            # All neighbours have read the bucket when its operation ends, so it may be overwritten.
            self.flat.copy_(self._room.flat)
            return
        # The old memory becomes the room for the next result. All neighbours have read it, because the operation has
        # ended.
        self._here, self._spare = self._room, self._here
        for param, view in zip(self.params, self._here.views, strict=True):
            param.data = view

    def leave(self) -> None:
        """Move to other memory, because agents may still read the present memory and the parameters are about to
        change.
        """
        # The room as well: in an exchange of gradients the neighbours read this agent's gradients there.
        self._spare = self._versions = None
        self._here = self._memory()
        self._move_in()

    # Gradients

    def gather_gradients(self) -> Tensor:
        """The gradients, flat, in the room for the result; zeros if there is none."""
        views, grads = [], []
        for param, view in zip(self.params, self._room.views, strict=True):
            grad = param.grad
            if grad is None:
                # The room has the numbers of an earlier round. Left there they would enter the mean of all agents.
                view.zero_()
            elif grad.is_sparse:
                view.copy_(grad.to_dense())
            else:
                views.append(view)
                grads.append(placed_as(grad, param))
        if views:
            torch._foreach_copy_(views, grads)
        return self._room.flat

    def room_for_mean(self) -> Tensor:
        """Memory for the mean of the gradients, ``[numel]``, while others read the gradients from
        :meth:`gather_gradients`. No other agent reads it.
        """
        if self._mean is None:
            self._mean = _Memory(torch.empty_like(self.flat), self._places)
        return self._mean.flat

    def spread_gradients(self, mean: Tensor) -> None:
        """Set the gradients to the numbers in the room for the mean, or for the result. A parameter without a gradient
        gets one, even if it has been frozen since: the other agents take this step, too.
        """
        memory = self._mean if self._mean is not None and mean is self._mean.flat else self._room
        views, grads = [], []
        for param, view in zip(self.params, memory.views, strict=True):
            grad = param.grad
            if grad is not None and not grad.is_sparse and placements(grad) == placements(param):
                views.append(view)
                grads.append(local(grad))
            else:
                param.grad = like(view.clone(), param)
        if views:
            torch._foreach_copy_(grads, views)


def into_buckets(
    params: Iterable[torch.nn.Parameter],
    nbytes: float = BUCKET_BYTES,
    shared: Sequence[Sequence[torch.nn.Parameter]] = (),
) -> list[Bucket]:
    """Buckets of at most ``nbytes`` each (or of one larger parameter), in the order given.

    Args:
        params: The parameters to put into buckets.
        nbytes: The limit of each bucket.
        shared: Parameters that share memory, as :func:`~shoal.optim.params.sharing` gives them. They are put
            into one bucket, which is sent when all of them have been stepped.
    """
    params = dict.fromkeys(params)
    together = {param: group for group in shared for param in group}
    placed: set[torch.nn.Parameter] = set()
    open_: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    held: dict[tuple[torch.dtype, torch.device], int] = {}
    full: list[list[torch.nn.Parameter]] = []
    for param in params:
        if param in placed:
            continue
        kind = param.dtype, param.device
        # Parameters that share memory are one unit: in two buckets the second average would overwrite the first.
        unit = [
            member
            for member in together.get(param, [param])
            if member in params and (member.dtype, member.device) == kind
        ]
        placed.update(unit)
        here = sum(local(member).nbytes for member in unit)
        group = open_.setdefault(kind, [])
        if group and held[kind] + here > nbytes:
            full.append(group)
            group, held[kind] = [], 0
            open_[kind] = group
        group += unit
        held[kind] = held.get(kind, 0) + here
    groups = [group for group in [*full, *open_.values()] if group]
    return [Bucket(group, not together.keys().isdisjoint(group)) for group in groups]


Layout = list[list[str]]
"""The names of the parameters of each bucket."""
Named = Mapping[torch.nn.Parameter, str]


def by_count(params: Named, num_groups: object) -> Layout:
    """The given number of groups of about equal bytes, in the order in which gradients are computed: the last layers
    first.

    Raises:
        ValueError: ``num_groups`` is no number of groups: 1 or more, and not more than there are parameters.
    """
    try:
        count = check_size(num_groups)
    except (TypeError, ValueError):
        count = 0
    if not 1 <= count <= len(params):
        raise ValueError(f"num_groups={num_groups!r}: it must be a whole number, 1 to {len(params)}, of parameters")
    remaining = list(params)[::-1]
    groups: list[list[torch.nn.Parameter]] = []
    for behind in range(count - 1, -1, -1):
        share, taken = sum(param.nbytes for param in remaining) / (behind + 1), 0
        group: list[torch.nn.Parameter] = []
        # The next one where that is nearer to an equal share, and as long as one is left for each group behind.
        while len(remaining) > behind and (not group or not behind or taken + remaining[0].nbytes / 2 <= share):
            taken += remaining[0].nbytes
            group.append(remaining.pop(0))
        groups.append(group)
    return _of_one_kind(params, groups)


def as_given(params: Named, groups: object) -> Layout:
    """Groups of parameters, or of their names.

    Raises:
        TypeError, ValueError: The groups are no lists of these parameters, or have one twice.
    """
    called = {name: param for param, name in params.items()}
    found: list[list[torch.nn.Parameter]] = []
    for group in _listed(groups):
        found.append([])
        for item in _listed(group):
            param = called.get(item) if isinstance(item, str) else item
            if not isinstance(param, torch.nn.Parameter) or param not in params:
                shown = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
                raise ValueError(f"groups: {shown} is no parameter of this optimizer")
            if any(param is other for members in found for other in members):
                raise ValueError(f"groups: {params[param]!r} is named twice")
            found[-1].append(param)
    return _of_one_kind(params, found)


def _listed(given: object) -> Sequence[object]:
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(f"groups must be lists of parameters, or of their names, not {type(given).__name__}")
    return list(given)


def _of_one_kind(params: Named, groups: Iterable[Sequence[torch.nn.Parameter]]) -> Layout:
    """Each group, cut by dtype and device."""
    layout: Layout = []
    for group in groups:
        kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
        for param in group:
            kinds.setdefault((param.dtype, param.device), []).append(params[param])
        layout += kinds.values()
    return layout
