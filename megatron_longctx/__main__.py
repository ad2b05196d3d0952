"""`python -m megatron_longctx`: the command."""

from .verbs.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
