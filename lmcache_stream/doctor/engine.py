"""The engine: is it there, is it vLLM, does it serve the model, and does it say what the library needs."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from ..completions import CompletionTimeouts, FinishEvent, TokenEvent, VLLMCompletions
from ..completions.models import served_models
from ..errors import EngineConnectError, EngineError, EngineStatusError, EngineStreamError
from .chart import Chart, known
from .places import ENGINE
from .results import Finding, failed, ok, warning
from .web import Answer, get, identify

__all__ = ["DETAILS", "advice_for", "api", "cached_tokens", "model", "one_pass", "reachable", "token_ids"]

DETAILS = "--enable-prompt-tokens-details"
_FIRST_TOKEN_ID = 100
_SHORT_PROMPT = 24
# A connection that is left before the engine has begun to answer is held for so long; see VLLMCompletions.
_DRAIN_SECONDS = 5.0


class _Version(msgspec.Struct):
    version: str


async def reachable(chart: Chart) -> Finding:
    """Something speaks HTTP there."""
    root, deadline = chart.targets.engine_url, chart.deadlines.answer
    answer = await ENGINE.ask(root, "/v1/models", deadline=deadline, headers=chart.targets.headers)
    if isinstance(answer, Finding):
        return answer
    chart.models = answer
    return ok(f"{root} answers over HTTP")


async def api(chart: Chart) -> Finding:
    """What answers there is vLLM's API."""
    root, deadline = chart.targets.engine_url, chart.deadlines.answer
    answer = known(chart.models)
    if answer.status in (401, 403):
        given = "refuses this API key" if chart.targets.api_key else "wants an API key"
        return failed(f"GET {root}/v1/models: {answer}: it {given}", "give --api-key the one of vLLM")
    try:
        chart.served = served_models(answer.body if answer.status == 200 else b"")
    except ValueError:
        if answer.status >= 500:
            return failed(f"GET {root}/v1/models: {answer}", "vLLM is starting or has failed: see its log")
        return ENGINE.mistaken(root, await identify(root, deadline=deadline))
    said = await get(f"{root}/version", deadline=deadline, headers=chart.targets.headers)
    try:
        version = msgspec.convert(said.object if isinstance(said, Answer) else {}, type=_Version).version
    except msgspec.ValidationError:
        return ok("vLLM's API, without a version")
    return ok(f"vLLM {version}")


async def model(chart: Chart) -> Finding:
    """The model is served under the name that was given."""
    name, served = chart.targets.model, chart.served
    listed = ", ".join(repr(one.name) for one in served) or "none"
    if name is None and len(served) != 1:
        return failed(f"no --model was given, and vLLM serves: {listed}", "name one of them with --model")
    found = next((one for one in served if name in (None, one.name)), None)
    if found is None:
        by_path = next((one for one in served if one.root == name), None)
        if by_path is not None:
            return failed(
                f"{name!r} is the model's path; vLLM serves it as {by_path.name!r}",
                f"give the served name: --model {by_path.name}",
            )
        return failed(
            f"vLLM does not serve {name!r}; it serves: {listed}",
            "give --model one of these: the served name, not the name in LMCache",
        )
    chart.served_model = found
    length = f", up to {found.max_model_len} tokens" if found.max_model_len else ""
    return ok(f"serves {found.name!r}, path {found.root!r}{length}")


async def token_ids(chart: Chart) -> Finding:
    """A short pass gives its tokens as ids."""
    targets, wait = chart.targets, chart.deadlines.completion
    chart.engine = engine = VLLMCompletions(
        targets.engine_url,
        known(chart.served_model).name,
        api_key=targets.api_key,
        timeouts=CompletionTimeouts(first_token=wait, idle=wait, drain=_DRAIN_SECONDS),
    )
    chart.possessions.push_async_callback(engine.aclose)
    prompt = range(_FIRST_TOKEN_ID, _FIRST_TOKEN_ID + _SHORT_PROMPT)
    try:
        tokens, end = await one_pass(engine, prompt, chart.salts[0])
    except EngineError as error:
        return failed(str(error), advice_for(error))
    if not tokens:
        return failed("a pass of 1 token gave none", "see vLLM's log")
    chart.cached_tokens = end.cached_tokens
    return ok(f"a pass of {len(prompt)} tokens gave token {tokens[0].token_id}")


async def cached_tokens(chart: Chart) -> Finding:
    """The engine reports how much of a prompt came from a cache."""
    if chart.cached_tokens is None:
        return warning(
            "vLLM does not report cached tokens, so an edit that was lost in between is not noticed",
            f"start vLLM with {DETAILS}",
        )
    return ok("cached tokens are reported")


async def one_pass(
    engine: VLLMCompletions, prompt: Sequence[int], salt: str
) -> tuple[list[TokenEvent], FinishEvent]:
    """Decode one token behind ``prompt``."""
    tokens: list[TokenEvent] = []
    end = FinishEvent()
    parameters = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with contextlib.aclosing(engine(prompt, parameters, salt)) as events:
        async for event in events:
            if isinstance(event, FinishEvent):
                end = event
            else:
                tokens.append(event)
    return tokens, end


def advice_for(error: EngineError) -> str:
    """Return what to do about a pass that failed."""
    match error:
        case EngineStatusError(status=401 | 403):
            return "give --api-key the one of vLLM"
        case EngineStatusError() | EngineStreamError():
            return "see vLLM's log; 0.10.2 or newer is needed, for token ids and salts"
        case EngineConnectError():
            return "vLLM broke off: see its log, and restart it where it has ended"
        case _:
            return "vLLM is overloaded or hangs: see its log"
