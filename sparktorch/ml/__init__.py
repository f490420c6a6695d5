"""The Spark ML interface: estimators, models and their Params. Only this package uses camelCase names."""
