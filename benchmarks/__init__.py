"""What sparktorch costs beside what one would write without it: `python -m benchmarks.NAME`."""
