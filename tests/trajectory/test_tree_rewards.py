import math

import numpy as np
import pytest
import torch

from areal.api.errors import NoInteractions, RewardInvalid
from areal.trajectory import assign_reward, export, returns, transcript


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture
def chain(talk):
    """A → B → C"""
    chat = talk("chatml")
    messages = [user("q")]
    for answer in "ABC":
        chat.say(messages, answer)
        messages = [*messages, assistant(answer), user("next")]
    return chat


def ids(chat):
    return [completion.id for completion in chat.tree.completions]


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (np.bool_(True), 1.0),
        (torch.tensor(0.75), 0.75),
    ],
)
def test_number_goes_to_the_last_completion(chain, given, value):
    assign_reward(chain.tree, given, "MyAgent")
    assert [node.reward for node in chain.tree.completions] == [None, None, value]
    assert chain.tree.reward == value


def test_number_goes_to_the_choice_that_the_response_is_named_after(talk):
    chat = talk("chatml")
    for choice in range(3):
        chat.say([user("q")], "x", choice=choice)
    assign_reward(chat.tree, 1.0, "MyAgent")
    assert [node.reward for node in chat.tree.completions] == [1.0, None, None]


def test_dict_goes_to_the_completions_it_names(chain):
    a, _, c = ids(chain)
    assign_reward(chain.tree, {a: 0.5, c: torch.tensor(1.0)}, "MyAgent")
    assert [node.reward for node in chain.tree.completions] == [0.5, None, 1.0]


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        math.inf,
        "1.0",
        "",
        [1.0],
        np.array([1.0]),
        torch.tensor([1.0]),
        {},
        {"unknown": 1.0},
        {7: 1.0},
        1j,
        10**400,
        pytest.param(10**5000, id="an integer of 5001 digits"),
        1e308,
        -1e308,
        3.5e38,
        np.float64(1e300),
        torch.tensor(-1e300, dtype=torch.float64),
    ],
)
def test_what_is_no_reward_is_refused_naming_agent_and_value(chain, bad):
    with pytest.raises(RewardInvalid, match="MyAgent"):
        assign_reward(chain.tree, bad, "MyAgent")
    assert [node.reward for node in chain.tree.completions] == [None, None, None]


@pytest.mark.parametrize("largest", [3.4028234663852886e38, -3.4028234663852886e38])
def test_largest_reward_is_what_float32_holds(chain, largest):
    assign_reward(chain.tree, largest, "MyAgent")
    rows = export(chain.tree, "individual", 1.0)
    assert all(np.isfinite(row.returns).all() for row in rows)
    with pytest.raises(RewardInvalid, match=r"at most 3.4e\+38 in size .*got float -?3.41e\+38 from MyAgent; scale"):
        assign_reward(chain.tree, math.copysign(3.41e38, largest), "MyAgent")


def test_rewards_that_add_up_to_more_than_float32_holds_are_refused_as_a_whole(chain):
    a, b, c = ids(chain)
    with pytest.raises(RewardInvalid, match=r"must add up to at most 3.4e\+38 .*got 6e\+38 from MyAgent; scale"):
        assign_reward(chain.tree, {a: 3e38, c: -3e38}, "MyAgent")
    assert chain.tree.reward == 0
    assign_reward(chain.tree, {a: 3e38}, "MyAgent")
    with pytest.raises(RewardInvalid, match="must add up"):
        assign_reward(chain.tree, {b: 3e38}, "MyAgent")
    assign_reward(chain.tree, {a: 1e38, b: 1e38, c: 1e38}, "MyAgent")
    for style in ("individual", "concat"):
        assert all(np.isfinite(row.returns).all() for row in export(chain.tree, style, 1.0))


@pytest.mark.parametrize("bad", [math.nan, None, "x", 1e308, -(10**39)])
def test_dict_with_one_bad_value_gives_nothing(chain, bad):
    a, b, _ = ids(chain)
    with pytest.raises(RewardInvalid, match=b):
        assign_reward(chain.tree, {a: 1.0, b: bad}, "MyAgent")
    assert chain.tree.completions[0].reward is None


@pytest.mark.parametrize("reward", [1.0, {"x": 1.0}, math.nan])
def test_reward_without_a_finished_call_means_no_interactions(talk, reward):
    with pytest.raises(NoInteractions, match="MyAgent"):
        assign_reward(talk("chatml").tree, reward, "MyAgent")


def test_reward_flows_back_discounted(chain):
    assign_reward(chain.tree, 1.0, "MyAgent")
    assert returns(chain.tree, 0.9) == pytest.approx([0.81, 0.9, 1.0])


def test_own_reward_adds_to_what_comes_later(talk):
    chat = talk("chatml")
    chat.say([user("q")], "A")
    chat.say([user("q"), assistant("A"), user("n")], "B")
    a, b = ids(chat)
    assign_reward(chat.tree, {a: 0.5, b: 1.0}, "MyAgent")
    assert returns(chat.tree, 1.0) == [1.5, 1.0]


