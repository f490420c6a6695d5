"""From the Params of an estimator to the barrier job, and who is told of its progress."""
