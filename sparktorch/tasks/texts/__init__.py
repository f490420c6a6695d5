"""Classifiers of text that go on from a model of Hugging Face's."""
