"""Data sets of Petastorm, read without it."""

from sparktorch.data.petastorm.decoder import reader_batches

__all__ = ["reader_batches"]
