"""Writing LeRobot datasets from arrays."""
