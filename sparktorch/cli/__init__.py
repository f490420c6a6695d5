"""`python -m sparktorch`, and training jobs as YAML files."""
