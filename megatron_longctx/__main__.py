"""The command: `megatron-longctx`, or `python -m megatron_longctx`."""

import signal


def main() -> int:
    """Run the command. While its modules are imported, Ctrl-C ends the process; Python would print a traceback."""
    default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if default:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli import cli

    if default:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
