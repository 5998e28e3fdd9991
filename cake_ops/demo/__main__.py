"""Entry point of ``python -m cake_ops.demo``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # the model may write what the terminal cannot show
    raise SystemExit(main())
