"""Checks and measures everything that needs a GPU, in one go of less than nine minutes.

    bash scripts/gpu_check.sh               on a machine with a CUDA device
    bash scripts/gpu_check.sh --quick       small sizes, on a CPU too: what the tests run

- tests: those marked `cuda`.
- kernels: one layer of experts with each expert kernel, forward and backward: time, memory, distance from the loop.
- storage: the gradients and the peak memory of a step with other peers' experts in host memory, compared with those on
  the device.
- losses: the output layer with its loss and gradients: time and memory.
- bf16: the loss and the gradients of a small model under bf16 autocast against fp32.
- steps: a peer's step at 300 M weights and of the paper's 2B with one expert, with few sequences at a time and with
  many: time, tokens/s, TFLOP/s, MFU, and the peak of memory against the planned one.

A check that fails is reported and the others go on; the exit code is 1 then. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.testing.benchmark import SIZES, Row, quickstart_run, save, shown
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.compilation import compile_layers
from spes_swarm.model.flops import ModelFlops
from spes_swarm.model.foreign.storage import new_storage
from spes_swarm.model.kernel_trial import Layer, LayerShape, try_kernel
from spes_swarm.model.kernels import KERNELS, LoopKernel
from spes_swarm.model.output_head import IGNORED_TARGET, linear_loss
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer.memory.step_memory import StepShape, step_memory
from spes_swarm.training.gradients import Gradients, autocast, loss_weights
from spes_swarm.training.throughput import peak_flops

ROOT = Path(__file__).resolve().parent.parent
LAST_START_S = 420.0  # a check that would begin later is left out
WARM_UP, REPEATS = 2, 5


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """A peer's step."""

    name: str
    run: RunConfig
    held: int
    foreign: str
    checkpointing: str
    micro_batch: int
    micro_batches: int = 2  # of a step
    storage: str = "device"  # of others' experts
    kernel: str = "torch"
    compiled: bool = False


def step_cases(quick: bool) -> Iterator[StepCase]:
    """Yields the steps to measure."""
    if quick:
        small = quickstart_run(64, 96, 2, 4, 32)
        yield StepCase(name="small", run=small, held=2, foreign="bf16", checkpointing="none", micro_batch=2)
        yield StepCase(name="small, int8", run=small, held=1, foreign="int8", checkpointing="layers", micro_batch=2)
        return
    middle = quickstart_run(*SIZES["300M"], 1024)
    first = StepCase(name="300M", run=middle, held=2, foreign="bf16", checkpointing="none", micro_batch=8)
    yield first
    yield replace(first, name="300M, compiled", compiled=True)
    yield replace(first, micro_batch=64)
    yield replace(first, name="300M, compiled", micro_batch=64, compiled=True)
    yield replace(first, micro_batch=64, kernel="megablocks")
    large = load_config(ROOT / "configs" / "spes-2b.yaml").run
    assert large is not None
    int8 = StepCase(name="2B", run=large, held=1, foreign="int8", checkpointing="layers", micro_batch=2)
    yield int8
    yield replace(int8, micro_batch=16)
    yield replace(int8, name="2B, host", storage="host")


def wait_for(device: torch.device) -> None:
    """Waits until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Frees what earlier checks have left in reference cycles, e.g. copies of layers, and in compiled code."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of an action."""
    taken = []
    for _ in range(WARM_UP + REPEATS):
        wait_for(device)
        started = time.perf_counter()
        action()
        wait_for(device)
        taken.append(time.perf_counter() - started)
    return float(np.median(taken[WARM_UP:]))


def run_tests(device: torch.device, quick: bool) -> list[Row]:
    """Runs the tests that need CUDA; without a device, they are skipped."""
    if find_spec("pytest") is None:
        raise ConfigError("pytest is not installed: pip install pytest hypothesis")
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-m", "cuda", "tests/model"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n")
        raise RuntimeError(" / ".join(done.stdout.splitlines()[-3:]) or done.stderr[-200:])
    return [{"tests": done.stdout.splitlines()[-1].strip("= ")}]


def peak_bytes_of(action: Callable[[], object], device: torch.device) -> int | None:
    """Returns the peak of memory during an action; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    action()
    return torch.cuda.max_memory_allocated(device)


def measure_kernels(device: torch.device, quick: bool) -> Iterator[Row]:
    """Measures one layer of experts with each kernel, forward and backward."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    shape = LayerShape(tokens=8192, top_k=8, dim=2048, ffn=1024, experts=64, held=8)
    if quick:
        shape = LayerShape(tokens=64, top_k=2, dim=32, ffn=16, experts=4, held=2)
    layer = Layer(shape, device, precision)
    for name in KERNELS:
        try:
            kernel = try_kernel(name, device, precision)
        except ConfigError as exc:
            yield {"kernel": name, "missing": str(exc)}
            continue
        error = layer.distance(kernel, LoopKernel())
        if not error < 5e-2:
            raise RuntimeError(f"kernel {name} is off by {error:.2%}")
        seconds = seconds_of(partial(layer.compute, kernel), device)
        yield {
            "kernel": name,
            "source": kernel.source,
            "ms": 1e3 * seconds,
            "tokens_per_second": shape.tokens / seconds,
            "peak_bytes": peak_bytes_of(partial(layer.compute, kernel), device),
            "relative_error": error,
        }


