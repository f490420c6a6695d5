"""Runs `sparktorch doctor` with the settings of a submission: spark-submit jobs/doctor.py."""

import sys

from sparktorch.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
