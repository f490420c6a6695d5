"""Classifiers of images, from a model of Hugging Face's or from random weights."""
