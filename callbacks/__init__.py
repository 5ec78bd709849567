"""Measurement of a training run: data wait, throughput, MFU, and the record they leave in the run folder."""
