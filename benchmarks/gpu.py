"""What a training step costs on a GPU: seconds, samples/s, MFU and memory, case by case.

    python benchmarks/gpu.py gr00t [--size released|tiny] [--batch 64] [--modes stock,lean] [--compile off,on]
    python benchmarks/gpu.py cosmos3 [--size released|tiny] [--samples 4] [--layers N] [--cases full:on,...]
    both with [--device cuda|cpu] [--steps 10] [--limit-s 540] [--json FILE]

Weights are random: nothing is downloaded. gpu_gr00t.py and gpu_cosmos3.py say what a step of theirs is. Every case is a
process of its own, so that its memory is its own. The step time is that of `--steps` steps between two waits for the
device, behind warm-up; `first step` holds compilation and the kernels' first use. Peak memory is the allocator's on a
GPU and the process's on a CPU. MFU counts model FLOPs (frozen parts forward only) over the peak of the device's name,
and is absent where that is unknown. A case that `--limit-s` leaves no time for is a row that says so.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_cosmos3  # noqa: E402
import gpu_gr00t  # noqa: E402
import torch  # noqa: E402
from gpu_steps import in_processes  # noqa: E402

MODELS: dict[str, Any] = {"gr00t": gpu_gr00t, "cosmos3": gpu_cosmos3}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="model", required=True)
    cuda = torch.cuda.is_available()
    for name, module in MODELS.items():
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if cuda else "cpu")
        command.add_argument("--steps", type=int, default=10)
        command.add_argument("--limit-s", type=float, default=540)
        command.add_argument("--json", type=Path)
        command.add_argument("--case", help="one case in this process; prints JSON")
    arguments = parser.parse_args(argv)
    model = MODELS[arguments.model]
    if wrong := model.problem(arguments):
        parser.error(wrong)
    if arguments.device == "cuda" and not cuda:
        parser.error("--device cuda: there is no GPU here; --device cpu --size tiny runs everywhere")
    if arguments.case:
        print(json.dumps(model.run_case(arguments, arguments.case)))
        return
    rows = in_processes(Path(__file__), arguments, model.cases(arguments), model.table)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    print(f"{model.title(arguments)}, {device}, PyTorch {torch.__version__}")
    print(model.table(rows))
    if arguments.json:
        found = {"device": device, "torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
