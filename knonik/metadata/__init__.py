"""What `meta/` says about a dataset: schema, episodes, cameras, tasks, for all LeRobot versions."""
