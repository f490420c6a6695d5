"""Runs `sparktorch run` with the settings of a submission: spark-submit jobs/run.py script.py."""

import sys

from sparktorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
