"""The search agent's world, its index, its reward and its episodes, on the real proxy."""

import json
import re
import sqlite3
from typing import Any

import cloudpickle
import pytest

from areal.api.errors import ConfigError, WorkflowError
from examples.search_agent import agent as search_agent
from examples.search_agent import corpus
from examples.search_agent.agent import NOTHING, UNCITED, SearchAgent, SearchIndex, query_of, score, shown
from examples.search_agent.corpus import Document, Question
from examples.search_agent.warm_up import lessons

INDEX = SearchIndex(corpus.documents())
ONE_STEP = next(each for each in corpus.questions("test") if len(each.evidence) == 1)
TWO_STEPS = next(each for each in corpus.questions("test") if len(each.evidence) == 2)


def call(query: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {json.dumps({"query": query})}}}\n</tool_call>'


def cited(question: Question) -> str:
    return " ".join([question.answer, *(f"[{number}]" for number in question.evidence)])


def well_played(question: Question) -> Any:
    """A model that searches as the question's own plan says, and then answers."""

    def answer(prompt: str) -> str:
        done = prompt.count("<|im_start|>tool\n")
        return call(question.searches[done]) if done < len(question.searches) else cited(question)

    return answer


def test_world_is_always_the_same_and_its_documents_have_a_number_each() -> None:
    written = corpus.documents()
    assert len({document.number for document in written}) == len(written) == 3 * corpus.PEOPLE
    corpus.people.cache_clear()
    assert corpus.documents() == written


def test_splits_share_no_person() -> None:
    about = [{question.about for question in corpus.questions(split)} for split in ("train", "test")]
    assert not about[0] & about[1]
    assert len(about[0]) + len(about[1]) == corpus.PEOPLE
    assert min(map(len, about)) > 30


def test_evidence_of_every_question_is_found_by_its_searches_and_says_the_answer() -> None:
    texts = {document.number: document.text for document in corpus.documents()}
    for question in [*corpus.questions("train"), *corpus.questions("test")]:
        for query, number in zip(question.searches, question.evidence, strict=True):
            assert number in [document.number for document in INDEX.search(query)]
        assert texts[question.evidence[-1]].endswith(f" {question.answer}")
        assert question.about in texts[question.evidence[0]]


def test_search_ranks_by_words_and_knows_their_stems() -> None:
    index = SearchIndex(
        [Document(1, "Mira lives in Oslo"), Document(2, "Mira likes tea"), Document(3, "Ben likes jazz")]
    )
    assert [document.number for document in index.search("Where does MIRA live?")] == [1, 2]
    assert {document.number for document in index.search("mira", limit=5)} == {1, 2}


@pytest.mark.parametrize(
    "query", ["", "  ?! ", '"', "NEAR(", 'a" OR "b', "text:Mira*", "-", "\x00", "' ; DROP TABLE documents"]
)
def test_any_query_is_searched_as_words_and_never_as_an_expression(query: str) -> None:
    index = SearchIndex([Document(1, "Mira lives in Oslo")])
    assert [document.number for document in index.search(query)] == ([1] if "Mira" in query else [])
    assert index.search("oslo")


