"""`python -m devicemap`: the command line."""

import sys

from devicemap.cli import main

if __name__ == "__main__":
    sys.exit(main())
