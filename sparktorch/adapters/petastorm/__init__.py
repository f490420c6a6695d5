"""Reads Petastorm data sets without the petastorm package."""

from sparktorch.adapters.petastorm.decoder import reader_batches

__all__ = ["reader_batches"]
