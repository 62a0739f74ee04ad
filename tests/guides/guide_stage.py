"""What the guides' agents and workflows run on: the real proxy, and a policy that says what a test wants."""

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from areal.api.messages import Episode, Rejection
from areal.config.rollout import AgentConfig, GenerationHyperparameters
from areal.engine.builtin.tokenizer import make_tokenizer
from areal.engine.inference.fake import FakeEngine
from areal.infra import workflow_context
from areal.infra.workflow_context import WorkflowContext
from areal.proxy import Proxy
from areal.rollout.episodes import Runner, run_episode
from areal.rollout.loading import Fillers, WorkflowSpec, is_rollout_workflow, load
from areal.rollout.runners.agent import AgentRunner
from areal.rollout.runners.subprocess import AgentPool, PackedAgent, SubprocessRunner
from areal.rollout.runners.workflow import WorkflowRunner
from areal.utils.hf_utils import load_hf_tokenizer

MAX_POSITIONS = 2048
TASK: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 7 + 5?"}], "answer": "12"}


@dataclass
class GuideStage:
    tokenizer: Any
    engine: FakeEngine
    proxy: Proxy
    pool: AgentPool
    gconfig: GenerationHyperparameters
    reward_fn: str = ""
    prompts: list[str] = field(default_factory=list)

    async def play(self, workflow: Any, task: dict[str, Any] = TASK, **agent: Any) -> Episode | Rejection:
        """One episode of what a user passes to `trainer.train`; `agent` are settings of `rollout.agent`."""
        config = AgentConfig(**agent)
        runner = await self._away(workflow, config) if config.mode == "subproc" else self._here(workflow, config)
        outcome, _ = await run_episode(runner, dict(task), WorkflowContext(task_id=1), greedy=False, seconds=60)
        return outcome

    def _here(self, workflow: Any, config: AgentConfig) -> Runner:
        made = load(WorkflowSpec(workflow), Fillers(self.gconfig, self.tokenizer, self.reward_fn))
        if is_rollout_workflow(made):
            return WorkflowRunner(made, self.engine, self.tokenizer)
        return AgentRunner(made, self.proxy, config, self.gconfig)

    async def _away(self, workflow: Any, config: AgentConfig) -> Runner:
        parcel = PackedAgent(WorkflowSpec(workflow).pack(), Fillers(self.gconfig, ""))
        runner = SubprocessRunner("agent", parcel, self.pool, self.proxy, config, self.gconfig)
        await runner.prepare()
        return runner


@asynccontextmanager
async def guide_stage(
    answer: Callable[[str], str] = lambda prompt: "12", reward_fn: str = ""
) -> AsyncIterator[GuideStage]:
    """`answer` says what the policy makes of a prompt's text."""
    with tempfile.TemporaryDirectory() as place:  # episodes get tokenizers as the loader makes them
        make_tokenizer(["What is 7 + 5? It is 12. That is wrong, try again."], 320, MAX_POSITIONS).save_pretrained(
            place
        )
        tokenizer = load_hf_tokenizer(place)
    prompts: list[str] = []

    def script(ids: Sequence[int]) -> Sequence[int]:
        prompts.append(tokenizer.decode(ids))
        return [*tokenizer.encode(answer(prompts[-1])), tokenizer.eos_token_id]

    engine = FakeEngine(vocab_size=len(tokenizer), max_positions=MAX_POSITIONS, script=script, tokenizer=tokenizer)
    gconfig = GenerationHyperparameters(max_new_tokens=64)
    proxy = Proxy(engine, tokenizer, gconfig=gconfig, max_positions=MAX_POSITIONS)
    pool = AgentPool(1)
    await proxy.start()
    try:
        yield GuideStage(tokenizer, engine, proxy, pool, gconfig, reward_fn, prompts)
    finally:
        await pool.aclose()
        await proxy.aclose()
        await workflow_context.close_clients()
