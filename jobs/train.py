"""Runs `sparktorch train` with the settings of a submission: spark-submit jobs/train.py conf/digits.yaml."""

import sys

from sparktorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
