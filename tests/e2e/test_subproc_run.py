"""The example with its agent in processes of its own."""

from pathlib import Path

from real_runs import COMPARED, END_SECONDS, Start, Witness, sides_agree, summary_of


def test_agent_in_processes_of_its_own_trains_and_leaves_none_running(example: Start, run_dir: Path) -> None:
    run = example("total_train_steps=2", "rollout.agent.mode=subproc", "rollout.agent.subproc_max_workers=2", *COMPARED)
    run.wait_for(r"^step 1/2 ")
    agents = [pid for pid, command in run.descendants().items() if "process_pool.fork_server" in command]
    assert len(agents) == 3  # two, and the server that has forked them
    witness = Witness(agents)
    assert run.wait() == 0, run.text
    assert witness.survivors(END_SECONDS) == {}
    summary = summary_of(run_dir)
    assert (summary["steps"], summary["rejections"]) == (2, {})
    assert sides_agree(summary)
