"""What a client gets when a call fails: an `ApiError`, from which each dialect writes its own body."""

from areal.api.errors import ContextLengthError, EngineError, GrammarError, RequestError
from areal.utils import logging
from areal.utils.shorten import shortened

RETRY_SECONDS = 1
ENGINE_MESSAGE_CHARACTERS = 250
"""Of what an engine, a chat template or a grammar says about a request, which it may quote."""


class ApiError(Exception):
    """An answer that is not 200. `kind`, `param` and `code` are those of OpenAI's error body."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str = "", code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param or None
        self.code = code or None

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (408, 413):  # the rest of the body is never read
            return {"connection": "close"}
        return {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}


def bad_request(message: str, param: str = "", code: str = "") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_long(message: str) -> ApiError:
    return bad_request(message, "messages", "context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def rate_limited(message: str, code: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code=code)


def session_ended() -> ApiError:
    return ApiError(410, "this session has ended; its key and base_url are no longer valid", code="session_ended")


def engine_failed(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_unavailable")


def from_engine(error: EngineError, grammar_param: str) -> ApiError:
    """The caller's fault is 400, the engine's own is 503; `grammar_param` is the parameter that asked for a grammar."""
    if isinstance(error, ContextLengthError):
        return too_long(str(error))
    message = shortened(str(error), ENGINE_MESSAGE_CHARACTERS)
    if isinstance(error, GrammarError):
        return bad_request(message, grammar_param)
    if isinstance(error, RequestError):
        return bad_request(message)
    return engine_failed(f"the inference engine failed: {message}")


def as_api_error(error: Exception) -> ApiError:
    """The answer to any failure; one that was not foreseen is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):  # JSON inside a text, whose depth no limit covers
        return bad_request("the request is nested too deeply")
    logging.getLogger("proxy").error("a request to the proxy failed", exc_info=error)
    return ApiError(500, "the proxy failed; its log says why", kind="server_error")
