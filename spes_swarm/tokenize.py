"""Turns text into token files for `--data`.

    python -m spes_swarm.tokenize TEXT ... --output DIR

Reads text (.txt, .md, .rst, .py), JSON (.jsonl, .json), tables (.csv, .tsv), each plain or compressed (.gz, .bz2, .xz,
.zst), and .parquet. Documentation and hidden files are no text. Broken records and files that are left out are counted.
The result does not depend on the number of processes. Conversations are not tokenised here: join takes them (--data).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code, interrupt_on_stop_signals
from spes_swarm.base.errors import DataError
from spes_swarm.base.wording import two_columns
from spes_swarm.config.command_line import command_parser

if TYPE_CHECKING:
    from spes_swarm.data.files.finding import Found
    from spes_swarm.data.sharding import ShardSummary
    from spes_swarm.data.tokenizer import Tokenizer

_BPE_SAMPLE_CHARS = 200_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("tokenize", lambda: _run(_parse(arguments)), interrupted="interrupted; complete shards are kept")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from spes_swarm.data.sharding import DEFAULT_SHARD_TOKENS

    parser = command_parser("tokenize", __doc__)
    add = parser.add_argument
    add("inputs", nargs="+", metavar="TEXT", help="files, directories or globs")
    add("--output", type=Path, required=True, metavar="DIR", help="where the shards are written")
    add("--tokenizer", default="bytes", help="bytes, bpe (trained here), or a path or hub name")
    add("--bpe-vocab-size", type=int, default=16384, metavar="N", help="for --tokenizer bpe")
    add("--text-field", default="text", metavar="NAME", help="field or column that holds the text")
    add(
        "--text-mode",
        choices=("file", "paragraph", "line"),
        default="file",
        help="unit of a document in a plain text file",
    )
    add("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="CPU processes")
    add("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, metavar="N", help="tokens in a shard")
    add("--overwrite", action="store_true", help="replace existing shards")
    add("--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty(), help="show a progress bar")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> None:
    interrupt_on_stop_signals()
    # Slow enough to be interrupted.
    from tqdm import tqdm

    from spes_swarm.data.chat import check_same_kind
    from spes_swarm.data.files.finding import find_files
    from spes_swarm.data.sharding import DocumentFormat, prepare_output, sample_documents, write_shards
    from spes_swarm.data.tokenizer import load_tokenizer, train_bpe

    found = find_files(options.inputs, without=options.output)
    files = found.files
    if found.are_tokens:
        raise DataError(f"{files[0]} is a token file, which needs no tokenising: pass it to --data")
    check_same_kind(files, chats=False)
    document_format = DocumentFormat(text_field=options.text_field, text_mode=options.text_mode)
    tokenizer: Tokenizer
    prepare_output(options.output, options.overwrite)  # before the tokenizer is saved, which belongs to the shards
    if options.tokenizer == "bpe":
        tokenizer = train_bpe(sample_documents(files, _BPE_SAMPLE_CHARS, document_format), options.bpe_vocab_size)
        tokenizer.save(options.output / "tokenizer")
    else:
        tokenizer = load_tokenizer(options.tokenizer)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=not options.progress) as bar:
        summary = write_shards(
            files,
            options.output,
            tokenizer,
            document_format=document_format,
            shard_tokens=options.shard_tokens,
            processes=options.processes,
            overwrite=options.overwrite,
            on_progress=bar.update,
        )
    print(_table(found, summary, tokenizer))


def _table(found: Found, summary: ShardSummary, tokenizer: Tokenizer) -> str:
    from spes_swarm.data.files.finding import ending, listed

    rate = summary.num_tokens / max(summary.seconds, 1e-9)
    rows = [
        ("tokenizer", f"{tokenizer.name} ({tokenizer.vocab_size} ids, {tokenizer.digest[:12]})"),
        ("files", f"{len(found.files):,} ({listed(Counter(map(ending, found.files)))})"),
        ("left out", listed(found.left_out) or "-"),
        ("shards", f"{len(summary.shards):,}"),
        ("documents", f"{summary.num_documents:,}"),
        ("tokens", f"{summary.num_tokens:,}"),
        ("tokens/s", f"{rate:,.0f}"),
        *([("damaged files", summary.damaged)] if summary.damaged else []),
        ("broken records", f"{summary.broken.total():,}"),
        *((f"  {kind}", f"{count:,}") for kind, count in sorted(summary.broken.items())),
    ]
    return two_columns(rows)


if __name__ == "__main__":
    end_program(main())
