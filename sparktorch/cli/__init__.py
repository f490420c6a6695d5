"""The command line, `python -m sparktorch`, and job files in YAML."""
