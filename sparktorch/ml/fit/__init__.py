"""The steps of `fit`: from the Params to the barrier job, and its listeners."""
