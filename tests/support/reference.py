"""The expected results of the operations, in plain tensors, to the last bit.

A weighted sum is taken in one order: the agent's own term, then the sources by ascending rank, each one fused
multiply-add with the product r s taken in double precision; in float32 for 16-bit tensors and rounded once at the end;
for complex tensors on the real and imaginary parts. Where all weights are the same 1 / k (k a whole number up to 2^24,
no power of two), the plain sum is divided by k; where they are another same number, it is multiplied by that. A
reduction goes over all agents by ascending rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx
import torch

from . import PROCESS_GROUP

HALF = (torch.float16, torch.bfloat16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in the order of its elements."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal dtype, equal shape and equal bytes; so a NaN equals the same NaN, and 0.0 is not -0.0."""
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def same_reduction(one: torch.Tensor, other: torch.Tensor, transport: str) -> bool:
    """The same bits; or near, where a process group has summed large tensors of floats in an order of its own."""
    by_engine = transport == PROCESS_GROUP and one.dtype in (torch.float32, torch.float64) and one.nbytes > 1 << 12
    if not by_engine:
        return same_bits(one, other)
    alike = one.dtype == other.dtype and one.shape == other.shape
    eps, near = torch.finfo(one.dtype).eps, other[other.isfinite()].abs().mean().item()
    return alike and torch.allclose(one, other, rtol=16 * eps, atol=16 * eps * near, equal_nan=True)


def weighted(own: torch.Tensor, self_weight: float, terms: Mapping[int, tuple[float, torch.Tensor]]) -> torch.Tensor:
    """``self_weight own + sum of weight x``, where ``terms`` is {source: (weight, x)}."""
    own = own.detach().resolve_conj().resolve_neg().contiguous()
    weights = [float(self_weight), *(float(terms[source][0]) for source in sorted(terms))]
    tensors = [tensor.detach().resolve_conj().resolve_neg().contiguous() for _, (_, tensor) in sorted(terms.items())]
    alike = len(set(weights)) == 1 and weights[0] not in (
        0,
        *(sign * 2.0**k for k in range(-60, 60) for sign in (1, -1)),
    )
    flat = _wide(own) if alike else _wide(own) * weights[0]
    for weight, tensor in zip(weights[1:], tensors, strict=True):
        flat = flat + _wide(tensor) if alike else torch.add(flat, _wide(tensor), alpha=weight)
    if alike:
        parts = round(1 / weights[0]) if abs(weights[0]) >= 2**-24 else 0
        flat = flat / parts if parts and 1 / parts == weights[0] else flat * weights[0]
    if own.is_complex():
        return torch.view_as_complex(flat)
    return flat.to(own.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.dtype in HALF else tensor


def averaged_over(graph: nx.DiGraph, inputs: Sequence[torch.Tensor], *, is_weighted: bool) -> list[torch.Tensor]:
    """Each agent's result of a round over a static graph; edge (j, i) carries W[i, j]."""
    results = []
    for rank, own in enumerate(inputs):
        sources = sorted(set(graph.predecessors(rank)) - {rank})
        if is_weighted:
            self_weight = graph.edges[rank, rank].get("weight", 1.0) if graph.has_edge(rank, rank) else 0.0
            terms = {j: (graph.edges[j, rank].get("weight", 1.0), inputs[j]) for j in sources}
        else:
            self_weight = 1.0 / (len(sources) + 1)
            terms = {j: (self_weight, inputs[j]) for j in sources}
        results.append(weighted(own, self_weight, terms))
    return results


def reduced(how: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reduction over all inputs, by ascending rank."""
    dtype = inputs[0].dtype
    in_parts = dtype.is_complex and how in ("sum", "average")
    wide = [torch.view_as_real(one) if in_parts else one.float() if dtype in HALF else one for one in inputs]
    total = wide[0].clone()
    for term in wide[1:]:
        if how in ("sum", "average"):
            total = total + term
        elif how == "product":
            total = total * term
        else:
            total = torch.minimum(total, term) if how == "min" else torch.maximum(total, term)
    if how == "average":
        total = total / len(inputs)
    return torch.view_as_complex(total) if in_parts else total.to(dtype)


def push_pull(
    inputs: Sequence[torch.Tensor],
    self_weights: Sequence[float],
    receive: Sequence[Mapping[int, float]],
    send: Sequence[Mapping[int, float]],
) -> list[torch.Tensor]:
    """Equation 10 of the BlueFog paper: ``receive[i]`` is {source j: r_ij} and ``send[j]`` is {destination i: s_ij}."""
    return [
        weighted(own, self_weights[i], {j: (float(r) * float(send[j][i]), inputs[j]) for j, r in receive[i].items()})
        for i, own in enumerate(inputs)
    ]


def incoming(send: Sequence[Iterable[int]]) -> list[list[int]]:
    """Each agent's senders, given each agent's receivers."""
    return [sorted(j for j, destinations in enumerate(send) if i in destinations) for i in range(len(send))]
