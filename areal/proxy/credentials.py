"""The keys that a request brings."""

from starlette.requests import Request


def keys_of(request: Request) -> list[str]:
    """Every one, wherever SDKs put them. A header that comes twice brings two."""
    bearers = [value.partition(" ") for value in request.headers.getlist("authorization")]
    keys = [key.strip() for scheme, _, key in bearers if scheme.lower() == "bearer"]
    return [key for key in (*keys, *request.headers.getlist("x-api-key")) if key]
