"""The command line where no `sparktorch` is on the PATH: `python -m sparktorch`."""

import sys

from sparktorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
