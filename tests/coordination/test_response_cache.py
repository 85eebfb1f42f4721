"""The response cache: the same on all agents, bounded, and a bit for each call that is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordination.request import ALL, CallSignature, RequestKey, TransferRequest
from shoal.coordination.response_cache import ResponseCache


def request(name: str, round_: int = 0, members: tuple[int, ...] = ALL, what: str = "") -> TransferRequest:
    return TransferRequest(CallSignature(RequestKey(name, 0, members), "allreduce", what), round_)


def test_a_decided_request_is_cached_for_its_next_round_only() -> None:
    cache = ResponseCache(0, 8)
    assert not cache.knows(request("x"))
    cache.put(request("x", 4))
    assert [cache.knows(request("x", round_)) for round_ in (3, 4, 5, 6)] == [False, False, True, False]
    assert cache.used([request("x").entry]) == [5]
    assert cache.knows(request("x", 6))


def test_another_shape_is_not_cached_and_both_are_once_decided() -> None:
    cache = ResponseCache(0, 8)
    cache.put(request("x", 0, what="[3]"))
    assert not cache.knows(request("x", 1, what="[4]"))
    cache.put(request("x", 1, what="[4]"))
    assert cache.knows(request("x", 2, what="[3]"))
    assert cache.knows(request("x", 2, what="[4]"))


def test_only_requests_of_all_are_ready_in_cache_order() -> None:
    caches = [ResponseCache(rank, 8) for rank in range(3)]
    for cache in caches:
        for name in "abc":
            cache.put(request(name))
    requested = ["cab", "ac", "cba"]
    common = -1
    for cache, names in zip(caches, requested, strict=True):
        common &= cache.vector(request(name, 1) for name in names)
    for cache in caches:
        assert [entry.key.name for entry in cache.ready(common)] == ["a", "c"]
        assert not cache.in_conflict(common, cache.ready(common))


def test_an_agent_outside_a_call_does_not_delay_it() -> None:
    caches = [ResponseCache(rank, 8) for rank in range(3)]
    for cache in caches:
        cache.put(request("pair", members=(0, 2)))
        cache.put(request("all"))
    pair = request("pair", 1, (0, 2))
    common = caches[0].vector([pair]) & caches[1].vector([]) & caches[2].vector([pair])
    assert [entry.key.name for entry in caches[1].ready(common)] == ["pair"]
    common &= caches[2].vector([])
    assert not caches[1].ready(common)


def test_members_that_have_all_requested_and_disagree_are_in_conflict() -> None:
    caches = [ResponseCache(rank, 8) for rank in range(2)]
    for cache in caches:
        cache.put(request("x", 0, what="[3]"))
        cache.put(request("x", 1, what="[4]"))
    one, other = (
        cache.vector([request("x", 2, what=what)]) for cache, what in zip(caches, ("[3]", "[4]"), strict=True)
    )
    assert not caches[0].in_conflict(one & caches[1].vector([]), [])
    assert caches[0].in_conflict(one & other, caches[0].ready(one & other))


def test_the_least_recently_used_entry_is_evicted() -> None:
    cache = ResponseCache(0, 2)
    cache.put(request("a"))
    cache.put(request("b"))
    cache.used([request("a").entry])
    cache.put(request("c"))
    assert len(cache) == 2
    assert cache.knows(request("a", 2))
    assert not cache.knows(request("b", 1))
    assert cache.knows(request("c", 1))


def test_without_capacity_nothing_is_cached() -> None:
    cache = ResponseCache(0, 0)
    cache.put(request("a"))
    assert not len(cache)
    assert not cache.vector([request("a", 1)])


def test_two_overlapping_calls_are_not_ready_as_one() -> None:
    """With one name: each agent has one next round of it."""
    cache = ResponseCache(0, 8)
    cache.put(request("x", members=(0, 1)))
    cache.put(request("x"))
    both = cache.ready((1 << cache.bits) - 1)
    assert [entry.key.members for entry in both] == [(0, 1)]


NAMES = "abcdef"
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from([ALL, (0, 1), (1, 2)]),
        st.sampled_from(["", "[3]", "[4]"]),
        st.booleans(),
    ),
    max_size=40,
)


@given(CHANGES, st.integers(1, 5))
@settings(max_examples=200)
def test_agents_with_equal_decisions_have_the_same_cache(changes: list, capacity: int) -> None:
    caches = [ResponseCache(rank, capacity) for rank in range(3)]
    rounds: dict[RequestKey, int] = {}
    for name, members, what, again in changes:
        entry = CallSignature(RequestKey(name, 0, members), "allreduce", what)
        round_ = rounds[entry.key] = rounds.get(entry.key, -1) + 1
        for cache in caches:
            if again and cache.knows(TransferRequest(entry, round_)):
                assert cache.used([entry]) == [round_]
            else:
                cache.put(TransferRequest(entry, round_))
        assert len({cache.digest for cache in caches}) == 1
        assert len({(len(cache), cache.width, cache.bits) for cache in caches}) == 1
        assert len(caches[0]) <= capacity
        # An entry is foreign to an agent exactly if the agent is no member of it.
        known = [cache.vector([]) & (1 << cache.width) - 1 for cache in caches]
        assert all(cache.ready(known[0] & known[1] & known[2]) == [] for cache in caches)


@pytest.mark.parametrize("change", ["round", "entry", "order"])
def test_a_cache_with_another_history_has_another_digest(change: str) -> None:
    one, other = ResponseCache(0, 8), ResponseCache(1, 8)
    one.put(request("a"))
    one.put(request("b"))
    if change == "order":
        other.put(request("b"))
        other.put(request("a"))
    else:
        other.put(request("a"))
        other.put(request("b", 1) if change == "round" else request("c"))
    assert one.digest != other.digest
