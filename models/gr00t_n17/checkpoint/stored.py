"""Old name of `models.common.stored`."""

from models.common.stored import StoredTensors

__all__ = ["StoredTensors"]
