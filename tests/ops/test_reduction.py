"""All-reduces by every algorithm: the same bits as a fold in rank order, however the numbers are split."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import shoal
from shoal.ops import reduction
from shoal.runtime.agent import Agent, current
from support.limits import scaled
from support.reference import reduced, same_bits
from support.samples import sample, samples

Fleets = Callable[..., shoal.Fleet]
NUMELS = [1, 7, 1000, 5001, 300_001]
"""Around what travels inside a message, and above a block of a sum."""


@pytest.fixture
def owned_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Sequence[int]], Sequence[int]]], None]:
    """Says which of a group own the numbers, instead of what their count would pay for."""

    def set_owners(owners: Callable[[Sequence[int]], Sequence[int]]) -> None:
        def of(agent: Agent, group: Sequence[int], nbytes: int) -> Sequence[int]:
            return owners(group)

        monkeypatch.setattr(reduction, "owners_of", of)

    return set_owners


@pytest.mark.links("an engine sums in an order of its own")
@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_any_number_of_owners_gives_the_bits_of_the_sum_in_rank_order(
    fleet: Fleets, owned_by: Callable[..., None], size: int
) -> None:
    def run() -> list[torch.Tensor]:
        return [shoal.allreduce(sample(shoal.rank(), (numel,)), False) for numel in NUMELS]

    expected = [reduced("sum", samples(size, (numel,))) for numel in NUMELS]
    for count in range(1, size + 1):
        owned_by(lambda group, count=count: group[-count:])
        for result in fleet(size).run(run):
            assert all(map(same_bits, result, expected)), count


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int64], ids=str)
@pytest.mark.parametrize("how", ["sum", "product"])
def test_the_bits_of_every_dtype_are_independent_of_the_owner(
    fleet: Fleets, owned_by: Callable[..., None], how: str, dtype: torch.dtype
) -> None:
    """Also for a product of complex numbers, which torch rounds depending on the memory position."""

    def run() -> torch.Tensor:
        return shoal.allreduce(sample(shoal.rank(), (5001,), dtype), op=how)

    results = []
    for count in (1, 2, 4):
        owned_by(lambda group, count=count: group[:count])
        results += fleet(4).run(run)
    assert all(same_bits(one, results[0]) for one in results)


@pytest.mark.links("with an engine all own a share, of what it does not sum itself")
def test_the_number_of_owners_grows_with_the_tensor_up_to_the_number_of_agents(fleet: Fleets) -> None:
    def run() -> list[int]:
        agent = current()
        return [len(reduction.owners_of(agent, range(8), 1 << power)) for power in range(34)]

    for counts in fleet(8).run(run):
        assert counts[0] == 1
        assert counts == sorted(counts)
        assert counts[-1] == 8


def test_owners_are_ranks_of_the_group_in_order(fleet: Fleets) -> None:
    def run() -> bool:
        agent = current()
        group = [1, 3, 4, 6, 7]
        return all(
            list(reduction.owners_of(agent, group, 1 << power)) == sorted(set(owners) & set(group))
            for power in range(34)
            for owners in [reduction.owners_of(agent, group, 1 << power)]
        )

    assert all(fleet(8).run(run))


@pytest.mark.links("an engine moves it")
def test_a_small_tensor_takes_two_messages_for_each_agent_but_one(fleet: Fleets) -> None:
    """To its owner and back, for any number of agents: not one message for each pair."""

    def run() -> int:
        shoal.allreduce(torch.ones(2))
        sent = []
        stop = shoal.observability.events().subscribe(
            lambda event: sent.append(event) if event.kind == "sent" else None
        )
        shoal.allreduce(torch.ones(2))
        stop()
        return len(sent)

    assert sum(fleet(8).run(run)) == 2 * 7


@pytest.mark.parametrize("numel", [3, 9000, 3_000_000], ids=["inline", "region", "shares"])
@pytest.mark.parametrize("odd", [0, 1, 3])
def test_one_shape_of_four_that_differs_ends_all_calls_and_sums_nothing(fleet: Fleets, numel: int, odd: int) -> None:
    def run() -> tuple[int, ...]:
        out = torch.zeros(numel + (shoal.rank() == odd))
        began = time.monotonic()
        with pytest.raises(shoal.Mismatch) as caught:
            shoal.allreduce(torch.ones_like(out), out=out)
        assert time.monotonic() - began < scaled(5)
        assert not out.any()
        shoal.allreduce(torch.ones(3), name="after")
        return caught.value.ranks

    results = fleet(4).run(run)
    assert any(odd in ranks for ranks in results), results


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, 3_000_000], ids=["one owner", "all own"])
def test_all_agents_name_only_the_absent_agent(fleet: Fleets, numel: int) -> None:
    """So do agents that wait only for the message of an owner that itself waits."""
    done, started, ended = threading.Event(), threading.Barrier(3), threading.Barrier(3)

    def run() -> tuple[int, ...]:
        if shoal.rank() == 2:
            assert done.wait(scaled(15))
            return (2,)
        x = torch.ones(numel)
        started.wait()  # an agent that begins when others have given up is late itself
        with pytest.raises(shoal.DeadlineExceeded) as caught:
            shoal.allreduce(x, name="x", timeout=scaled(1.0))
        ended.wait()
        done.set()
        return caught.value.ranks

    assert fleet(4).run(run) == [(2,)] * 4


def by_machine(how: str, inputs: Sequence[torch.Tensor], machines: Sequence[Sequence[int]]) -> torch.Tensor:
    """Each machine's reduction, and the reduction of those; the sum of an average is divided once."""
    folded = "sum" if how == "average" else how
    full = reduced(folded, [reduced(folded, [inputs[rank] for rank in ranks]) for ranks in machines])
    return full / len(inputs) if how == "average" else full


