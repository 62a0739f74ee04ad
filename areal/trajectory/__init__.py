"""Conversations as messages and as tokens: what was sampled is remembered exactly, rewarded, and exported to rows.

`tree` places a call: `matching` tells which recorded conversation it continues, `rendering` which ids it adds. `answer`
reads what the engine sampled with the `parsers` of the model, and the tree records it. Once the agent has given its
`rewards`, `export` cuts the tree into rows; `tensors` knows them as the dict that users see.

Refuses to know where tokens come from (the engine) and how a client spells a request (the proxy's dialects).
"""

from areal.trajectory.export import export, nodes_of, transcript
from areal.trajectory.rendering import Renderer
from areal.trajectory.rewards import assign_reward, returns
from areal.trajectory.tree import Tree

__all__ = ["Renderer", "Tree", "assign_reward", "export", "nodes_of", "returns", "transcript"]
