"""StreamingLLM: keep the first tokens and the last ones, whatever they say.

    python examples/streaming_llm.py --picture streaming.png

A model can go on without end so, but it knows nothing of what it dropped: the fact that the question
asks for is kept or lost by its place alone.

Everything runs in this process, with a small model; `--engine-url` and its like name real servers
instead (see the README). Needs `pip install 'lmcache-stream[embedded,examples]'`.
"""

from __future__ import annotations

import argparse

from prompts import build_prompt
from serving import add_text_arguments, make_parser, open_servers, run
from telling import answer, tell_edit

import lmcache_stream as lms
from lmcache_stream.dropping import StreamingLLM
from lmcache_stream.figures import kept_figure, strips_of


async def main(args: argparse.Namespace) -> None:
    strips = []
    async with open_servers(args) as servers:
        prompt = build_prompt(servers.tokenizer, servers.cache.chunk_size, args.text, args.question)
        print(f"{len(prompt.token_ids)} tokens: {prompt.question}\n\n--- from the whole KV")
        whole = lms.create_request(servers.cache, servers.engine, prompt.token_ids)
        await answer(whole, args.max_tokens)
        for ratio in args.ratio:
            stream = lms.create_request(servers.cache, servers.engine, prompt.token_ids)
            # The engine computes the prompt's KV, which the cache server stores, and a first token.
            await stream.generate({"max_tokens": 1, "temperature": 0})
            await stream.modify_kv(StreamingLLM(ratio=ratio, sinks=args.sinks))
            strips += strips_of(stream.edits, f"StreamingLLM, ratio {ratio}")
            tell_edit(servers.tokenizer, prompt.token_ids, strips[-1])
            await answer(stream, args.max_tokens)
    if args.picture:
        kept_figure(strips, prompt.parts).savefig(args.picture, format="png")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    add_text_arguments(parser, ratios=(0.3, 0.6))
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are kept (4)")
    run(main, parser.parse_args())
