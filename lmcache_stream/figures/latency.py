"""How the latencies of a batch spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..batch.outcome import StreamOutcome
from ..batch.report import BatchReport
from ..errors import InvalidRequestError
from ..metrics import Distribution, StreamPerfMetrics
from .ink import INK

if TYPE_CHECKING:
    from .inline import InlineFigure

__all__ = ["latency_figure"]

_BAR = "#2563eb"
_MOST_BINS = 50
_STYLES = {"p50": "solid", "p90": "dashed", "p99": "dotted"}


def latency_figure(batch: BatchReport | Iterable[StreamOutcome]) -> InlineFigure:
    """Draw histograms of TTFT, ITL, TPOT and E2E latency, with mean, p50, p90 and p99.

    Those of the last pass of each stream: of the decoding one, else of the prefill. Streams that failed
    are left out.

    Raises:
        InvalidRequestError: no stream came to its end with a token, or matplotlib is missing.
    """
    from .inline import InlineFigure

    outcomes = batch.outcomes if isinstance(batch, BatchReport) else batch
    passes = [one for outcome in outcomes if outcome.is_ok and (one := outcome.decode or outcome.prefill)]
    groups = {title: values for title, values in _groups(passes).items() if values}
    if not groups:
        raise InvalidRequestError("no stream of the batch came to its end with a token")
    figure = InlineFigure(10, 2.9 * ((len(groups) + 1) // 2))
    for place, (title, values) in enumerate(groups.items(), 1):
        _draw(figure, ((len(groups) + 1) // 2, 2, place), title, values)
    return figure


def _groups(passes: Sequence[StreamPerfMetrics]) -> dict[str, list[float]]:
    return {
        "TTFT": [one.ttft for one in passes if one.ttft is not None],
        "ITL": [gap for one in passes for gap in one.itl],
        "TPOT": [one.tpot for one in passes if one.tpot is not None],
        "E2E latency": [one.e2e_latency for one in passes if one.e2e_latency is not None],
    }


def _draw(figure: InlineFigure, position: tuple[int, int, int], title: str, values: list[float]) -> None:
    spread = Distribution.of(values)
    assert spread is not None
    factor, unit = (1e3, "ms") if spread.p99 < 1 else (1.0, "s")
    axes = figure.plot_area(*position)
    # One stray value must not press all others into one bin.
    high = min(max(values), 1.2 * spread.p99)
    beyond = sum(value > high for value in values)
    bins = min(_MOST_BINS, 2 + round(2 * len(values) ** 0.5))
    shown = [value * factor for value in values if value <= high]
    axes.hist(shown, bins=bins, color=_BAR)
    for name, style in _STYLES.items():
        value = getattr(spread, name) * factor
        axes.axvline(value, color=INK, linestyle=style, linewidth=1.2, label=f"{name} {value:.3g} {unit}")
    mean = spread.mean * factor
    axes.plot(mean, 0, "D", color=INK, markersize=5, clip_on=False, zorder=3, label=f"mean {mean:.3g} {unit}")
    counted = ("gap" if title == "ITL" else "stream") + "s" * (len(values) > 1)
    axes.set_title(f"{title}, {spread.count:,} {counted}", color=INK, loc="left", fontsize="medium")
    axes.set_xlabel(f"{unit}, {beyond:,} beyond the axis" if beyond else unit, color=INK)
    axes.set_ylabel(counted, color=INK)
    axes.spines["bottom"].set(visible=True, color=INK)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, labelcolor=INK, fontsize="small")
