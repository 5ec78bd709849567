"""Byte storage: a local folder or an S3 prefix, read by key and byte range, under a policy for what goes wrong."""
