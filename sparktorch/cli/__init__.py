"""The command line, `sparktorch`, and job files in YAML."""
