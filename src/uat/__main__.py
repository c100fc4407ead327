"""`python -m uat` is the command line, and so is `uat`. Ctrl-C ends it with one line, while it is imported as well."""

from uat import terminal


def main() -> None:
    with terminal.interrupts_end_at_once("uat"):
        from uat.cli import main as command
    command()


if __name__ == "__main__":
    main()
