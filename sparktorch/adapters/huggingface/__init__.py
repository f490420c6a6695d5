"""Models of transformers from folders and configurations, called by name; their losses, weights and tokenizers."""