def test_sqlite_without_full_text_search_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def execute(self, sql: str) -> None:
            raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(search_agent.sqlite3, "connect", lambda *args, **kwargs: Without())
    with pytest.raises(WorkflowError, match=r"no full-text search \(no such module: fts5\); use one with FTS5"):
        SearchIndex([])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("Oslo [12] [34]", 1.0),
        ("[34][12] Oslo.", 1.0),
        ("Oslo [12]", UNCITED),
        ("Oslo [12] [34] [56]", UNCITED),
        ("Oslo", UNCITED),
        ("Rome [12] [34]", 0.0),
        ("Oslo or Rome [12] [34]", 0.0),
        ("[12] [34]", 0.0),
        (f"Oslo [{'1' * 5000}]", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_for_the_answer_and_exactly_its_evidence(text: str, reward: float) -> None:
    assert score(text, {12, 34, 56}, "Oslo", [12, 34]) == reward


def test_evidence_that_was_never_seen_is_not_cited_but_guessed() -> None:
    assert score("Oslo [12] [34]", {12}, "Oslo", [12, 34]) == UNCITED


@pytest.mark.parametrize(
    ("arguments", "query"),
    [
        ('{"query": "x y"}', "x y"),
        ('{"query": 3}', None),
        ("{}", None),
        ("[1]", None),
        ("{broken", None),
        ("[" * 100_000, None),
        ("1" * 5000, None),
    ],
)
def test_only_a_text_can_be_searched_for(arguments: str, query: str | None) -> None:
    assert query_of(arguments) == query


@pytest.mark.parametrize("question", [ONE_STEP, TWO_STEPS], ids=["one search", "two searches"])
async def test_agent_searches_reads_and_is_paid_for_a_cited_answer(stage: Any, question: Question) -> None:
    async with stage(well_played(question)) as s:
        assert await SearchAgent().run(question.as_task(), **s.kwargs()) == 1.0
        s.check_one_conversation(len(question.searches) + 1)
        s.check_tokens()
        results = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", s.speaker.prompts[-1], re.DOTALL)
        assert results == [shown(INDEX.search(query)) for query in question.searches]


async def test_agent_shows_the_model_exactly_the_tools_it_was_taught(stage: Any, tokenizer: Any) -> None:
    task = ONE_STEP.as_task()
    async with stage(lambda prompt: "Oslo") as s:
        await SearchAgent().run(task, **s.kwargs())
        taught = tokenizer.apply_chat_template(
            task["messages"], tools=search_agent.TOOLS, tokenize=False, add_generation_prompt=True
        )
        assert s.speaker.prompts == [taught]


@pytest.mark.parametrize(
    ("said", "calls"),
    [
        (call("nobody"), 3),
        (call("x").replace("search", "find"), 1),
        (call("x").replace('"query"', '"words"'), 1),
        ("", 1),
    ],
    ids=["never answers", "another tool", "other arguments", "nothing"],
)
async def test_what_the_model_does_wrong_is_a_wrong_answer(stage: Any, said: str, calls: int) -> None:
    async with stage(lambda prompt: said) as s:
        assert await SearchAgent(max_turns=3).run(ONE_STEP.as_task(), **s.kwargs()) == 0.0
        assert len(s.session.tree.completions) == calls


async def test_right_guess_without_a_search_earns_little(stage: Any) -> None:
    async with stage(lambda prompt: cited(ONE_STEP)) as s:
        assert await SearchAgent().run(ONE_STEP.as_task(), **s.kwargs()) == UNCITED


async def test_search_that_finds_nothing_says_so(stage: Any) -> None:
    async with stage(lambda prompt: "?" if NOTHING in prompt else call("zzz")) as s:
        assert await SearchAgent().run(ONE_STEP.as_task(), **s.kwargs()) == 0.0
        assert f"<|im_start|>tool\n{NOTHING}<|im_end|>" in s.speaker.prompts[-1]


async def test_agent_travels_by_cloudpickle(stage: Any) -> None:
    agent = cloudpickle.loads(cloudpickle.dumps(SearchAgent(max_turns=2)))
    async with stage(well_played(ONE_STEP)) as s:
        assert await agent.run(ONE_STEP.as_task(), **s.kwargs()) == 1.0


def test_less_than_one_turn_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_turns must be >= 1, got 0"):
        SearchAgent(max_turns=0)


def test_lessons_are_of_training_questions_and_would_earn_the_whole_reward() -> None:
    asked = {question.text: question for question in corpus.questions("train")}
    taught = lessons()
    assert {each["messages"][0]["content"] for each in taught} == asked.keys()
    for each in taught:
        question = asked[each["messages"][0]["content"]]
        shown_numbers = re.findall(r"\[(\d+)\]", "".join(m["content"] for m in each["messages"] if m["role"] == "tool"))
        answer = each["messages"][-1]["content"]
        assert score(answer, set(map(int, shown_numbers)), question.answer, question.evidence) == 1.0