def test_children_pay_their_mean_and_siblings_nothing(talk):
    chat = talk("chatml")
    chat.say([user("q")], "A")
    for answer in ("B", "C"):
        chat.say([user("q"), assistant("A"), user("n")], answer)
    chat.say([user("elsewhere")], "D")
    _, b, _, _ = ids(chat)
    assign_reward(chat.tree, {b: 1.0}, "MyAgent")
    assert returns(chat.tree, 0.5) == [0.25, 1.0, 0.0, 0.0]


def test_credit_passes_a_template_that_rewrites_the_past(talk):
    chat = talk("qwen3")
    thought = "<think>\nhm\n</think>\n\nA"
    chat.say([user("q")], thought)
    chat.say([user("q"), assistant(thought), user("n")], "B")
    assign_reward(chat.tree, 1.0, "MyAgent")
    assert chat.tree.rewrites == 1
    assert returns(chat.tree, 0.5) == [0.5, 1.0]


def test_individual_rows_train_one_completion_each(chain):
    assign_reward(chain.tree, 1.0, "MyAgent")
    rows = export(chain.tree, "individual", 0.9)
    for row, node in zip(rows, chain.tree.completions, strict=True):
        sampled = row.loss_mask
        assert row.input_ids[sampled].tolist() == node.output_ids.tolist()
        assert sampled[-len(node.output_ids) :].all()
        assert (row.completion_index[sampled] == node.index).all()
        assert (row.versions[sampled] == node.index).all()
        assert np.allclose(row.returns[sampled], [0.81, 0.9, 1.0][node.index])
        assert np.allclose(row.logprobs[sampled], -0.5 - node.index)
        for array, prompt_value in ((row.versions, -1), (row.logprobs, 0), (row.returns, 0), (row.temperatures, 1)):
            assert (array[~sampled] == prompt_value).all()
    assert [row.reward for row in rows] == [0.0, 0.0, 1.0]


def test_concat_row_keeps_each_completions_own_return(chain):
    assign_reward(chain.tree, 1.0, "MyAgent")
    (row,) = export(chain.tree, "concat", 0.9)
    assert row.input_ids.tolist() == chain.tree.token_ids(chain.tree.completions[-1])
    for node, total in zip(chain.tree.completions, (0.81, 0.9, 1.0), strict=True):
        assert np.allclose(row.returns[row.completion_index == node.index], total)
    assert row.reward == 1.0


def test_completion_on_two_leaves_is_trained_in_the_first(talk):
    chat = talk("chatml")
    chat.say([user("q")], "A")
    for answer in ("B", "C"):
        chat.say([user("q"), assistant("A"), user("n")], answer)
    first, second = export(chat.tree, "concat", 1.0)
    assert set(first.completion_index[first.loss_mask].tolist()) == {0, 1}
    assert set(second.completion_index[second.loss_mask].tolist()) == {2}
    assert (second.versions[~second.loss_mask] == -1).all()
    assert second.input_ids.tolist() == chat.tree.token_ids(chat.tree.completions[2])


def test_temperature_is_recorded_per_sampled_token(talk):
    chat = talk("chatml")
    chat.say([user("q")], "A", temperature=0.7)
    chat.say([user("q"), assistant("A"), user("n")], "B", temperature=0.2)
    (row,) = export(chat.tree, "concat", 1.0)
    assert np.allclose(row.temperatures[row.completion_index == 0], 0.7)
    assert np.allclose(row.temperatures[row.completion_index == 1], 0.2)


def test_truncation_is_the_stop_reasons_word(talk):
    chat = talk("chatml")
    chat.say([user("q")], chat.ids("cut"), stop_reason="length")
    chat.say([user("q")], "whole")
    assert [row.truncated for row in export(chat.tree, "individual", 1.0)] == [True, False]


def test_unknown_style_is_refused(chain):
    with pytest.raises(ValueError, match="individual or concat"):
        export(chain.tree, "rows", 1.0)


def test_weight_digests_are_gathered(chain):
    assert chain.tree.digests == {0: "digest 0", 1: "digest 1", 2: "digest 2"}


def test_transcript_is_the_longest_conversation_with_its_rewards(chain):
    chain.say([user("aside")], "D")
    a, _, c, _ = ids(chain)
    assign_reward(chain.tree, {a: 0.5, c: 1.0}, "MyAgent")
    shown = [(message["content"], message.get("reward")) for message in transcript(chain.tree)]
    assert shown == [("q", None), ("A", 0.5), ("next", None), ("B", None), ("next", None), ("C", 1.0)]


def test_transcript_of_nothing_is_empty(talk):
    assert transcript(talk("chatml").tree) == []
