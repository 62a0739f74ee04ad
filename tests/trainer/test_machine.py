"""The facts of a machine that decide what training computes to the bit."""

import json

from areal.trainer.machine import DECISIVE, differences, machine_facts


def test_a_machine_is_like_itself_after_its_facts_were_stored() -> None:
    facts = machine_facts("cpu", 2)
    assert differences(json.loads(json.dumps(facts)), facts) == []
    assert set(DECISIVE) <= facts.keys()
    assert facts["device"] == "cpu"


def test_what_decides_and_differs_is_named_and_nothing_else() -> None:
    facts = machine_facts("cpu", 2)
    other = {**facts, "host": "another", "cpu": "Foreign 9000"}
    assert differences(other, facts) == [f"cpu: Foreign 9000, here {facts['cpu']}"]
    assert differences({"threads": 1}, facts) == ["threads: 1, here 2"]
