"""A ReAct agent on LangGraph: it asks the model, runs the tools that the model calls, and asks again.

`areal.workflow.math_task` says what a task is and when an answer is right.
"""

from typing import Any

from areal.api.workflow_api import AgentWorkflow
from areal.config.errors import require
from areal.workflow.langchain.math_agent import chat_model
from areal.workflow.math_task import CALCULATOR, load, score_tool_user


class MathToolAgent(AgentWorkflow):
    """Has a calculator; 1.0 if its final answer is right, else 0.0.

    What the model does wrong (no answer within `max_turns` calls, a tool that does not exist, wrong arguments) is a
    wrong answer, not a failed episode.
    """

    def __init__(self, max_turns: int = 4) -> None:
        require(max_turns >= 1, f"max_turns must be >= 1, got {max_turns}")
        self.max_turns = max_turns
        self._errors = load("langgraph.errors", "LangGraph", extra="langgraph")
        load("langchain_openai", "langchain-openai", extra="langgraph")
        self._graph = _react_graph()

    def __reduce__(self) -> Any:
        """A compiled graph cannot be pickled; it is made again where the agent arrives."""
        return type(self), (self.max_turns,)

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        model = chat_model(extra_kwargs).bind_tools(CALCULATOR)
        # The graph counts each node it runs, and a turn is two of them.
        config = {"recursion_limit": 2 * self.max_turns}
        try:
            state = await self._graph.ainvoke({"messages": data["messages"]}, config, context={"model": model})
        except self._errors.GraphRecursionError:
            return 0.0
        return score_tool_user(state["messages"][-1].text, data)


def _react_graph() -> Any:
    """Made once: the model, which differs between episodes, comes with the context of a run."""
    graph = load("langgraph.graph", "LangGraph", extra="langgraph")
    prebuilt = load("langgraph.prebuilt", "LangGraph", extra="langgraph")

    async def ask(state: Any, runtime: Any) -> dict[str, Any]:
        return {"messages": [await runtime.context["model"].ainvoke(state["messages"])]}

    builder = graph.StateGraph(graph.MessagesState, context_schema=dict)
    builder.add_node("ask", ask)
    builder.add_node("tools", prebuilt.ToolNode(CALCULATOR))
    builder.add_edge(graph.START, "ask")
    builder.add_conditional_edges("ask", prebuilt.tools_condition)
    builder.add_edge("tools", "ask")
    return builder.compile()
