"""Pipeline parallelism: a module's forward pass is recorded, cut into stages, and run by torch's schedules."""
