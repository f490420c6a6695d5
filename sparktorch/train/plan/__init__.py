"""What a training takes of a worker: memory, and bytes sent."""
