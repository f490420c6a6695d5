"""The Spark ML interface: estimators, models and their Params. Camel case is used here and nowhere below."""