def measure_losses(device: torch.device, quick: bool) -> Iterator[Row]:
    """Measures the output layer with its loss and gradients; rows of the second vocabulary need padding."""
    rows, dim = (64, 16) if quick else (8192, 2048)
    for vocabulary in (320, 301) if quick else (50304, 151665):
        free_memory(device)
        yield measure_loss(device, rows, dim, vocabulary)


def measure_loss(device: torch.device, rows: int, dim: int, vocabulary: int) -> Row:
    """Measures one size."""
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, generator=generator, device=device)
    hidden_ND = draw((rows, dim)).requires_grad_()
    weight_VD = draw((vocabulary, dim)).mul_(dim**-0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
    targets[::5] = IGNORED_TARGET

    def step() -> tuple[Tensor, ...]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, *_ = linear_loss(hidden_ND, weight_VD, targets, 1e-4)
        return torch.autograd.grad(loss, (hidden_ND, weight_VD))

    return {"vocabulary": vocabulary, "ms": 1e3 * seconds_of(step, device), "peak_bytes": peak_bytes_of(step, device)}


def new_model(case: StepCase, device: torch.device) -> SparseModel:
    """Builds the model as a peer does, with random weights."""
    model = SparseModel(
        build_empty_model(case.run.model.type, case.run.model.settings),
        range(case.held),
        case.kernel,
        case.foreign,
        foreign_storage=new_storage(case.storage, device),
    )
    checkpoint_activations(model.module, case.checkpointing)
    model.module.to(device)
    largest = max(block.size for block in model.layout.blocks)
    drawn_N = np.random.default_rng(0).standard_normal(largest, dtype=np.float32) * np.float32(0.02)
    for block in model.layout.blocks:
        # All experts differ; drawing each of them takes a minute at 2B.
        model.write_block(block.index, np.roll(drawn_N[: block.size], block.index))
    if case.compiled:
        compile_layers(model.module)
    return model


def gradients_of(case: StepCase, model: SparseModel, device: torch.device, precision: str) -> Gradients:
    """Returns what computes the gradients of this case."""

    def refuse(kind: str, detail: str) -> None:
        raise RuntimeError(detail)

    weights = loss_weights(case.run.training)
    return Gradients(
        model, weights, case.micro_batch, device=device, autocast=partial(autocast, device, precision), warn=refuse
    )


def batch_of(case: StepCase) -> Any:
    """Draws a batch (B, S) of random tokens."""
    shape = case.micro_batch * case.micro_batches, case.run.training.sequence_length
    return np.random.default_rng(1).integers(0, min(256, case.run.model.vocab_size), shape)


def compare_precisions(device: torch.device, quick: bool) -> list[Row]:
    """Compares loss and gradients of a small model under bf16 with those in fp32."""
    case = next(step_cases(quick=True))
    losses, norms, flats = {}, {}, {}
    for precision in ("fp32", "bf16"):
        model = new_model(case, device)
        losses[precision] = gradients_of(case, model, device, precision).compute(batch_of(case), progress=0.0)
        grads = [p.grad.flatten().double() for _, p in model.trainable_parameters() if p.grad is not None]
        flats[precision] = torch.cat(grads)
        norms[precision] = flats[precision].norm().item()
    of_loss = losses["bf16"] / losses["fp32"] - 1
    of_gradients = (flats["bf16"] - flats["fp32"]).norm().item() / norms["fp32"]
    if not (abs(of_loss) < 0.01 and of_gradients < 0.2):
        raise RuntimeError(f"bf16 differs from fp32: loss {of_loss:+.2%}, gradients {of_gradients:.1%}")
    return [{"loss": losses["fp32"], "change_of_loss": of_loss, "change_of_gradients": of_gradients}]


def compare_storage(device: torch.device, quick: bool) -> Iterator[Row]:
    """Compares steps with other peers' experts elsewhere with a step with them on the device."""
    case = replace(next(step_cases(quick)), held=1)
    expected, peak = torch.empty(0), 0
    for storage in ("device", "host") if device.type == "cuda" else ("device",):
        model = new_model(replace(case, storage=storage), device)
        gradients = gradients_of(case, model, device, "fp32")
        for _ in range(2):  # the first step teaches the prefetcher the order of layers
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            gradients.compute(batch_of(case), progress=0.0)
        flat = torch.cat([p.grad.flatten() for _, p in model.trainable_parameters() if p.grad is not None]).cpu()
        row: Row = {"storage": storage, "peak_bytes": None, "relative_error": 0.0}
        if device.type == "cuda":
            row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        if storage == "device":
            expected, peak = flat, row["peak_bytes"]
        else:
            row["relative_error"] = ((flat - expected).norm() / expected.norm()).item()
            if not row["relative_error"] < 1e-4:  # a GPU's attention adds in any order
                raise RuntimeError(f"gradients with {storage} are off by {row['relative_error']:.2%}")
            if device.type == "cuda" and not row["peak_bytes"] < peak:
                raise RuntimeError(f"{storage} takes {row['peak_bytes']:,} bytes, and device {peak:,}")
        yield row
        del model, gradients


def plan_step(case: StepCase, device: torch.device, precision: str) -> tuple[StepCase, int]:
    """Returns the step with as many sequences at a time as fit, at most its own, and the planned bytes."""
    shape = StepShape(
        num_held=case.held,
        foreign_experts=case.foreign,
        foreign_storage=case.storage,
        precision=precision,
        activation_checkpointing=case.checkpointing,
        on_gpu=device.type == "cuda",
    )
    room = 0.9 * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    while True:
        training = replace(case.run.training, batch_size=case.micro_batch * case.micro_batches)
        planned = step_memory(replace(case.run, training=training), shape, case.micro_batch).peak
        if planned < room or case.micro_batch == 1:
            return case, planned
        case = replace(case, micro_batch=case.micro_batch // 2)


def measure_step(case: StepCase, device: torch.device) -> Row:
    """Measures a peer's step."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    case, planned = plan_step(case, device, precision)
    batch_BS = batch_of(case)
    model = new_model(case, device)
    gradients = gradients_of(case, model, device, precision)
    optimiser = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step() -> None:
        gradients.compute(batch_BS, progress=0.5)
        torch.nn.utils.clip_grad_norm_([p for _, p in model.trainable_parameters()], 1.0)
        optimiser.step()

    seconds = seconds_of(step, device)
    held_rows = int(model.pop_routed_tokens()[:, : case.held].sum()) // (WARM_UP + REPEATS)
    flops = ModelFlops.of(model, batch_BS.shape[1]).step(batch_BS.size, held_rows)
    peak = peak_flops(device, precision)
    measured = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "step": case.name,
        "weights": model.layout.num_elements,
        "held": case.held,
        "precision": precision,
        "foreign": case.foreign,
        "storage": case.storage,
        "checkpointing": case.checkpointing,
        "kernel": case.kernel,
        "micro_batch": case.micro_batch,
        "tokens": batch_BS.size,
        "ms": 1e3 * seconds,
        "tokens_per_second": batch_BS.size / seconds,
        "teraflops": flops.model / seconds / 1e12,
        "mfu": None if peak is None else flops.model / seconds / peak,
        "planned_bytes": planned,
        "measured_bytes": measured,
        "planned_by_measured": None if measured is None else planned / measured,
    }


def measure_steps(device: torch.device, quick: bool) -> Iterator[Row]:
    """Measures the steps, one model at a time."""
    for case in step_cases(quick):
        try:
            try_kernel(case.kernel, device, "bf16" if device.type == "cuda" else "fp32")
        except ConfigError as exc:
            yield {"step": case.name, "kernel": case.kernel, "missing": str(exc)}
            continue
        free_memory(device)
        yield measure_step(case, device)


CHECKS: dict[str, Callable[[torch.device, bool], Iterable[Row]]] = {
    "kernels": measure_kernels,
    "storage": compare_storage,
    "losses": measure_losses,
    "bf16": compare_precisions,
    "steps": measure_steps,
    "tests": run_tests,
}


def carry_out(device: torch.device, options: argparse.Namespace) -> dict[str, Row]:
    """Runs the checks and prints their rows as they come."""
    started, results = time.monotonic(), dict[str, Row]()
    for name in options.checks:
        begun, rows, error = time.monotonic(), list[Row](), None
        print(f"{name}:")
        try:
            if begun - started > LAST_START_S:
                raise RuntimeError("left out: no time is left")
            free_memory(device)
            for row in CHECKS[name](device, options.quick):
                rows.append(row)
                print("  " + ", ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
        except Exception as exc:  # a check may fail in any way; the others still count
            error = f"{type(exc).__name__}: {' '.join(str(exc).split())}"
        seconds = time.monotonic() - begun
        results[name] = {"rows": rows, "seconds": seconds} | ({} if error is None else {"error": error})
        print(f"  {error or 'passed'} ({seconds:.1f} s)", flush=True)
        # What is known so far: a lent machine may be gone before the last check.
        content = {"device": device_name(device), "torch": torch.__version__, "quick": options.quick, "checks": results}
        save(options.json, content)
    return results


def device_name(device: torch.device) -> str:
    """Returns what the driver calls a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main() -> int:
    """Runs the checks; returns 1 if one of them failed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes; works without a GPU")
    parser.add_argument("--checks", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument("--json", type=Path, default=Path("runs/gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.quick:
        print("gpu_check: torch finds no CUDA device on this machine; --quick runs on a CPU", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    print(f"{device_name(device)}, torch {torch.__version__}")
    results = carry_out(device, options)
    return 1 if any("error" in result for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
