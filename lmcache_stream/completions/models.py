"""What an engine says of the models that it serves."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from .._listener import listener_at
from ..errors import EngineConnectError, EngineStreamError, InvalidRequestError
from .endpoint import Endpoint
from .exchange import Request, ask, new_session
from .params import request_headers

__all__ = ["ServedModel", "find_model", "served_models"]

_TIME = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of ``/v1/models``.

    Attributes:
        name: in the API.
        root: its path in the engine, which is its name in LMCache; the name where the engine does not say.
        max_model_len: its longest sequence in tokens; None where the engine does not say.
    """

    name: str
    root: str
    max_model_len: int | None


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _List(msgspec.Struct):
    data: list[_Card]


def served_models(body: bytes) -> list[ServedModel]:
    """Read the body of an answer to ``/v1/models``.

    Raises:
        ValueError: it is no list of models.
    """
    try:
        cards = msgspec.json.decode(body, type=_List).data
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    return [ServedModel(card.id, card.root or card.id, card.max_model_len) for card in cards]


async def find_model(base_url: str, model: str, *, api_key: str | None = None) -> ServedModel:
    """Ask an engine for the model that it serves as ``model``: its root is the ``model_name`` of ``connect``.

    Args:
        base_url: the engine's address, with or without ``/v1``.
        model: the name under which the model is served.
        api_key: sent as ``Authorization: Bearer``.

    Raises:
        InvalidRequestError: it serves none of this name; those that it serves are told.
        EngineError: it cannot be asked.
    """
    endpoint = Endpoint.of(base_url)
    url = f"{endpoint.root}/v1/models"
    headers = {**request_headers(api_key, None), "Accept": "application/json"}
    request = Request(url, headers, _TIME, endpoint.proxy(), method="GET")
    # Heard before it is asked; see `_listener.QUIET`.
    if request.proxy is None and (found := await listener_at(endpoint.root, deadline=_TIME)).is_zeromq:
        raise EngineConnectError(
            f"{request.where}: {found.spoken.value}, as at LMCache's --port: give the address of vLLM's API"
        )
    async with new_session() as session:
        body = await ask(session, request, _TIME)
    try:
        models = served_models(body)
    except ValueError as error:
        raise EngineStreamError(
            f"{request.where}: the answer is no list of models ({error}): is this vLLM's address?"
        ) from error
    for each in models:
        if each.name == model:
            return each
    served = ", ".join(each.name for each in models) or "none"
    raise InvalidRequestError(f"the engine at {endpoint.root} serves no model {model!r}; it serves: {served}")
