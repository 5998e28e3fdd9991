"""``python -m cake_ops.bench COMMAND``: one module per command, each with its arguments and main."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import grouped, host, layers, merge, router

COMMANDS = {
    "grouped": (grouped, "grouped GEMM: three passes and checkpointed steps against their peers"),
    "router": (router, "FP32 router GEMM: three passes and training steps against FP32 libraries"),
    "layers": (layers, "MoE layers of transformers on cake against transformers' own"),
    "host": (host, "host time of an eager call, against budgets"),
    "merge": (merge, "join the JSON files of several runs, or print one again"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cake_ops.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    args = parser.parse_args(argv)
    return COMMANDS[args.command][0].main(args)


if __name__ == "__main__":
    sys.exit(main())
