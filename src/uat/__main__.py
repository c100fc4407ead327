"""Entry point of `uat` and `python -m uat`; Ctrl-C ends with one line, even while modules are being imported."""

from uat import terminal


def main() -> None:
    with terminal.interrupts_end_at_once("uat"):
        from uat.cli import main as command
    command()


if __name__ == "__main__":
    main()
