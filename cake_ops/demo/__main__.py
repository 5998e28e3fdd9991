"""Entry point of ``python -m cake_ops.demo``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
