"""What a client is told when a call fails. One type; each dialect writes its own body from it."""

from areal.api.errors import ContextLengthError, EngineError, GrammarError, RequestError

RETRY_SECONDS = 1


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
        if self.status in (408, 413):  # the rest of the body is not waited for
            return {"connection": "close"}
        return {"retry-after": str(RETRY_SECONDS)} if self.status in (429, 503) else {}


class ClientGone(Exception):
    """The client went away; there is nobody to answer."""


def bad_request(message: str, param: str = "", code: str = "") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def too_long(message: str) -> ApiError:
    return bad_request(message, "messages", "context_length_exceeded")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def session_ended() -> ApiError:
    return ApiError(410, "this session has ended; its key and base_url are no longer valid", code="session_ended")


def engine_failed(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_unavailable")


def from_engine(error: EngineError) -> ApiError:
    """The engine's errors as answers: the caller's fault is 400, the engine's own is 503."""
    if isinstance(error, ContextLengthError):
        return too_long(str(error))
    if isinstance(error, GrammarError):
        return bad_request(str(error), str(error).split()[0])  # it begins with the parameter that demanded it
    if isinstance(error, RequestError):
        return bad_request(str(error))
    return engine_failed(f"the inference engine failed: {error}")
