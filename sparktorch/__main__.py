"""`python -m sparktorch`."""

import sys

from sparktorch.cli import main

if __name__ == "__main__":
    sys.exit(main())
