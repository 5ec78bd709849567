"""From a row to the packets that show it: the index of all videos of a dataset."""
