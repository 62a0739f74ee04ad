import dspy
from dspy.utils.exceptions import AdapterParseError


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


class DspyAgent:
    async def run(self, data, base_url, api_key):
        solve = dspy.ReAct("question -> answer", tools=[add], max_iters=3)
        model = dspy.LM("openai/default", api_base=base_url, api_key=api_key, cache=False)
        try:
            with dspy.context(lm=model):
                solved = await solve.acall(question=data["messages"][-1]["content"])
        except AdapterParseError:
            return 0.0
        return float(solved.answer == data["answer"])
