"""`python -m uat` is the command line."""

from uat.cli import main

if __name__ == "__main__":
    main()
