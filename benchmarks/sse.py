"""What it costs a client to read tokens: CPU time per token, and tokens a second, of four clients.

    python -m benchmarks.sse

A server in a process of its own plays streams as vLLM sends them: one event a token, each event one
HTTP chunk and one write to its socket. It waits until all streams are there and then goes step by
step, as an engine does: one event to every stream, then the next.

- ``paced``: a step every ``--step-ms``, as from an engine that decodes. Events are read one by one.
- ``full speed``: the next step at once, as far as the sockets take it. Reads hold many events.

The clients: ``VLLMCompletions``; httpx with ``json.loads`` for each line, which is the loop of LMCache's
example; the openai client; and a bare asyncio protocol that drops the bytes, which is the least that this
machine needs for them. They take turns. A ratio is the median of those of the rounds, with the
least and the greatest; other figures are medians over the rounds. CPU time is the client process's own
(``time.process_time``), all of it from the first connection to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version

from benchmarks.sse_clients import CLIENTS, OURS, Client
from benchmarks.sse_server import Settings, add_arguments, command_of, settings_of


@dataclass(frozen=True)
class Figure:
    """One client in one mode.

    Attributes:
        cpu_us: CPU time per token in microseconds.
        tokens_per_s: tokens received a second, over all streams.
    """

    cpu_us: float
    tokens_per_s: float


@contextlib.contextmanager
def server(settings: Settings) -> Iterator[str]:
    """Run the server in a process of its own and give its address."""
    with subprocess.Popen(
        command_of(settings), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.stdin.close()


def measure(client: Client, url: str, settings: Settings) -> Figure:
    """Let ``client`` read all streams once."""
    number = settings.streams * settings.tokens
    expected = settings.streams * sum(range(settings.tokens))
    cpu, wall = time.process_time(), time.perf_counter()
    total = asyncio.run(client(url, settings))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    if total != expected:
        raise SystemExit(f"{client.__name__} read other tokens than were sent")
    return Figure(cpu_us=cpu / number * 1e6, tokens_per_s=number / wall)


def run(settings: Settings) -> dict[str, dict[str, list[Figure]]]:
    """Measure every client in both modes, turn by turn."""
    figures: dict[str, dict[str, list[Figure]]] = {}
    with server(settings) as url:
        for client in CLIENTS.values():
            # What a client does once, such as late imports, is not what is measured.
            measure(client, f"{url}/full", settings)
        for mode, path in (("paced", "/paced"), ("full speed", "/full")):
            figures[mode] = {name: [] for name in CLIENTS}
            for _ in range(settings.rounds):
                for name, client in CLIENTS.items():
                    figures[mode][name].append(measure(client, url + path, settings))
    return figures


def median(figures: list[Figure]) -> Figure:
    """Return the medians of ``figures``."""
    return Figure(
        cpu_us=statistics.median(one.cpu_us for one in figures),
        tokens_per_s=statistics.median(one.tokens_per_s for one in figures),
    )


def ratios(figures: dict[str, list[Figure]]) -> dict[str, list[float]]:
    """Return this library's CPU time per token as a part of each other client's, round by round."""
    return {
        name: [ours.cpu_us / theirs.cpu_us for ours, theirs in zip(figures[OURS], of, strict=True)]
        for name, of in figures.items()
        if name != OURS
    }


def environment() -> dict[str, str]:
    """Return what the figures depend on."""
    packages = {name: version(name) for name in ("aiohttp", "msgspec", "httpx", "openai")}
    return {"python": platform.python_version(), "machine": platform.machine(), **packages}


def report(settings: Settings, figures: dict[str, dict[str, list[Figure]]]) -> None:
    """Print ratios first, then what they are made of."""
    for mode, of in figures.items():
        parts = [
            f"{statistics.median(each):.3f} of {name} ({min(each):.3f} to {max(each):.3f})"
            for name, each in ratios(of).items()
        ]
        print(f"{mode}, CPU per token: {', '.join(parts)}")
    for mode, of in figures.items():
        print(f"\n{mode:24}{'CPU us/token':>14}{'tokens/s':>12}")
        for name, one in of.items():
            middle = median(one)
            print(f"{name:24}{middle.cpu_us:14.1f}{middle.tokens_per_s:12.0f}")
    print(f"\n{asdict(settings)}\n{environment()}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON with the figures of every round")
    options = parser.parse_args()
    settings = settings_of(options)
    figures = run(settings)
    if options.json:
        result = {
            mode: {
                "ratios": ratios(of),
                "median": {name: asdict(median(one)) for name, one in of.items()},
                "rounds": {name: [asdict(figure) for figure in one] for name, one in of.items()},
            }
            for mode, of in figures.items()
        }
        print(json.dumps({"settings": asdict(settings), "environment": environment(), "modes": result}))
    else:
        report(settings, figures)


if __name__ == "__main__":
    main()
