"""Where the time of a step goes: of runs whose every moment is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.observability import breakdown, traces
from shoal.observability.breakdown import COMPUTING, COORDINATION, DATA, KINDS, OTHERS, SUMS, TRANSFER, Share
from shoal.observability.run_report import RunReport
from shoal.observability.trace_writer import FUSED
from support import PROCESS_GROUP, TRANSPORTS
from support.world import World
from support.written_traces import MS, Written, exchange


def shares_of(folder: Path, agents: list[Written]) -> list[Share]:
    for agent in agents:
        agent.into(folder)
    result = traces.read(folder).traces
    return breakdown.break_down(result, traces.match(result))


def into(share: Share) -> dict[str, float]:
    """Milliseconds by kind, without what is nothing."""
    return {kind: share.into[kind] / MS for kind in KINDS if share.into[kind]}


def blamed(share: Share) -> dict[int, float]:
    return {rank: nanoseconds / MS for rank, nanoseconds in share.blamed.items() if nanoseconds}


def test_each_moment_of_a_wait_is_attributed_to_its_cause(tmp_path: Path) -> None:
    """Agent 0 computes until 4 ms.

    Its wait ends at 9 for the sender, at 12 for the first byte, and at 15 for the last byte. It sums until 17, and
    waits for a missing read confirmation until 20.
    """
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 9.0, 12.0, 15.0)
    exchange(agents, 0, 1, 4.0, 5.0)
    agents[0].call(4.0, 20.0, sums=[(15.0, 17.0)])
    agents[0].wait(4.0, 20.0)
    agents[0].step(1, 0.0, 21.0)
    agents[1].call(9.0, 20.0)
    share = shares_of(tmp_path, agents)[0]
    assert into(share) == {COMPUTING: 5.0, OTHERS: 5.0, DATA: 3.0, TRANSFER: 3.0, SUMS: 2.0, COORDINATION: 3.0}
    assert blamed(share) == {1: 5.0}


def test_of_several_messages_the_last_is_the_cause(tmp_path: Path) -> None:
    agents = [Written(rank, 3) for rank in range(3)]
    exchange(agents, 1, 0, 1.0, 2.0)
    exchange(agents, 2, 0, 6.0, 7.0)
    agents[0].call(0.0, 8.0)
    agents[0].wait(0.0, 8.0)
    agents[0].step(1, 0.0, 8.0)
    share = shares_of(tmp_path, agents)[0]
    assert into(share) == {OTHERS: 6.0, DATA: 1.0, COORDINATION: 1.0}
    assert blamed(share) == {2: 6.0}


def test_the_cause_of_a_transitive_wait_is_the_last_agent(tmp_path: Path) -> None:
    """0 waits for 1, which waits for 2 from 3 to 9 and computes before and after."""
    agents = [Written(rank, 3) for rank in range(3)]
    exchange(agents, 2, 1, 9.0, 9.0, name="y")
    exchange(agents, 1, 0, 11.0, 11.0)
    agents[1].call(3.0, 9.0, "y")
    agents[1].wait(3.0, 9.0, "y")
    agents[0].call(1.0, 11.0)
    agents[0].wait(1.0, 11.0)
    for agent in agents:
        agent.step(1, 0.0, 12.0)
    shares = shares_of(tmp_path, agents)
    assert blamed(shares[0]) == {1: 4.0, 2: 6.0} and blamed(shares[1]) == {2: 6.0}


def test_a_missing_read_is_a_cause_like_a_missing_send(tmp_path: Path) -> None:
    """A shared tensor is read in place, so its owner waits until its neighbour has read it.

    The neighbour calls at 7.
    """
    agents = [Written(0), Written(1)]
    exchange(agents, 0, 1, 1.0, 1.0)
    agents[0].call(1.0, 9.0)
    agents[0].wait(1.0, 9.0)
    agents[0].step(1, 0.0, 9.0)
    agents[1].call(7.0, 8.0)
    share = shares_of(tmp_path, agents)[0]
    assert into(share) == {COMPUTING: 1.0, OTHERS: 6.0, COORDINATION: 2.0} and blamed(share) == {1: 6.0}


def test_messages_without_a_tensor_are_coordination_while_in_flight(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    agents[1].message("to", 0, 2.0, **{"for": "coordination"})
    agents[0].message("from", 1, 5.0)
    agents[0].call(0.0, 5.0)
    agents[0].wait(0.0, 5.0)
    agents[0].step(1, 0.0, 5.0)
    assert into(shares_of(tmp_path, agents)[0]) == {OTHERS: 2.0, COORDINATION: 3.0}


def test_stages_are_waited_for_in_sequence(tmp_path: Path) -> None:
    """A message of the second stage is not missing before the first stage has ended."""
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 1.0, 4.0)
    exchange(agents, 1, 0, 5.0, 6.0, stage=1)
    agents[0].call(0.0, 6.0)
    agents[0].wait(0.0, 6.0)
    agents[0].step(1, 0.0, 6.0)
    assert into(shares_of(tmp_path, agents)[0]) == {OTHERS: 2.0, DATA: 4.0}


def test_a_sum_for_any_operation_is_no_waiting(tmp_path: Path) -> None:
    """An agent that waits for one bucket sums another that has arrived."""
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 8.0, 9.0)
    agents[0].call(0.0, 5.0, "other", sums=[(2.0, 5.0)])
    agents[0].call(0.0, 9.0)
    agents[0].wait(0.0, 9.0)
    agents[0].step(1, 0.0, 9.0)
    assert into(shares_of(tmp_path, agents)[0]) == {OTHERS: 5.0, SUMS: 3.0, DATA: 1.0}


def test_copying_before_the_first_message_is_no_computing(tmp_path: Path) -> None:
    agent = Written(0, 1)
    agent.call(2.0, 9.0, prepare=(2.0, 5.0))
    agent.step(1, 0.0, 10.0)
    assert into(shares_of(tmp_path, [agent])[0]) == {COMPUTING: 7.0, SUMS: 3.0}


def test_a_wait_across_two_steps_counts_in_each_with_its_part(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 9.0, 9.0)
    agents[0].call(3.0, 9.0)
    agents[0].wait(3.0, 9.0)
    agents[0].step(1, 0.0, 5.0)
    agents[0].step(2, 5.0, 10.0)
    first, second = shares_of(tmp_path, agents)[:2]
    assert into(first) == {COMPUTING: 3.0, OTHERS: 2.0} and into(second) == {COMPUTING: 1.0, OTHERS: 4.0}


def test_the_thread_with_most_waiting_is_the_training_thread(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 6.0, 6.0)
    agents[0].call(0.0, 6.0)
    agents[0].wait(1.0, 6.0, thread="trainer")
    agents[0].wait(0.0, 1.0, thread="logger")
    agents[0].step(1, 0.0, 6.0)
    assert into(shares_of(tmp_path, agents)[0]) == {COMPUTING: 1.0, OTHERS: 5.0}


def test_a_nested_wait_counts_once(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 6.0, 6.0)
    agents[0].call(0.0, 6.0)
    agents[0].wait(2.0, 4.0)
    agents[0].wait(1.0, 6.0)
    agents[0].step(1, 0.0, 6.0)
    assert into(shares_of(tmp_path, agents)[0]) == {COMPUTING: 1.0, OTHERS: 5.0}


def test_without_steps_the_whole_run_is_analysed(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    exchange(agents, 1, 0, 6.0, 8.0)
    agents[0].call(2.0, 8.0)
    agents[0].wait(2.0, 8.0)
    share = shares_of(tmp_path, agents)[0]
    assert share.number == 0 and into(share) == {OTHERS: 4.0, DATA: 2.0}


def test_with_several_optimizers_the_busiest_ones_steps_count(tmp_path: Path) -> None:
    agent = Written(0, 1)
    agent.call(0.0, 9.0)
    for number in range(3):
        agent.step(number + 1, 3.0 * number, 3.0 * number + 3.0, "generator")
    agent.step(1, 0.0, 9.0, "critic")
    assert [one.number for one in shares_of(tmp_path, [agent])] == [1, 2, 3]


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_call_waits_for_the_fused_message_that_contained_it(tmp_path: Path, is_fused: bool) -> None:
    """The second of two small calls, whose message names the first. This agent may have fused otherwise."""
    agents = [Written(0), Written(1)]
    index = {"calls": 2, "of": [["a", 0, 1], ["b", 0, 1]]}
    for agent in agents if is_fused else agents[1:]:
        row = agent._row(f"exchange: {FUSED}")
        agent._line("B", row, ts=agent._at(0.0), name="neighbor_allreduce x 2", args=index)
        agent._line("E", row, ts=agent._at(8.0))
    output = {"peer": 0, "bytes": 40, "round": 0, "calls": 2, "name": "a"}
    agents[1]._line("i", agents[1]._row(f"exchange: {FUSED}"), ts=agents[1]._at(5.0), name="to 0", s="t", args=output)
    row = agents[0]._row(f"exchange: {FUSED}")
    agents[0]._line("i", row, ts=agents[0]._at(7.0), name="from 1", s="t", args=output | {"peer": 1})
    agents[0].call(1.0, 8.0, "a")
    agents[0].call(1.0, 8.0, "b")
    agents[0].wait(2.0, 7.0, "b")
    agents[0].step(1, 0.0, 8.0)
    share = shares_of(tmp_path, agents)[0]
    assert into(share) == {COMPUTING: 3.0, OTHERS: 3.0, DATA: 2.0}


def test_an_agent_without_a_trace_can_be_a_cause(tmp_path: Path) -> None:
    agent = Written(0)
    agent.message("from", 1, 6.0)
    agent.call(1.0, 6.0)
    agent.wait(1.0, 6.0)
    agent.step(1, 0.0, 6.0)
    share = shares_of(tmp_path, [agent])[0]
    assert into(share) == {COMPUTING: 1.0, OTHERS: 5.0} and blamed(share) == {1: 5.0}


def test_a_failed_call_waited_for_others(tmp_path: Path) -> None:
    agent = Written(0)
    agent.call(1.0, 6.0, error="DeadlineExceeded: they did not come")
    agent.wait(1.0, 6.0)
    agent.step(1, 0.0, 6.0)
    assert into(shares_of(tmp_path, [agent])[0]) == {COMPUTING: 1.0, OTHERS: 5.0}


def test_a_process_group_call_waits_for_requests_then_its_turn_then_its_transfer(
    tmp_path: Path,
) -> None:
    """Headers are exchanged until 2. Agent 1 requests at 3 and agent 2 at 6. Its turn is at 8, and it ends at 12."""
    agents = [Written(rank, 3) for rank in range(3)]
    exchange(agents, 1, 0, 1.0, 2.0)
    for agent, requested in zip(agents, (2.0, 3.0, 6.0), strict=True):
        agent.call(1.0, 14.0, moves=[(requested, 8.0, 12.0)], sums=[(12.0, 14.0)])
        agent.wait(1.0, 14.0)
        agent.step(1, 0.0, 14.0)
    shares = shares_of(tmp_path, agents)
    assert into(shares[0]) == {COMPUTING: 1.0, COORDINATION: 3.0, OTHERS: 4.0, TRANSFER: 4.0, SUMS: 2.0}
    assert blamed(shares[0]) == {2: 4.0} and blamed(shares[2]) == {}


def test_transfers_between_machines_use_one_clock(tmp_path: Path) -> None:
    agents = [Written(0, host="node0"), Written(1, host="node1", ahead=500.0)]
    for k in range(2):
        exchange(agents, k, 1 - k, 1.0, 1.0)
    for agent, requested in zip(agents, (2.0, 5.0), strict=True):
        agent.call(1.0, 9.0, moves=[(requested, 6.0, 9.0)])
        agent.wait(2.0, 9.0)
        agent.step(1, 0.0, 9.0)
    for agent in agents:
        agent.into(tmp_path)
    first, second = RunReport.of(tmp_path).shares
    assert into(first) == {COMPUTING: 2.0, OTHERS: 3.0, COORDINATION: 1.0, TRANSFER: 3.0}
    assert into(second)[TRANSFER] == 3.0 and OTHERS not in into(second)


def test_repeated_names_are_matched_in_the_order_of_sending(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    for at in (1.0, 6.0):
        exchange(agents, 0, 1, at, at + 2.0)
    for agent in agents:
        agent.into(tmp_path)
    result = traces.match(traces.read(tmp_path).traces)
    assert [one.received.at - one.sent.at for one in result] == [2 * MS, 2 * MS]


def test_an_agent_outside_a_transfer_is_not_waited_for(tmp_path: Path) -> None:
    """A call of the same name among other agents, which request it at 6."""
    agents = [Written(rank, 4) for rank in range(4)]
    for rank, requested in enumerate((2.0, 2.0, 6.0, 6.0)):
        pair = [0, 1] if rank < 2 else [2, 3]
        agents[rank].call(1.0, 9.0, moves=[(requested, 7.0, 9.0)], among=pair)
        agents[rank].wait(2.0, 9.0)
        agents[rank].step(1, 0.0, 9.0)
    assert into(shares_of(tmp_path, agents)[0]) == {COMPUTING: 2.0, COORDINATION: 5.0, TRANSFER: 2.0}


def test_computation_in_a_coordination_round_is_coordination(tmp_path: Path) -> None:
    agents = [Written(0), Written(1)]
    for agent in agents:
        agent.call(0.0, 9.0, moves=[(1.0, 6.0, 9.0)])
        agent.call(1.0, 6.0, "coordination", sums=[(2.0, 4.0)], operation="coordination")
        (begins,) = [line for line in agent.lines if line.get("name") == "coordination" and line["ph"] == "B"]
        begins["args"]["name"] = "~coordination"
        agent.wait(1.0, 9.0)
        agent.step(1, 0.0, 9.0)
    assert into(shares_of(tmp_path, agents)[0]) == {COMPUTING: 1.0, COORDINATION: 5.0, TRANSFER: 3.0}


Times = st.lists(st.floats(0.0, 100.0), min_size=4, max_size=4)


@given(calls=st.lists(st.tuples(Times, st.integers(0, 3), st.booleans()), min_size=1, max_size=12))
def test_the_parts_of_a_step_sum_to_its_duration(
    calls: list[tuple[list[float], int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    agents = [Written(0), Written(1)]
    for round_, (times, stage, arrives) in enumerate(calls):
        start, sent, arrived, end = sorted(times)
        exchange(agents, 1, 0, sent, arrived, arrived + 1.0 if arrives else 0.0, round_=round_, stage=stage)
        agents[0].call(start, end, round_=round_, sums=[(arrived, end)])
        agents[0].wait(start, end, round_=round_)
    for number in range(4):
        agents[0].step(number + 1, 25.0 * number, 25.0 * number + 25.0)
    for share in shares_of(tmp_path_factory.mktemp("traces"), agents)[:4]:
        assert sum(share.into.values()) == share.length
        assert all(part >= 0 for part in share.into.values())
        assert sum(share.blamed.values()) == share.into[OTHERS]


def train(steps: int) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = shoal.DecentralizedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(100)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("transport", [*TRANSPORTS, PROCESS_GROUP])
def test_parts_of_real_steps_sum_to_their_duration(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_TIMELINE", str(tmp_path))
    shoal.Fleet(3, transport=transport).run(train, 5)
    result = traces.read(tmp_path).traces
    shares = breakdown.break_down(result, traces.match(result))
    assert [(share.trace, share.number) for share in shares] == [(k, step) for k in range(3) for step in range(1, 6)]
    for share in shares:
        assert sum(share.into.values()) == share.length and share.into[COMPUTING] > 0


def reduce_all(count: int) -> None:
    for _ in range(count):
        shoal.allreduce(torch.ones(1000), name="all")
        shoal.neighbor_allreduce(torch.ones(50_000), name="some")


def test_process_groups_in_a_real_run_are_coordination_and_transfer(tmp_path: Path) -> None:
    with World(4, environment={"SHOAL_TRANSPORT": PROCESS_GROUP, "SHOAL_TIMELINE": str(tmp_path)}) as world:
        world.results(reduce_all, 5)
    report = RunReport.of(tmp_path)
    assert len(report.traces) == 4
    for trace in report.traces:
        for name in ("all", "some"):
            moves = [call.moves for call in trace.calls if call.name == name]
            assert [len(several) for several in moves] == [1] * 5, name
            for (move,) in moves:
                assert move.ordered is not None and move.moved is not None
                assert move.asked <= move.ordered <= move.moved
    for share in report.shares:
        assert share.into[COORDINATION] > 0 and share.into[TRANSFER] > 0 and not share.into[DATA]
    assert all(flow.sent.coordinates for flow in report.flows if flow.sent.key.name.startswith("~"))
