"""Conversations as messages and as tokens: what was sampled is remembered exactly, rewarded, and exported to rows.

Owns the tree of completions of one session, the rendering of messages to token ids, the reading of token ids back into
messages. Refuses to know where tokens come from (the engine) and how a client spells a request (the proxy's dialects).
"""

from areal.trajectory.export import export, transcript
from areal.trajectory.rendering import Renderer
from areal.trajectory.rewards import assign_reward, returns
from areal.trajectory.tree import Tree

__all__ = ["Renderer", "Tree", "assign_reward", "export", "returns", "transcript"]
