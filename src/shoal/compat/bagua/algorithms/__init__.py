"""BAGUA's algorithms, in modules of the same names as BAGUA's."""

from __future__ import annotations

from . import async_model_average as async_model_average
from . import bytegrad as bytegrad
from . import decentralized as decentralized
from . import gradient_allreduce as gradient_allreduce
from . import q_adam as q_adam
from .base import Algorithm as Algorithm

__all__ = ["Algorithm", "async_model_average", "bytegrad", "decentralized", "gradient_allreduce", "q_adam"]
