"""Imported by a server that forks ranks: their first client of S3 takes less time."""

from warm_python import make_s3_client

make_s3_client()
