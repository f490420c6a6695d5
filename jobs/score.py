"""Runs `sparktorch score` with the settings of a submission: spark-submit jobs/score.py conf/digits.yaml."""

import sys

from sparktorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["score", *sys.argv[1:]]))
