"""The exchange of one optimizer's parameters: buckets, what is under way, and that all agents have the same model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ..errors import Mismatch
from ..ops.collective import allgather, allreduce_nonblocking
from ..runtime.agent import current
from ..runtime.operation import Handle
from .buckets import Bucket, into_buckets
from .rounds import Settings


class Flight:
    """Takes off with the parameters as they are, and lands with their averages.

    Args:
        params: The parameters with their names, in the model's order; asked for anew after :meth:`changed`.
        name: What the exchanges are matched by.
        bucket_bytes: How much goes into one message.
    """

    def __init__(self, params: Callable[[], Mapping[torch.nn.Parameter, str]], name: str, bucket_bytes: int) -> None:
        self._params, self._name, self._bucket_bytes = params, name, bucket_bytes
        self._buckets: list[Bucket] | None = None
        self._handles: list[Handle[torch.Tensor] | None] | None = None

    @property
    def under_way(self) -> bool:
        return self._handles is not None

    def take_off(self, settings: Settings) -> None:
        """Begin to exchange the parameters as they are now."""
        self._handles = [
            settings.start(bucket.flat, bucket.room_for_result(), f"{self._name}.{number}")
            for number, bucket in enumerate(self._ready())
        ]

    def land(self) -> None:
        """Wait for the averages; they are the parameters from here on. Nothing happens if nothing is under way."""
        handles, self._handles = self._handles, None
        if handles is None:
            return
        for bucket, handle in zip(self._ready(), handles, strict=True):
            if handle is not None:
                bucket.move_to(handle.wait())

    def before_local_step(self) -> None:
        """The parameters are about to be changed by the wrapped optimizer."""

    def close(self) -> None:
        """Give back what it holds."""
        self.abandon()

    def wait(self) -> None:
        """Wait for what is under way."""
        for handle in self._handles or ():
            if handle is not None:
                handle.wait()

    def abandon(self) -> None:
        """Wait for what is under way, since the neighbours do, and leave the parameters as they are."""
        self.wait()
        self._handles = None

    def average_gradients(self) -> None:
        """Every gradient becomes the mean over all agents; one that an agent lacks counts as zero."""
        buckets, handles = self._ready(), []
        for number, bucket in enumerate(buckets):
            flat = bucket.gather_gradients()
            handles.append(allreduce_nonblocking(flat, name=f"{self._name}.gradients.{number}", out=flat))
        for bucket, handle in zip(buckets, handles, strict=True):
            for param, mean in zip(bucket.params, bucket.views(handle.wait()), strict=True):
                if param.grad is not None and not param.grad.is_sparse:
                    param.grad.copy_(mean)
                elif param.requires_grad:
                    param.grad = mean.clone()

    def changed(self) -> None:
        """The optimizer has other parameters now."""
        self.abandon()
        self._buckets = None

    def _ready(self) -> list[Bucket]:
        if self._buckets is None:
            params = self._params()
            self._check_that_models_agree(params)
            # The last layers have their gradients first.
            self._buckets = into_buckets(reversed(list(params)), self._bucket_bytes)
        for bucket in self._buckets:
            bucket.adopt()
        return self._buckets

    def _check_that_models_agree(self, params: Mapping[torch.nn.Parameter, str]) -> None:
        """Once, at the first step; the error names the first parameter that differs."""
        lines = [f"{name} {list(param.shape)} {str(param.dtype)[6:]}" for param, name in params.items()]
        mine = torch.tensor(list("\n".join(lines).encode() or b" "), dtype=torch.uint8)
        lengths = allgather(torch.tensor([len(mine)]), name=f"{self._name}.length").tolist()
        texts = torch.split(allgather(mine, name=f"{self._name}.parameters"), lengths)
        here = current("optim").rank
        for rank, text in enumerate(texts):
            theirs = bytes(text.tolist()).decode().split("\n")
            if theirs == (lines or [" "]):
                continue
            longest = max(len(lines), len(theirs))
            pairs = zip(
                [*lines, *["nothing"] * (longest - len(lines))],
                [*theirs, *["nothing"] * (longest - len(theirs))],
                strict=True,
            )
            ours, other = next(pair for pair in pairs if pair[0] != pair[1])
            raise Mismatch(
                f"{self._name}: the models differ: rank {here} has the parameter {ours} where rank {rank} has {other}",
                (here, rank),
            )
