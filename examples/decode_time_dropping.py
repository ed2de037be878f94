"""Drop tokens while the model writes: however long its answer gets, its KV stays within a budget.

    python examples/decode_time_dropping.py --picture rounds.png

The engine decodes a chunk of tokens; a pass of one token then prefills them, by which their KV gets into
the cache; R-KV, which was made for long reasoning, chooses what stays; and the model writes on.

Everything runs in this process, with a small model; `--engine-url` and its like name real servers
instead (see the README). Needs `pip install 'lmcache-stream[embedded,examples]'`.
"""

from __future__ import annotations

import argparse

from prompts import build_prompt
from serving import make_parser, open_servers, positive, run
from telling import tell_edit

import lmcache_stream as lms
from lmcache_stream.dropping import RKV, HFQueries
from lmcache_stream.figures import Part, kept_figure, strips_of

REQUEST = "Write a long story about a lighthouse keeper and her dog."


async def main(args: argparse.Namespace) -> None:
    sampling = {"temperature": 0.7, "top_p": 0.9, "seed": args.seed}
    async with open_servers(args) as servers:
        chunk = servers.cache.chunk_size
        # A prompt of any length: there will be whole chunks once something is decoded.
        prompt = build_prompt(servers.tokenizer, chunk_size=1, text=args.request, question="")
        policy = RKV(budget=args.budget * chunk, window=args.window)
        queries = HFQueries(servers.model, window=args.window)
        stream = lms.create_request(servers.cache, servers.engine, prompt.token_ids)
        print(f"{len(prompt.token_ids)} tokens: {args.request}\n")
        await stream.generate({**sampling, "max_tokens": chunk})
        while len(stream.edits) < args.rounds and not stream.is_done():
            # What was decoded has no KV in the cache yet: this pass takes it as part of its prompt.
            await stream.generate({**sampling, "max_tokens": 1})
            await stream.modify_kv(policy, queries=queries)
            report = stream.edits[-1]
            print(
                f"edit {len(stream.edits)}: {report.tokens_before} tokens of KV, {report.tokens_after} kept"
            )
            await stream.generate({**sampling, "max_tokens": chunk - 1})
    print(f"\n--- {stream.decoded_tokens()} tokens decoded\n{stream.output_text()}\n")
    if not stream.edits:
        raise SystemExit("the answer ended before the first edit")
    strips = strips_of(stream.edits, "edit")
    tell_edit(servers.tokenizer, [*prompt.token_ids, *stream.output_tokens()], strips[-1])
    if args.picture:
        answer = Part("answer", len(prompt.token_ids), strips[-1].length)
        kept_figure(strips, [*prompt.parts, answer]).savefig(args.picture, format="png")


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--request", default=REQUEST, help=f"what to write ({REQUEST})")
    parser.add_argument("--budget", type=positive, default=2, metavar="N", help="chunks to keep (2)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="edits (3)")
    parser.add_argument("--window", type=positive, default=16, help="last tokens whose queries vote (16)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (0)")
    run(main, parser.parse_args())
