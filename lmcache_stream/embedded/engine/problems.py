"""What the engine refuses, in the form and with the status codes of vLLM's server."""

from __future__ import annotations

from typing import Any

__all__ = ["BadRequestError", "ModelNotFoundError", "NotFiniteError", "RequestError", "error_object"]


class RequestError(Exception):
    """A request that the engine refuses; ``status`` and ``kind`` are those of its answer."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequestError(RequestError):
    """The request cannot be understood or met."""


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    status = 404
    kind = "NotFoundError"


class NotFiniteError(RequestError):
    """Nothing can be decoded from what the model computed."""

    status = 500
    kind = "InternalServerError"


def error_object(message: str, kind: str, status: int, param: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