@pytest.mark.links("an engine sums in an order of its own")
@pytest.mark.parametrize(("machines", "per_machine"), [(2, 2), (3, 2), (2, 3), (4, 2)])
def test_large_tensors_are_reduced_machine_by_machine(fleet: Fleets, machines: int, per_machine: int) -> None:
    """And small ones at once, with the same bits: alone, in a group, or with whatever is in flight."""
    size, numel = machines * per_machine, reduction.BY_MACHINES_BYTES // 4 + 1
    kinds, cuts = ("sum", "average", "min", "max"), [5, 4000, 40_000, numel - 44_005]

    def run() -> list[torch.Tensor]:
        x = sample(shoal.rank(), (numel,))
        given, results = x.clone(), []
        for how in kinds:
            pieces = torch.split(x, cuts)
            results += [shoal.allreduce(x, op=how), *(shoal.allreduce(piece, op=how) for piece in pieces)]
            handles = [shoal.nonblocking.allreduce(piece, op=how) for piece in pieces]
            results += [handle.wait() for handle in handles] + shoal.grouped_allreduce(list(pieces), op=how)
        assert same_bits(x, given)
        return results

    grouping = [range(machine * per_machine, (machine + 1) * per_machine) for machine in range(machines)]
    x, expected = samples(size, (numel,)), []
    for how in kinds:
        full = by_machine(how, x, grouping)
        expected += [full, *3 * torch.split(full, cuts)]
    assert not same_bits(expected[0], reduced("sum", x))  # so the order can be told
    for result in fleet(size, agents_per_machine=per_machine).run(run):
        assert [same_bits(*pair) for pair in zip(result, expected, strict=True)] == [True] * len(expected)


@pytest.mark.links("an engine sums in an order of its own")
def test_a_group_is_reduced_by_machine_if_it_has_equally_many_agents_on_each(fleet: Fleets) -> None:
    shape = (reduction.BY_MACHINES_BYTES // 8, 2)
    uneven, even = [0, 2, 3, 4, 5, 6, 7], [0, 1, 6, 7]

    def run() -> list[torch.Tensor]:
        rank = shoal.rank()
        results = [
            shoal.allreduce(sample(rank, shape), False, group=group) for group in (uneven, even) if rank in group
        ]
        half = sample(rank, shape, torch.bfloat16)
        return [*results, shoal.allreduce(torch.cat([half, half]), False)]

    x, half = samples(8, shape), samples(8, shape, torch.bfloat16)
    of_seven, of_four = reduced("sum", [x[rank] for rank in uneven]), by_machine("sum", x, [(0, 1), (6, 7)])
    of_half = reduced("sum", [torch.cat([one, one]) for one in half])  # it would be rounded a second time
    for rank, result in enumerate(fleet(8, agents_per_machine=2).run(run)):
        expected = [one for one, group in ((of_seven, uneven), (of_four, even)) if rank in group] + [of_half]
        assert [same_bits(*pair) for pair in zip(result, expected, strict=True)] == [True] * len(expected), rank


@pytest.mark.parametrize("other", [1, 2], ids=["beside it", "on another machine"])
def test_a_shape_that_differs_on_one_machine_is_a_mismatch_and_the_next_call_works(fleet: Fleets, other: int) -> None:
    numel = reduction.BY_MACHINES_BYTES // 4

    def run() -> str:
        differs = shoal.rank() >= other if other == 2 else shoal.rank() == other
        try:
            shoal.allreduce(torch.ones((2, numel // 2) if differs else (4, numel // 4)), name="differs")
        except shoal.Mismatch as error:
            message = str(error)
        else:
            message = ""
        shoal.barrier()
        assert shoal.allreduce(torch.ones(numel)).eq(1.0).all()
        return message

    for output in fleet(4, agents_per_machine=2).run(run):
        assert "'differs'" in output and ("shape" in output or "list of tensors" in output), output
