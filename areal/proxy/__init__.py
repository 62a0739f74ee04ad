"""Let any agent talk to the policy over the wire it already speaks.

Owns sessions and their keys, the HTTP app and its two doors (TCP and in-process), and the dialects. Refuses to know
what an episode is, and never touches token ids itself: those belong to the trajectory.
"""

from areal.proxy.limits import ProxyLimits
from areal.proxy.proxy import Proxy
from areal.proxy.sessions import NO_SESSION_KEY, Session

__all__ = ["NO_SESSION_KEY", "Proxy", "ProxyLimits", "Session"]
