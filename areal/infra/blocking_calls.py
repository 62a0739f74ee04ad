"""Calls that block an event loop while they wait, and what an episode does instead.

One table for the stall watch, which sees a blocked line and its stack, and for `areal check`, which sees the calls.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockingCalls:
    """Calls with one remedy."""

    names: tuple[str, ...]
    """Full names of the functions; one that ends in a dot is a whole module."""
    remedy: str
    modules: tuple[str, ...] = ()
    """Modules that are on the stack while such a call waits."""
    methods: tuple[str, ...] = ()
    """Methods of these names block, whatever their object is."""
    waiting: tuple[str, ...] = ()
    """Modules of which one is on the stack too while it waits: the others' async calls go through `modules` as well."""


SYNC_TRANSPORTS = ("httpcore._sync", "httpcore2._sync", "httpx._transports.wsgi", "httpx2._transports.wsgi")
"""What the synchronous clients of httpx wait in, and no other."""


ASYNC_HTTP = "session = await workflow_context.get_aiohttp_session(), or get_httpx_client()"

BLOCKING = (
    BlockingCalls(("time.sleep",), "await asyncio.sleep(...)"),
    BlockingCalls(
        ("open", "io.open"),
        "async with aiofiles.open(...) as file: await file.read()",
        modules=("pathlib",),
        methods=("read_text", "read_bytes", "write_text", "write_bytes"),
    ),
    BlockingCalls(
        ("openai.OpenAI", "openai.AzureOpenAI", "anthropic.Anthropic"),
        "AsyncOpenAI(...) (AsyncAnthropic(...)) with await, or rollout.agent.mode=subproc",
        modules=("openai", "anthropic"),
        waiting=SYNC_TRANSPORTS,
    ),
    BlockingCalls(
        ("requests.", "urllib.request.urlopen"),
        ASYNC_HTTP,
        modules=("requests", "urllib3", "urllib.request", "http.client"),
    ),
    BlockingCalls(
        ("httpx.get", "httpx.post", "httpx.request", "httpx.Client"),
        ASYNC_HTTP,
        modules=("httpx", "httpx2"),
        waiting=SYNC_TRANSPORTS,
    ),
    BlockingCalls(
        ("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "os.system"),
        "await asyncio.create_subprocess_exec(...)",
        modules=("subprocess",),
    ),
    BlockingCalls(("input",), "what the task holds: an episode has no terminal"),
)

OTHERWISE = "AsyncRewardWrapper(reward_fn) for rewards, await asyncio.to_thread(...) for the rest"
AWAITED = "less computing at once in what is awaited there, or rollout.agent.mode=subproc"


def by_name(name: str) -> BlockingCalls | None:
    """The entry of a function, given its full name."""
    for entry in BLOCKING:
        if any(name == known or (known.endswith(".") and name.startswith(known)) for known in entry.names):
            return entry
    return None


def remedy_for(source: str, modules: list[str]) -> str:
    """What to do about a blocked line, given its text and the modules that were called from it."""
    for entry in BLOCKING:
        called = _any_in(modules, entry.modules) and (not entry.waiting or _any_in(modules, entry.waiting))
        names = [name if name.endswith(".") else f"{name}(" for name in entry.names]
        written = any(text in source for text in (*names, *(f".{method}(" for method in entry.methods)))
        if called or written:
            return entry.remedy
    return AWAITED if source.startswith("await ") or " await " in source else OTHERWISE


def _any_in(modules: list[str], packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for module in modules for package in packages)
