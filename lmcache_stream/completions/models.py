"""What an engine says of the models that it serves."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..errors import EngineStreamError, InvalidRequestError
from .endpoint import Endpoint
from .exchange import Request, ask, new_session
from .params import request_headers

__all__ = ["ServedModel", "find_model"]

_TIME = 10.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of ``/v1/models``.

    Attributes:
        root: its path in the engine, which is its name in LMCache.
        max_model_len: its longest sequence in tokens; None where the engine does not say.
    """

    root: str
    max_model_len: int | None


class _Card(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _List(msgspec.Struct):
    data: list[_Card]


async def find_model(base_url: str, model: str, *, api_key: str | None = None) -> ServedModel:
    """Ask an engine for the model that it serves as ``model``.

    Raises:
        InvalidRequestError: it serves none of this name; those that it serves are told.
        EngineError: it cannot be asked.
    """
    endpoint = Endpoint.of(base_url)
    url = f"{endpoint.root}/v1/models"
    headers = {**request_headers(api_key, None), "Accept": "application/json"}
    request = Request(url, headers, _TIME, endpoint.proxy(), method="GET")
    async with new_session() as session:
        body = await ask(session, request, _TIME)
    try:
        cards = msgspec.json.decode(body, type=_List).data
    except msgspec.MsgspecError as error:
        raise EngineStreamError(
            f"{request.where}: the answer is no list of models ({error}): is this vLLM's address?"
        ) from error
    for card in cards:
        if card.id == model:
            return ServedModel(card.root or card.id, card.max_model_len)
    served = ", ".join(card.id for card in cards) or "none"
    raise InvalidRequestError(f"the engine at {endpoint.root} serves no model {model!r}; it serves: {served}")
