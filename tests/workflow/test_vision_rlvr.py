"""Questions about images without HTTP: the tokens and images that an agent would have caused."""

from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from PIL import Image
from tiny_processor import POSITIONS, TOKENS_PER_IMAGE, data_url, png

from areal.api.errors import WorkflowError
from areal.api.messages import GroupResult
from areal.config.rollout import GenerationHyperparameters
from areal.engine.inference.fake import FakeEngine
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import ArealOpenAI
from areal.rollout.episodes import run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, load
from areal.rollout.runners.workflow import WorkflowRunner
from areal.trajectory.tensors import tensors_of_group
from areal.utils.data import concat_padded_tensors
from areal.utils.hf_utils import load_hf_processor, load_hf_tokenizer
from areal.workflow import VisionRLVRWorkflow

RED, BLUE = png("red"), png("blue")
GCONFIG = GenerationHyperparameters(max_new_tokens=32)
QUESTION = {"type": "text", "text": "What is this?"}
SHOWN = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}, QUESTION]}]


@pytest.fixture(scope="module")
def tokenizer(vision_directory: Path) -> Any:
    return load_hf_tokenizer(vision_directory)


@pytest.fixture
def engine(tokenizer: Any) -> FakeEngine:
    answer = [*tokenizer.encode("a red circle"), tokenizer.eos_token_id]
    return FakeEngine(
        vocab_size=len(tokenizer), max_positions=POSITIONS, script=lambda ids: answer, tokenizer=tokenizer
    )


async def right(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(completion == data.get("answer", "a red circle"))


async def test_row_has_expanded_placeholders_and_its_images(tokenizer: Any, engine: FakeEngine) -> None:
    workflow = VisionRLVRWorkflow(right, GCONFIG, tokenizer)
    row = await workflow.arun_episode(engine, {"messages": SHOWN, "answer": "a red circle"})
    assert row["images"] == [[RED]]
    assert row["input_ids"][0].tolist().count(tokenizer.convert_tokens_to_ids("<image>")) == TOKENS_PER_IMAGE
    assert row["rewards"].tolist() == [1.0]
    assert concat_padded_tensors([row, row])["images"] == [[RED], [RED]]


async def test_prompt_has_the_tokens_that_an_agent_would_cause(
    tokenizer: Any, engine: FakeEngine, vision_directory: Path
) -> None:
    processor = load_hf_processor(vision_directory)
    row = await VisionRLVRWorkflow(right, GCONFIG, tokenizer, processor).arun_episode(engine, {"messages": SHOWN})
    async with ArealOpenAI(engine, tokenizer, gconfig=GCONFIG, processor=processor) as client:
        await client.chat.completions.create(model="m", messages=SHOWN)
        assert row["input_ids"][0].tolist() == client.tree.token_ids(client.tree.completions[0])


async def test_images_come_in_every_shape(tokenizer: Any, engine: FakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "red.png"
    path.write_bytes(RED)
    workflow = VisionRLVRWorkflow(right, GCONFIG, tokenizer)
    place, asked = {"type": "image"}, [{"role": "user", "content": "What is this?"}]
    tasks = [
        {"messages": [{"role": "user", "content": [{**place, "image": source}, QUESTION]}]}
        for source in (RED, data_url(RED), path)
    ]
    tasks += [{"messages": [{"role": "user", "content": [{**place, "url": str(path)}, QUESTION]}]}]
    tasks += [{"messages": [{"role": "user", "content": [place, QUESTION]}], "images": [RED]}]
    tasks += [{"messages": asked, "images": [str(path)]}]
    rows = [await workflow.arun_episode(engine, task) for task in tasks]
    assert all(row["images"] == [[RED]] for row in rows)
    assert len({tuple(row["input_ids"][0].tolist()) for row in rows}) == 1
    drawn = await workflow.arun_episode(engine, {"messages": asked, "images": [Image.new("RGB", (8, 8)), BLUE]})
    assert len(drawn["images"][0]) == 2


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({}, "VisionRLVRWorkflow needs a task with `messages`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"messages\[0\].content\[0\] must hold"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "must be text, image or image_url"),
        ({"messages": [{"role": "user", "content": "x"}], "images": ["https://a/b.png"]}, "nothing is downloaded"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": [RED, BLUE]},
            "a place for each of its images, got 2 images and 1 parts",
        ),
        ({"messages": [{"role": "system", "content": "x"}], "images": [RED]}, "must have a user's message"),
    ],
)
async def test_task_that_cannot_be_shown_is_refused(
    tokenizer: Any, engine: FakeEngine, task: dict[str, Any], says: str
) -> None:
    with pytest.raises(WorkflowError, match=says):
        await VisionRLVRWorkflow(right, GCONFIG, tokenizer).arun_episode(engine, task)


async def test_task_without_images_is_served_too(tokenizer: Any, engine: FakeEngine) -> None:
    workflow = VisionRLVRWorkflow(right, GCONFIG, tokenizer)
    row = await workflow.arun_episode(engine, {"messages": [{"role": "user", "content": "Hello"}]})
    assert row["images"] == [[]]


def test_model_without_a_processor_is_refused() -> None:
    class Blind:
        name_or_path = ""

    with pytest.raises(WorkflowError, match="needs the processor of a model that takes images"):
        VisionRLVRWorkflow(right, GCONFIG, Blind())


async def test_config_fills_the_processor_and_the_workflow_travels(
    vision_directory: Path, tokenizer: Any, engine: FakeEngine
) -> None:
    fillers = Fillers(GCONFIG, str(vision_directory), processor=str(vision_directory))
    made = load(WorkflowSpec(VisionRLVRWorkflow, {"reward_fn": right}), fillers)
    travelled = cloudpickle.loads(cloudpickle.dumps(made))
    row = await travelled.arun_episode(engine, {"messages": SHOWN})
    assert row["images"] == [[RED]]


async def test_episode_keeps_images_on_its_way_to_the_trainer(tokenizer: Any, engine: FakeEngine) -> None:
    runner = WorkflowRunner(VisionRLVRWorkflow(right, GCONFIG, tokenizer), engine, tokenizer)
    episode, digests = await run_episode(runner, {"messages": SHOWN}, WorkflowContext(), greedy=False, seconds=60)
    assert [row.images for row in episode.rows] == [[RED]]
    assert tensors_of_group(GroupResult(0, [episode, episode], [], digests))["images"] == [[RED], [RED]]
    assert f"<image>×{TOKENS_PER_IMAGE}What is this?" in episode.messages[0]["content"]
