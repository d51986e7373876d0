"""Turns a dense model into the mixture of experts that a run starts from.

    python -m spes_swarm.upcycle DENSE OUTPUT

Qwen3, Llama and OLMo 2 become Qwen3-MoE, Mixtral and FlexOlmo. Each expert is a copy of the dense FFN, with noise on a
random part of its weights. Without noise (--noise-std 0) the mixture computes the same logits, which --check verifies.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code, interrupt_on_stop_signals
from spes_swarm.base.errors import UserError, os_errors_as
from spes_swarm.base.wording import two_columns
from spes_swarm.config.command_line import command_parser

if TYPE_CHECKING:
    from spes_swarm.convert.upcycling import Comparison, UpcyclingReport


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    interrupted = "interrupted; OUTPUT is complete if it exists"
    return exit_code("upcycle", lambda: _run(_parse(arguments)), interrupted=interrupted)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("upcycle", __doc__)
    add = parser.add_argument
    add("dense", type=Path, metavar="DENSE", help="directory of the dense model, with safetensors")
    add("output", type=Path, metavar="OUTPUT", help="a new or empty directory")
    add("--experts", type=int, default=8, metavar="N", help="experts per layer")
    add("--top-k", type=int, default=2, metavar="K", help="experts that process a token")
    add("--noise-std", type=float, default=0.02, metavar="STD", help="of the noise; 0 for exact copies")
    add("--noise-fraction", type=float, default=0.5, metavar="P", help="share of weights with noise")
    add("--router-init", default="normal:0.02", metavar="HOW", help="zero, or normal:STD")
    add("--seed", type=int, default=0, metavar="N", help="seed of noise and routers")
    add("--dtype", default="float32", metavar="float32|bfloat16", help="dtype of the output")
    add("--max-shard-size", default="2GB", metavar="SIZE", help="largest size of a weight file")
    add("--source-name", metavar="NAME", help="published in upcycling.json; default: the last part of DENSE")
    add("--check", action="store_true", help="compare both models on random tokens (needs their memory)")
    add("--write-config", type=Path, metavar="FILE", help="also write the configuration of a run")
    add(
        "--tokenizer",
        metavar="NAME",
        help="for --write-config, loadable by every joiner; default: bytes if the model uses it, else --source-name",
    )
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    interrupt_on_stop_signals()
    if options.write_config is not None and (
        options.write_config.exists() or not options.write_config.resolve().parent.is_dir()
    ):
        raise UserError(f"{options.write_config} exists, or its directory does not; choose another --write-config")
    if options.tokenizer is not None and options.write_config is None:
        raise UserError("--tokenizer belongs to --write-config, which is not given")
    # These import torch and transformers, which takes seconds.
    from transformers.utils.logging import disable_progress_bar

    from spes_swarm.convert.recipes import UpcyclingOptions
    from spes_swarm.convert.upcycling import compare, upcycle

    disable_progress_bar()
    upcycling = UpcyclingOptions(
        experts=options.experts,
        top_k=options.top_k,
        noise_std=options.noise_std,
        noise_fraction=options.noise_fraction,
        router_std=_router_std(options.router_init),
        seed=options.seed,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        source_name=options.source_name or options.dense.resolve().name,
    )
    # Before the slow part, so that a mistake costs no time.
    tokenizer = None if options.write_config is None else options.tokenizer or _tokenizer_name(options)
    started = time.monotonic()
    report = upcycle(options.dense, options.output, upcycling)
    print(_table(report, time.monotonic() - started))
    if tokenizer is not None:
        _write_config(options.output, options.write_config, tokenizer)
    if not options.check:
        return 0
    comparison = compare(options.dense, options.output, upcycling)
    print(_verdict(comparison))
    has_noise = upcycling.noise_std > 0 and upcycling.noise_fraction > 0
    return 0 if has_noise or comparison.is_exact else 1


def _router_std(text: str) -> float:
    if text == "zero":
        return 0.0
    kind, _, std = text.partition(":")
    try:
        if kind == "normal":
            return float(std)
    except ValueError:
        pass
    raise UserError(f"--router-init: found {text!r}, expected zero or normal:STD, e.g. normal:0.02")


def _tokenizer_name(options: argparse.Namespace) -> str:
    """Returns a name for the dense model's tokenizer that is valid on all machines."""
    from spes_swarm.data.tokenizer import BYTES, ByteTokenizer, load_tokenizer

    if (options.dense / "tokenizer.json").exists():
        tokenizer = load_tokenizer(options.dense, local_files_only=True)
        if tokenizer.digest == ByteTokenizer().digest:
            return BYTES
    if "/" in (options.source_name or ""):
        return str(options.source_name)
    raise UserError("--write-config needs --tokenizer NAME, a name that every joiner can load")


def _write_config(directory: Path, file: Path, tokenizer: str) -> None:
    """Writes the configuration, and reads it back as the founder of the run will."""
    import yaml

    from spes_swarm.config.file import load_config
    from spes_swarm.convert.recipes import starting_run

    name = re.sub(r"[^a-z0-9-]+", "-", directory.resolve().name.lower()).strip("-")[:40] or "upcycled"
    run = starting_run(directory, name, tokenizer)
    header = "# A run of an upcycled mixture. Optimisation and merging are those of SPES 9B (arXiv 2602.11543).\n"
    with os_errors_as(UserError, f"{file} cannot be written"):
        file.write_text(header + yaml.safe_dump({"run": run.to_dict()}, sort_keys=False), encoding="utf-8")
    assert load_config(file).run == run
    print(f"configuration written to {file}; found the run with")
    print(f"  python -m spes_swarm.join --config {file} --initial-weights {directory}")


def _table(report: UpcyclingReport, seconds: float) -> str:
    rows = [
        ("model", f"{report.model_type}, {report.num_parameters:,} parameters"),
        ("tensors", f"{report.num_tensors:,}"),
        ("shards", f"{report.num_shards:,}"),
        ("bytes", f"{report.num_bytes:,}"),
        ("seconds", f"{seconds:.1f}"),
        ("peak MiB", f"{_peak_bytes() / 2**20:,.0f} (the whole process)"),
    ]
    return two_columns(rows)


def _peak_bytes() -> int:
    """Returns the peak resident size of this process; getrusage would include that of the parent before exec."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def _verdict(comparison: Comparison) -> str:
    return (
        f"check: logits differ by at most {comparison.max_difference:.2e} (largest logit {comparison.max_logit:.1f}); "
        f"loss on random tokens {comparison.dense_loss:.4f} dense, {comparison.moe_loss:.4f} mixture"
    )


if __name__ == "__main__":
    end_program(main())
